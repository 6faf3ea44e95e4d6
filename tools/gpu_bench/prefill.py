"""Prompts: how many tokens a second go through, and what steps cost that hold chunks of them beside verifications.

Belongs here: the load, and steps by kind. Does not belong here: floors and goals (sections.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specbench.engine.llm_engine import LLMEngine
from specbench.generate import GenerateRequest, SamplingParams
from specbench.records import EngineStep

from .cases import Settings, prompt_ids, run_batch, synchronize


def prompt_token_per_s(engine: LLMEngine, settings: Settings, batch: int) -> float:
    """Prompt tokens a second of a whole batch that gives one token each, the median of the runs."""
    rates = []
    for seed in range(settings.num_runs):
        run = run_batch(engine, settings, batch, num_output=1, seed=seed)
        rates.append(batch * settings.num_prompt / run.seconds)
    return statistics.median(rates)


@dataclass(frozen=True, slots=True)
class StepKind:
    """Steps of one kind in a run of many requests: milliseconds, means over its steps but for the share."""

    name: str
    num_steps: int
    #: Share of the run's time.
    share: float
    num_tokens: float
    interval_ms: float
    #: None where the engine does not measure them.
    target_ms: float | None
    verify_ms: float | None
    draft_ms: float | None
    idle_ms: float | None

    def line(self) -> str:
        parts = (self.target_ms, self.verify_ms, self.draft_ms, self.idle_ms)
        texts = ["n/a" if part is None else f"{part:.3f}" for part in parts]
        return (
            f"{self.name:<24}{self.num_steps:>7}{self.share:>8.1%}{self.num_tokens:>9.1f}{self.interval_ms:>9.3f}"
            + "".join(f"{text:>9}" for text in texts)
        )


KIND_HEADER = (
    f"{'steps':<24}{'number':>7}{'time':>8}{'tokens':>9}{'ms':>9}{'target':>9}{'verify':>9}{'draft':>9}{'idle':>9}"
)


def closed_run(engine: LLMEngine, settings: Settings, batch: int, num_requests: int) -> list[EngineStep]:
    """Steps of `num_requests` requests of which `batch` run at a time: lengths differ, so that prompts come one by one
    between steps of decoding."""
    lengths = _lengths(settings, num_requests)
    waiting = [
        GenerateRequest(
            str(index),
            str(index),
            SamplingParams(length, ignore_eos=True),
            prompt_token_ids=prompt_ids(settings, index, seed=7),
        )
        for index, length in enumerate(lengths)
    ]
    waiting.reverse()
    steps: list[EngineStep] = []
    num_running = 0
    while waiting or engine.has_requests:
        while waiting and num_running < batch:
            engine.add_request(waiting.pop(), engine.clock())
            num_running += 1
        finished, step = engine.step()
        num_running -= len(finished)
        if step is not None:
            steps.append(step)
    synchronize(settings.device)
    return steps


def _lengths(settings: Settings, num_requests: int) -> Iterable[int]:
    shortest, longest = settings.num_outputs[0] // 2, settings.num_outputs[1]
    return [shortest + (37 * index) % (longest - shortest) for index in range(num_requests)]


def step_kinds(steps: Sequence[EngineStep]) -> list[StepKind]:
    """Decoding alone, prompts beside decoding, prompts alone; without the first step."""
    intervals = [(after, _interval_s(before, after)) for before, after in pairwise(steps)]
    total_s = sum(interval_s for _, interval_s in intervals)
    kinds: dict[str, list[tuple[EngineStep, float]]] = {}
    for step, interval_s in intervals:
        kinds.setdefault(_kind(step), []).append((step, interval_s))
    return [_of_kind(name, kinds[name], total_s) for name in sorted(kinds)]


def _interval_s(before: EngineStep, step: EngineStep) -> float:
    """From the end of a step before to the end of the step: on the device, where that is known. The host sees ends
    later, when it has launched the step behind."""
    parts = (step.idle_s, step.target_s, step.verify_s, step.draft_s)
    if step.idle_s is None:
        return step.end_s - before.end_s
    return sum(part or 0.0 for part in parts)


def _kind(step: EngineStep) -> str:
    if not step.num_prefill_tokens:
        return "decoding"
    size = "512 rows or fewer" if step.num_tokens <= 512 else "more rows"
    return f"{'mixed' if step.num_decode_requests else 'prompts'}, {size}"


def _of_kind(name: str, found: list[tuple[EngineStep, float]], total_s: float) -> StepKind:
    steps = [step for step, _ in found]
    spent_s = sum(interval_s for _, interval_s in found)
    return StepKind(
        name=name,
        num_steps=len(steps),
        share=spent_s / total_s,
        num_tokens=statistics.fmean(step.num_tokens for step in steps),
        interval_ms=1e3 * spent_s / len(steps),
        target_ms=_mean_ms(step.target_s for step in steps),
        verify_ms=_mean_ms(step.verify_s for step in steps),
        draft_ms=_mean_ms(step.draft_s for step in steps),
        idle_ms=_mean_ms(step.idle_s for step in steps),
    )


def _mean_ms(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return 1e3 * statistics.fmean(known) if known else None
