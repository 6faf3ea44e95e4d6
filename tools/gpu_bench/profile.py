"""Where the time of a step goes: kernels on the device, functions on the host."""

from __future__ import annotations

import cProfile
import pstats
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from specbench.engine.llm_engine import LLMEngine
from specbench.errors import UserError
from specbench.run_config import SHAPES

from .cases import Drafting, Settings, submit_batch, synchronize
from .sections import Bench

_NUM_STEPS, _NUM_KERNELS, _NUM_FUNCTIONS = 12, 22, 25


def profile_steps(bench: Bench, case: str) -> None:
    """Steps of SHAPE[:PROPOSER:K] at every batch size, after the prompts: wall, device, kernels; host by function."""
    shape, _, rest = case.partition(":")
    proposer, _, drafts = rest.partition(":")
    if shape not in SHAPES or (drafts and not drafts.isdigit()) or (proposer and not drafts):
        raise UserError(f"--profile: {case} is not SHAPE[:PROPOSER:K]; shapes are {', '.join(SHAPES)}")
    drafting = Drafting(proposer or "none", int(drafts or 0))
    engine = bench.shelf.engine(bench.settings, bench.folder(shape), drafting)
    for batch in bench.settings.batch_sizes:
        print(f"\n-- {case} batch {batch}", flush=True)
        profile_batch(engine, bench.settings, batch)


def profile_batch(engine: LLMEngine, settings: Settings, batch: int) -> None:
    """Steps of an engine after the prompts; of several ranks, rank 0's."""
    num_output = 4 * _NUM_STEPS + 16
    submit_batch(engine, settings, batch, num_output, seed=0)
    while engine.has_requests:
        _, step = engine.step()
        if step is not None and not step.num_prefill_tokens and step.num_decode_requests == batch:
            break
    bare_s = _wall(engine, settings)
    print(f"step {1e3 * bare_s:.3f} ms without a profiler")
    _profile_device(engine, settings, bare_s)
    _profile_host(engine, settings)
    while engine.has_requests:
        engine.step()


def _wall(engine: LLMEngine, settings: Settings) -> float:
    """Mean seconds of a few steps."""
    synchronize(settings.device)
    start_s = time.perf_counter()
    _few_steps(engine)
    synchronize(settings.device)
    return (time.perf_counter() - start_s) / _NUM_STEPS


def _few_steps(engine: LLMEngine) -> None:
    for _ in range(_NUM_STEPS):
        if engine.has_requests:
            engine.step()


def _profile_device(engine: LLMEngine, settings: Settings, bare_s: float) -> None:
    if settings.device.type != "cuda":
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        _few_steps(engine)
        synchronize(settings.device)
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    added = added_time(spans)
    busy_s = sum(added.values()) / 1e6 / _NUM_STEPS
    counts = Counter(name for _, _, name in spans)
    print(
        f"device busy {1e3 * busy_s:.3f} ms a step ({busy_s / bare_s:.0%} of it), {len(spans) / _NUM_STEPS:.0f} "
        "kernels and copies; of each, what it adds to the time line"
    )
    for name, us in sorted(added.items(), key=lambda one: -one[1])[:_NUM_KERNELS]:
        print(f"  {us / _NUM_STEPS:9.1f} us {counts[name] / _NUM_STEPS:7.1f} x  {name[:120]}")


def added_time(spans: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """Spans (start, end, name) in order of start -> by name, by how much each ended later than all before it, the gap
    before it left out. A kernel that starts early waits for the one before it; that wait is not its own."""
    added: dict[str, float] = defaultdict(float)
    latest = 0.0
    for start, end, name in spans:
        added[name] += max(end - max(start, latest), 0.0)
        latest = max(latest, end)
    return added


def _profile_host(engine: LLMEngine, settings: Settings) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    _few_steps(engine)
    synchronize(settings.device)
    profiler.disable()
    stats = pstats.Stats(profiler)
    rows = sorted(stats.stats.items(), key=lambda item: -item[1][2])[:_NUM_FUNCTIONS]  # type: ignore[attr-defined]
    print("host, ms a step (own, with callees), calls a step:")
    for (file, line, name), (_, calls, own_s, total_s, _) in rows:
        place = "/".join(file.split("/")[-3:])
        own_ms, total_ms = 1e3 * own_s / _NUM_STEPS, 1e3 * total_s / _NUM_STEPS
        print(f"  {own_ms:8.3f} {total_ms:8.3f} {calls / _NUM_STEPS:8.1f}  {place}:{line} {name}")
