"""What the engine costs beside its model's forward, on the packaged checkpoint.

    python tools/benchmarks/engine_overhead.py

Two tables, each measured in one run, interleaved:

1. Host time outside the model's forward (schedule, batch building, verification, commit, records) as a share of the
   step, at batch 8. Goal: under 25 %.
2. Tokens a second of the engine, speculation off, against the same layer code in a bare greedy loop: one static batch,
   each request's slots contiguous, no scheduler, no request state, no records. Goal: at least 0.85 at batch 1 and 8.

Exits 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bare_loop import BareLoop

from specbench.engine.config import EngineConfig
from specbench.engine.llm_engine import LLMEngine
from specbench.generate import GenerateRequest, SamplingParams

CHECKPOINT = Path(__file__).parents[2] / "specbench" / "assets" / "inkling_nano"
NUM_PROMPT, NUM_OUTPUT = 40, 80
BLOCK_SIZE = 16
MAX_OVERHEAD = 0.25
MIN_RATIO = 0.85


def build_engine(checkpoint: Path, k: int, batch_size: int) -> LLMEngine:
    return LLMEngine(
        EngineConfig(
            checkpoint=str(checkpoint),
            dtype="float32",
            device="cpu",
            max_model_len=256,
            max_num_seqs=batch_size,
            max_num_batched_tokens=1024,
            block_size=BLOCK_SIZE,
            num_blocks=None,
            num_speculative_tokens=k,
            proposer="mtp_multi" if k else "none",
        )
    )


def prompts(batch_size: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (NUM_PROMPT,), generator=generator).tolist() for _ in range(batch_size)]


def run_engine(engine: LLMEngine, token_ids: list[list[int]]) -> tuple[int, float, list[list[int]]]:
    """Tokens emitted, seconds and output of one batch, prefill included."""
    sampling = SamplingParams(NUM_OUTPUT, ignore_eos=True)
    start = time.perf_counter()
    for index, ids in enumerate(token_ids):
        name = str(index)
        engine.add_request(GenerateRequest(name, name, sampling, prompt_token_ids=tuple(ids)), time.perf_counter())
    results = {}
    while engine.has_requests:
        results |= {result.record.request_id: result.output_token_ids for result in engine.step()[0]}
    seconds = time.perf_counter() - start
    return len(token_ids) * NUM_OUTPUT, seconds, [results[str(index)] for index in range(len(token_ids))]


class ForwardClock:
    """Seconds spent inside the model's own code."""

    def __init__(self, engine: LLMEngine):
        self.seconds = 0.0
        self._depth = 0
        heads = ("compute_logits", "compute_bests")
        owners = [(engine.model, ("embed", "forward", *heads))]
        if engine.runner.proposer is not None:
            owners.append((engine.runner.proposer.modules.modules, ("forward_module", *heads)))
        for owner, names in owners:
            for name in names:
                setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable) -> Callable:
        def timed(*args: object) -> object:
            start = time.perf_counter()
            self._depth += 1
            result = function(*args)
            self._depth -= 1
            if self._depth == 0:  # a module's head is the target's: count it once
                self.seconds += time.perf_counter() - start
            return result

        return timed


def measure_overhead(checkpoint: Path, repeats: int) -> list[float]:
    """Share of the step outside the forward at batch 8: speculation off, then 8 drafts. Prints a table."""
    print(f"{'batch 8':<12}{'step ms':>9}{'forward ms':>12}{'outside':>9}")
    shares = []
    for k in (0, 8):
        engine = build_engine(checkpoint, k, 8)
        token_ids = prompts(8, engine.model_config.vocab_size)
        run_engine(engine, token_ids)
        clock = ForwardClock(engine)
        step_seconds, num_steps = 0.0, 0
        for _ in range(repeats):
            first_step = engine.scheduler._next_step
            step_seconds += run_engine(engine, token_ids)[1]
            num_steps += engine.scheduler._next_step - first_step
        share = 1 - clock.seconds / step_seconds
        shares.append(share)
        name = "plain" if k == 0 else f"{k} drafts"
        step_ms, forward_ms = 1e3 * step_seconds / num_steps, 1e3 * clock.seconds / num_steps
        print(f"{name:<12}{step_ms:>9.2f}{forward_ms:>12.2f}{share:>9.1%}")
    return shares


def measure_against_bare_loop(checkpoint: Path, repeats: int) -> list[float]:
    """Median ratio of tokens a second, engine over bare loop, at batch 1 and 8. Prints a table."""
    print(f"\n{'batch':<12}{'engine tok/s':>13}{'bare tok/s':>12}{'ratio':>8}")
    ratios = []
    for batch_size in (1, 8):
        engine = build_engine(checkpoint, 0, batch_size)
        bare = BareLoop(engine, batch_size, NUM_PROMPT, NUM_OUTPUT)
        token_ids = prompts(batch_size, engine.model_config.vocab_size)
        assert run_engine(engine, token_ids)[2] == bare.run(token_ids)[2], "both loops emit the same tokens"
        pairs = []
        for _ in range(repeats):
            num_tokens, engine_seconds, _ = run_engine(engine, token_ids)
            _, bare_seconds, _ = bare.run(token_ids)
            pairs.append((num_tokens / engine_seconds, num_tokens / bare_seconds))
        ratio = statistics.median(engine_rate / bare_rate for engine_rate, bare_rate in pairs)
        ratios.append(ratio)
        engine_rate, bare_rate = (statistics.median(rates) for rates in zip(*pairs, strict=True))
        print(f"{batch_size:<12}{engine_rate:>13.0f}{bare_rate:>12.0f}{ratio:>8.2f}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=CHECKPOINT)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shares = measure_overhead(arguments.checkpoint, arguments.repeats)
    ratios = measure_against_bare_loop(arguments.checkpoint, arguments.repeats)
    missed = [
        f"outside the forward: {share:.1%}, goal < {MAX_OVERHEAD:.0%}" for share in shares if not share < MAX_OVERHEAD
    ]
    missed += [f"engine / bare loop: {ratio:.2f}, goal >= {MIN_RATIO}" for ratio in ratios if ratio < MIN_RATIO]
    for line in missed:
        print("missed:", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
