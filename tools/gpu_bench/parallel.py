"""Steps of a model on one GPU and on several: with NCCL's sums, and with those over the GPUs' memory.

Belongs here: engines on ranks, what a sum takes by itself, speed-ups against their goals. Does not belong here: how a
step is timed (cases.py), floors of one GPU (floors.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.distributed import Store

from specbench.engine.config import EngineConfig
from specbench.engine.engines import Engines
from specbench.engine.execution.peer_memory import RowKind
from specbench.engine.execution.rank_groups import LOOPBACK, RankGroups, join_groups
from specbench.engine.execution.rank_processes import RankProcesses
from specbench.engine.layers.norm import RMSNorm
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.models.registry import load_model_config
from specbench.engine.parallel_engine import ParallelEngine
from specbench.engine.shard import Shard
from specbench.errors import UserError
from specbench.run_config import SHAPES

from .cases import ON_GPU, Drafting, Settings, StepTime, engine_config, measure_step, run_batch
from .ceilings import Ceilings, measure_ceilings
from .engine_fields import engine_fields
from .floors import ShapeBytes, kv_read, shape_bytes
from .goals import PARALLEL_SPEEDUP, Verdict, quotient
from .main import conclude, open_device
from .profile import profile_batch
from .shapes import expert_counts, open_shape, shape_folder

#: Of one rank, and what sums over several can be made by on GPUs and on a CPU.
ALONE = "1"
WAYS, CPU_WAYS = ("nccl", "one_shot"), ("gloo",)
#: Sums of a graph, and replays of it.
_NUM_SUMS, _NUM_REPLAYS = 64, 20
_TIMEOUT_S = 120.0
#: Tokens of a text that are compared.
_NUM_FIRST = 4


@dataclass(frozen=True, slots=True)
class ParallelStep:
    """A step on so many ranks."""

    #: ALONE, or how sums are made.
    way: str
    time: StepTime
    floor_s: float
    #: Of one sum of a step, the norm behind it left out; None of one rank, and where it was not timed.
    sum_us: float | None


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="qwen3_8b and inkling_8b; the latter with --mtp")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, help="how sums over ranks are made")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--outputs", type=int, nargs=2, default=[128, 256], help="tokens of the shorter and longer run")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--runs", type=int, default=3, help="median of")
    parser.add_argument("--mtp", type=int, default=0, help="drafts of MTP modules a step, none of them accepted")
    parser.add_argument("--small", action="store_true", help="tiny shapes, texts and batches: whether it runs")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine", nargs="*", default=[], metavar="FIELD=VALUE", help="the engine's own settings")
    parser.add_argument("--no-sums", action="store_true", help="do not time sums by themselves")
    parser.add_argument("--profile", action="store_true", help="kernels and host functions of a step, too")
    parser.add_argument("-o", "--output", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    try:
        return _run(parse(arguments))
    except UserError as error:
        print(f"bench_parallel: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    device = open_device("cuda:0" if options.device == "cuda" else options.device)
    if options.ranks < 1:
        raise UserError(f"--ranks {options.ranks}: must be 1 or more")
    shapes = options.shapes or (["inkling_8b"] if options.mtp else ["qwen3_8b", "inkling_8b"])
    with TemporaryDirectory() as scratch:
        settings = Settings(
            device=device,
            num_prompt=24 if options.small else options.prompt,
            num_outputs=(8, 16) if options.small else tuple(options.outputs),
            num_runs=options.runs,
            batch_sizes=(1, 2) if options.small else tuple(options.batches),
            scratch=Path(scratch),
            is_small=options.small,
            engine=engine_fields(options.engine, device, ON_GPU if device.type == "cuda" else {}),
        )
        ways = options.ways if device.type == "cuda" else CPU_WAYS
        ceilings = measure_ceilings(settings.device, options.small)
        print(f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s; {options.ranks} ranks\n{_HEADER}", flush=True)
        drafting = Drafting("mtp_multi", options.mtp) if options.mtp else Drafting()
        verdicts: list[Verdict] = []
        rows: dict[str, list[ParallelStep]] = {}
        for shape in shapes:
            measured = _measure_shape(
                settings,
                ceilings,
                shape,
                drafting,
                options.ranks,
                ways,
                has_sums=not options.no_sums,
                has_profile=options.profile,
            )
            rows[shape] = list(measured)
            verdicts += [] if options.small or options.mtp else speedup_verdicts(shape, rows[shape])
    if options.output:
        options.output.write_text(json.dumps({s: [asdict(row) for row in of] for s, of in rows.items()}, indent=1))
    return conclude(verdicts, None, is_trial=options.small)


_HEADER = (
    f"{'shape':<14}{'sums':<10}{'batch':>6}{'step ms':>9}{'spread':>8}{'floor':>9}{'ratio':>10}{'speedup':>9}"
    f"{'a sum us':>10}{'target':>8}{'verify':>8}{'draft':>8}{'prompts':>9}"
)


def _measure_shape(
    settings: Settings,
    ceilings: Ceilings,
    shape: str,
    drafting: Drafting,
    num_ranks: int,
    ways: Sequence[str],
    *,
    has_sums: bool,
    has_profile: bool,
) -> Iterator[ParallelStep]:
    """Every batch on one rank, then on several in each way; printed as they come."""
    folder = shape_folder(shape, settings.scratch if settings.is_small else None)
    weights = shape_bytes(open_shape(folder), *expert_counts(open_shape(folder)))
    if drafting.num_drafts > len(weights.modules):
        raise UserError(f"--mtp: {shape} has {len(weights.modules)} modules, not {drafting.num_drafts}")
    config = engine_config(settings, folder, drafting)
    alone: dict[int, float | None] = {}
    firsts: list[list[list[int]]] = []
    sums = _sums_us(settings, folder, num_ranks, ways) if has_sums else {}
    with closing(Engines()) as engines:
        engines.start_ranks(replace(config, shard=Shard(0, num_ranks)))  # they import while one rank is measured
        for way in (ALONE, *ways):
            size = 1 if way == ALONE else num_ranks
            with _started(engines, settings, config, size, way) as engine:
                firsts.append(_first_tokens(engine, settings, max(settings.batch_sizes)))
                said = same_texts(firsts[0], firsts[-1]) + " one rank"
                if way == ALONE:
                    said = same_texts(firsts[0], _first_tokens(engine, settings, 1)) + " the batch, prompt by prompt"
                print(f"   ({way}: {said})", flush=True)
                for batch in settings.batch_sizes:
                    measured = measure_step(engine, settings, batch)
                    floor_s = _floor_s(ceilings, weights, engine, batch, drafting.num_drafts, settings.mean_context)
                    step = ParallelStep(way, measured, floor_s, sums.get((way, batch)))
                    alone.setdefault(batch, measured.step_s)
                    _print_step(shape, step, alone[batch])
                    if has_profile:
                        profile_batch(engine, settings, batch)
                    yield step


def _first_tokens(engine: LLMEngine, settings: Settings, at_once: int) -> list[list[int]]:
    """How each text of the largest batch begins, so many prompts at once: by the prompt's step, and by a few of
    decoding."""
    texts: list[list[int]] = []
    num_texts = max(settings.batch_sizes)
    for first in range(0, num_texts, at_once):
        batch = min(at_once, num_texts - first)
        run = run_batch(engine, settings, batch, num_output=_NUM_FIRST, seed=0, first=first)
        by_name = {int(result.record.request_id): result.output_token_ids for result in run.results}
        texts += [by_name[index] for index in sorted(by_name)]
    return texts


def same_texts(texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> str:
    """How many begin alike, and how many with the same token. In bf16 what rounds otherwise decides near ties of random
    weights otherwise: one rank's own texts in batches of another size are the yardstick."""
    pairs = list(zip(texts, others, strict=True))
    num_same = sum(text == other for text, other in pairs)
    num_first = sum(text[0] == other[0] for text, other in pairs)
    return f"{num_same} of {len(pairs)} texts begin, {num_first} with the same token, as those of"


