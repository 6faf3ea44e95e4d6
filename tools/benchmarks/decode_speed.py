"""Output tokens a second of the engine on real weights, beside transformers, a bare loop, and a server if one is named.

    OMP_PROC_BIND=true python tools/benchmarks/decode_speed.py --checkpoint DIR
    … --server http://127.0.0.1:8000 --server-model NAME

OMP_PROC_BIND keeps each thread on its core, as vLLM keeps its own: it is worth about 4 % where cores are few.

Plain greedy decoding of 1 and of 8 requests at once, prompts of 120 random tokens, 128 output tokens each, prefill
included. Everyone gets the same prompts, in turn, `--repeats` times, each after a pause; a ratio is the median of the
ratios of neighbours.

- transformers: `generate` on one batch, in the same process and type.
- bare loop: the engine's own layers on one static batch, without scheduler, request state or records.
- server: /v1/completions with token ids, all requests at once over HTTP (vLLM's `ignore_eos`), counted by its usage.

Exits 1 when the engine is slower than the server, or than transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from bare_loop import BLOCK_SIZE, BareLoop

from specbench.engine.config import EngineConfig
from specbench.engine.llm_engine import LLMEngine
from specbench.generate import GenerateRequest, SamplingParams

BATCH_SIZES = (1, 8)
NUM_PROMPT, NUM_OUTPUT = 120, 128
#: Above this load average, other processes take part in the result.
MAX_QUIET_LOAD = 2.5
MAX_SERVER_SECONDS = 600
#: A vLLM worker keeps a core busy for about a second after its last token, and would slow down whoever comes next.
PAUSE_SECONDS = 2.5

#: A peer runs a batch of prompts of NUM_PROMPT tokens to NUM_OUTPUT output tokens each, and returns tokens and seconds.
Peer = Callable[[list[list[int]]], tuple[int, float]]


def make_prompts(batch_size: int, vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (NUM_PROMPT,), generator=generator).tolist() for _ in range(batch_size)]


class EnginePeer:
    def __init__(self, checkpoint: Path, dtype: str, batch_size: int) -> None:
        self.engine = LLMEngine(
            EngineConfig(
                checkpoint=str(checkpoint),
                dtype=dtype,
                device="cpu",
                max_model_len=512,
                max_num_seqs=batch_size,
                max_num_batched_tokens=2048,
                block_size=BLOCK_SIZE,
                num_blocks=None,
                num_speculative_tokens=0,
                proposer="none",
            )
        )

    def __call__(self, prompts: list[list[int]]) -> tuple[int, float]:
        start = time.perf_counter()
        for index, ids in enumerate(prompts):
            sampling = SamplingParams(NUM_OUTPUT, ignore_eos=True)
            request = GenerateRequest(str(index), str(index), sampling, prompt_token_ids=tuple(ids))
            self.engine.add_request(request, start)
        num_tokens = 0
        while self.engine.has_requests:
            num_tokens += sum(len(result.output_token_ids) for result in self.engine.step()[0])
        return num_tokens, time.perf_counter() - start


class TransformersPeer:
    def __init__(self, checkpoint: Path, dtype: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]]) -> tuple[int, float]:
        ids = torch.tensor(prompts)
        start = time.perf_counter()
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_OUTPUT,
            min_new_tokens=NUM_OUTPUT,
            do_sample=False,
        )
        return output[:, ids.shape[1] :].numel(), time.perf_counter() - start


class ServerPeer:
    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/") + "/v1/completions"
        self.model = model

    def __call__(self, prompts: list[list[int]]) -> tuple[int, float]:
        start = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            counts = list(pool.map(self._complete, prompts))
        return sum(counts), time.perf_counter() - start

    def _complete(self, prompt: list[int]) -> int:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": NUM_OUTPUT,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            self.url, json.dumps(body).encode(), headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=MAX_SERVER_SECONDS) as response:
            return json.load(response)["usage"]["completion_tokens"]


def measure(peers: dict[str, Peer], batch_size: int, vocab_size: int, repeats: int) -> dict[str, list[float]]:
    """Tokens a second of each peer at each repeat, after one that is not counted."""
    rates: dict[str, list[float]] = {name: [] for name in peers}
    for repeat in range(repeats + 1):
        prompts = make_prompts(batch_size, vocab_size, seed=repeat)
        for name, peer in peers.items():
            time.sleep(PAUSE_SECONDS)
            num_tokens, seconds = peer(prompts)
            assert num_tokens == batch_size * NUM_OUTPUT, f"{name} emitted {num_tokens} tokens"
            if repeat:
                rates[name].append(num_tokens / seconds)
    return rates


def report(batch_size: int, rates: dict[str, list[float]]) -> dict[str, float]:
    """Print a line a peer; returns peer -> median ratio of the engine's rate to its own."""
    ratios = {}
    for name, values in rates.items():
        pairs = zip(rates["engine"], values, strict=True)
        ratios[name] = statistics.median(engine / peer for engine, peer in pairs)
        spread = f"{min(values):.1f} .. {max(values):.1f}"
        print(
            f"{batch_size:<7}{name:<14}{statistics.median(values):>9.1f}{spread:>18}{ratios[name]:>16.2f}", flush=True
        )
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--server", help="base URL of a running OpenAI-compatible server with the same weights")
    parser.add_argument("--server-model", default="smollm2", help="the name that it serves them under")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.dtype}, {arguments.threads} threads, load average {os.getloadavg()[0]:.2f} at the start")
    print(f"{'batch':<7}{'':<14}{'tok/s':>9}{'range':>18}{'engine / this':>16}")
    transformers_peer = TransformersPeer(arguments.checkpoint, arguments.dtype)
    missed = []
    for batch_size in BATCH_SIZES:
        engine = EnginePeer(arguments.checkpoint, arguments.dtype, batch_size)
        bare = BareLoop(engine.engine, batch_size, NUM_PROMPT, NUM_OUTPUT)
        peers: dict[str, Peer] = {"engine": engine, "bare loop": lambda prompts, bare=bare: bare.run(prompts)[:2]}
        peers["transformers"] = transformers_peer
        if arguments.server:
            peers["server"] = ServerPeer(arguments.server, arguments.server_model)
        rates = measure(peers, batch_size, engine.engine.model_config.vocab_size, arguments.repeats)
        ratios = report(batch_size, rates)
        goals = [name for name in ("transformers", "server") if ratios.get(name, 1.0) < 1.0]
        missed += [f"batch {batch_size}: engine / {name} is {ratios[name]:.2f}" for name in goals]
    load = os.getloadavg()[0]
    if load > MAX_QUIET_LOAD:
        print(f"load average {load:.2f} at the end: others were running, and take part in these figures")
    for line in missed:
        print("missed:", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
