"""What splitting a model over GPUs of one machine gains: a decode step on 1 and on N ranks, and what reductions take.

    python tools/benchmarks/tensor_parallel.py --shape qwen3_8b --ranks 2 --batches 1 16 64 [--device cuda] [-o FILE]

Weights are random, steps decode one token a request. A reduction is timed by itself, replayed from a graph as a step
replays it. The last column is a step's time without them, against half (1/N) of one rank's: what is left of the gap.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.engines import Engines
from specbench.engine.execution.rank_groups import LOOPBACK, join_groups
from specbench.engine.execution.rank_processes import RankProcesses
from specbench.engine.models.registry import load_model_config
from specbench.engine.shard import Shard
from specbench.generate import GenerateRequest, SamplingParams
from specbench.model_choice import SHAPES_FOLDER
from specbench.records import EngineStep

_NUM_PROMPT, _NUM_OUTPUT = 64, 160
_NUM_REDUCTIONS, _NUM_REPLAYS = 64, 20


def engine_config(arguments: argparse.Namespace, num_ranks: int, batch: int) -> EngineConfig:
    is_cuda = arguments.device != "cpu"
    return EngineConfig(
        checkpoint=str(SHAPES_FOLDER / arguments.shape),
        dtype="bfloat16" if is_cuda else "float32",
        device=arguments.device,
        max_model_len=512,
        max_num_seqs=batch,
        max_num_batched_tokens=8192,
        block_size=16,
        num_blocks=None,
        num_speculative_tokens=0,
        proposer="none",
        load="random",
        attention_backend="triton" if is_cuda else "torch",
        pipeline_depth=int(is_cuda),
        cuda_graphs=is_cuda,
        shard=Shard(0, num_ranks),
    )


def step_ms(engine: Any, batch: int, num_output: int) -> float:
    """Median time between the ends of two steps in which every request decodes."""
    steps: list[EngineStep] = []
    prompts = [tuple((7 * index + 3 * place) % 490 + 2 for place in range(_NUM_PROMPT)) for index in range(batch)]
    for attempt in ("warm-up", "measured"):
        steps.clear()
        sampling = SamplingParams(num_output, ignore_eos=True)
        requests = [
            GenerateRequest(f"{attempt} {index}", str(index), sampling, prompt_token_ids=prompt)
            for index, prompt in enumerate(prompts)
        ]
        for request in requests:
            engine.add_request(request, arrival_s=0.0)
        while engine.has_requests:
            _, step = engine.step()
            steps += [] if step is None else [step]
    ends = [step.end_s for step in steps if step.num_decode_requests == batch]
    return 1e3 * statistics.median(late - early for early, late in itertools.pairwise(ends))


def reduction_us(device: str, num_ranks: int, rows: int, hidden: int) -> float:
    """One reduction of a step, on rank 0, the others doing the same."""
    processes = RankProcesses(num_ranks, None, 120.0, _serve_reductions)
    try:
        config = engine_config_for_reductions(device, num_ranks, rows, hidden)
        name = processes.announce_engine(config)
        groups = join_groups(processes.store, name, config.shard, _device(device, 0), LOOPBACK, 120.0)
        return _time_reductions(groups.parallel, _device(device, 0), rows, hidden)
    finally:
        processes.close()


def engine_config_for_reductions(device: str, num_ranks: int, rows: int, hidden: int) -> EngineConfig:
    """Sizes of a reduction in the fields that ranks are sent."""
    return EngineConfig("", "bfloat16", device, hidden, rows, 1, 1, None, 0, "none", shard=Shard(0, num_ranks))


def _serve_reductions(store: Any, name: str, config: EngineConfig) -> None:
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store.set(f"{name}/up/{config.shard.rank}", "1")
    groups = join_groups(store, name, config.shard, device, LOOPBACK, 120.0)
    _time_reductions(groups.parallel, device, config.max_num_seqs, config.max_model_len)


def _device(device: str, rank: int) -> torch.device:
    return torch.device(device if device == "cpu" else f"cuda:{rank}")


@torch.inference_mode()
def _time_reductions(parallel: Any, device: torch.device, rows: int, hidden: int) -> float:
    x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
    if device.type == "cpu":
        start_s = time.perf_counter()
        for _ in range(_NUM_REDUCTIONS):
            parallel.all_reduce(x)
        return (time.perf_counter() - start_s) / _NUM_REDUCTIONS * 1e6
    for _ in range(3):
        parallel.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_NUM_REDUCTIONS):
            parallel.all_reduce(x)
    graph.replay()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(_NUM_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / (_NUM_REPLAYS * _NUM_REDUCTIONS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3_8b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--outputs", type=int, default=_NUM_OUTPUT, help="tokens of each request")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    config: Any = load_model_config(Checkpoint.of_config(SHAPES_FOLDER / arguments.shape))
    rows = []
    for batch in arguments.batches:
        times = {}
        for num_ranks in (1, arguments.ranks):
            engines = Engines()
            engine = engines.start(engine_config(arguments, num_ranks, batch), time.perf_counter, lambda message: None)
            times[num_ranks] = step_ms(engine, batch, arguments.outputs)
            engines.close()
            del engine
            if arguments.device != "cpu":
                torch.cuda.empty_cache()
        one, several = times[1], times[arguments.ranks]
        reduction = reduction_us(arguments.device, arguments.ranks, batch, config.hidden_size)
        reductions_ms = 2 * config.num_layers * reduction / 1e3
        rows.append({"batch": batch, "ms_1": one, "ms_n": several, "us_reduction": reduction})
        of_one = one / arguments.ranks
        print(
            f"{arguments.shape} batch {batch:3d}: {one:7.3f} ms on 1, {several:7.3f} ms on {arguments.ranks} "
            f"(x {one / several:.2f}); a reduction {reduction:6.1f} us, {2 * config.num_layers} of them "
            f"{reductions_ms:6.3f} ms; the rest {several - reductions_ms:7.3f} ms, 1/N of one rank's {of_one:7.3f}",
            flush=True,
        )
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