def _floor_s(
    ceilings: Ceilings, weights: ShapeBytes, engine: LLMEngine, batch: int, num_drafts: int, context: int
) -> float:
    """What one rank must read: its share of weights, and keys and values of its heads."""
    size, num_rows = engine.config.shard.size, batch * (num_drafts + 1)
    num_bytes = weights.target_read(num_rows) + (weights.draft_read(num_drafts) if num_drafts else 0.0)
    kv_bytes = batch * kv_read(engine.memory.specs, "target", context)
    return ceilings.floor_s(num_bytes / size + kv_bytes, weights.target_operations(num_rows) / size)


def _print_step(shape: str, step: ParallelStep, alone_s: float | None) -> None:
    def ms(value: float | None) -> str:
        return "n/a" if value is None else f"{1e3 * value:.3f}"

    def times(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.2f}"

    found = step.time
    spread = "n/a" if found.spread is None else f"{found.spread:.1%}"
    sum_us = "" if step.sum_us is None else f"{step.sum_us:.1f}"
    print(
        f"{shape:<14}{step.way:<10}{found.batch:>6}{ms(found.step_s):>9}{spread:>8}{ms(step.floor_s):>9}"
        f"{times(quotient(found.step_s, step.floor_s)):>10}{times(quotient(alone_s, found.step_s)):>9}"
        f"{sum_us:>10}{ms(found.target_s):>8}"
        f"{ms(found.verify_s):>8}{ms(found.draft_s):>8}{ms(found.prefill_s):>9}",
        flush=True,
    )


