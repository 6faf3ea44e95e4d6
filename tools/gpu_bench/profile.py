"""Where the time of a step goes: kernels on the device, functions on the host."""

from __future__ import annotations

import cProfile
import pstats
import time

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
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    busy_s = sum(event.self_device_time_total for event in events) / 1e6 / _NUM_STEPS
    num_kernels = sum(event.count for event in events) / _NUM_STEPS
    print(
        f"device busy {1e3 * busy_s:.3f} ms a step ({busy_s / bare_s:.0%} of it), {num_kernels:.0f} kernels and copies"
    )
    for event in sorted(events, key=lambda one: -one.self_device_time_total)[:_NUM_KERNELS]:
        us = event.self_device_time_total / _NUM_STEPS
        print(f"  {us:9.1f} us {event.count / _NUM_STEPS:7.1f} x  {event.key[:120]}")


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