def speedup_verdicts(shape: str, steps: Sequence[ParallelStep]) -> list[Verdict]:
    """Of the shape and the batch that have a goal."""
    by_way = {(step.way, step.time.batch): step.time.step_s for step in steps}
    return [
        Verdict(
            f"{shape}, {way}, batch {batch}: speed-up",
            quotient(by_way[ALONE, batch], by_way[way, batch]),
            least,
            is_least=True,
        )
        for (goal_shape, way, batch), least in PARALLEL_SPEEDUP.items()
        if goal_shape == shape and (way, batch) in by_way
    ]


@contextmanager
def _started(engines: Engines, settings: Settings, config: EngineConfig, size: int, way: str) -> Iterator[LLMEngine]:
    """An engine, warm at every batch size, and nothing left of it."""
    changes: dict[str, Any] = {} if way == ALONE else {"shard": Shard(0, size)}
    if way in WAYS:
        changes["rank_all_reduce"] = way
    start_s = time.perf_counter()
    said: list[str] = []
    engine = engines.start(replace(config, **changes), time.perf_counter, said.append)
    for batch in settings.batch_sizes:
        run_batch(engine, settings, batch, num_output=8, seed=99)
    sums = next((text for text in said if text.startswith("sums")), "one rank")
    ready_s = time.perf_counter() - start_s
    print(f"   ({Path(config.checkpoint).name}: {sums}; ready in {ready_s:.1f} s)", flush=True)
    yield engine
    if isinstance(engine, ParallelEngine):
        engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- A sum by itself


def _sums_us(settings: Settings, folder: Path, num_ranks: int, ways: Sequence[str]) -> dict[tuple[str, int], float]:
    """(way, rows) -> microseconds of one sum with the addition and the norm behind it, less those of the two."""
    if settings.device.type != "cuda":
        return {}
    processes = RankProcesses(num_ranks, None, _TIMEOUT_S, _serve_sums)
    try:
        config = engine_config(settings, folder, Drafting())
        name = processes.announce_engine(replace(config, shard=Shard(0, num_ranks)))
        processes.store.set(f"{name}/batches", " ".join(str(batch) for batch in settings.batch_sizes))
        groups = _join(processes.store, name, config, Shard(0, num_ranks), settings.device)
        found = _time_sums(groups, settings.device, settings.batch_sizes, _hidden_size(config))
        return {key: value for key, value in found.items() if key[0] in ways}
    finally:
        processes.close()


def _serve_sums(store: Store, name: str, config: EngineConfig) -> None:
    """What the other ranks do: the same."""
    device = torch.device(config.device)
    torch.cuda.set_device(device)
    store.set(f"{name}/up/{config.shard.rank}", "1")
    groups = _join(store, name, config, config.shard, device)
    batches = [int(size) for size in store.get(f"{name}/batches").decode().split()]
    _time_sums(groups, device, batches, _hidden_size(config))


def _join(store: Store, name: str, config: EngineConfig, shard: Shard, device: torch.device) -> RankGroups:
    kind = RowKind(_hidden_size(config), torch.bfloat16)
    return join_groups(store, name, shard, device, LOOPBACK, _TIMEOUT_S, kind)


def _hidden_size(config: EngineConfig) -> int:
    return load_model_config(open_shape(Path(config.checkpoint))).hidden_size


@torch.inference_mode()
def _time_sums(
    groups: RankGroups, device: torch.device, batches: Sequence[int], hidden: int
) -> dict[tuple[str, int], float]:
    from specbench.engine.kernels.all_reduce import sum_add_norm

    norm = RMSNorm(torch.ones(hidden, dtype=torch.bfloat16, device=device), 1e-6)
    memory = groups.peer_memory
    found = {}
    for rows in batches:
        x = torch.zeros(rows, hidden, dtype=torch.bfloat16, device=device)
        residual = torch.zeros_like(x)

        local = _replayed_us(partial(norm.of_sum, residual, x))
        found["nccl", rows] = _replayed_us(partial(_sum_by_nccl, groups, norm, residual, x)) - local
        if not isinstance(memory, str):
            by_kernel = partial(sum_add_norm, x, residual, norm.weight, norm.eps, memory.inboxes.rows)
            found["one_shot", rows] = _replayed_us(by_kernel) - local
    return found


def _sum_by_nccl(groups: RankGroups, norm: RMSNorm, residual: torch.Tensor, x: torch.Tensor) -> object:
    return norm.of_sum(residual, groups.parallel.all_reduce(x))


def _replayed_us(work: Callable[[], object]) -> float:
    """One of many calls in a graph, as a step replays them."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_NUM_SUMS):
            work()
    graph.replay()
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    for _ in range(_NUM_REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start_s) / (_NUM_REPLAYS * _NUM_SUMS) * 1e6
