"""What recording costs: half the steps of the same batch, drawn at random, run without it.

Recording is: a row for each request of a step, a record of the step, and both in the journal of a run directory. In a
step without it the rows and the record go nowhere. Both kinds come from the same minutes and the same contexts, and not
in turns: the engine has two of some buffers, which do take turns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specbench.engine.llm_engine import LLMEngine
from specbench.generate import GenerateResult
from specbench.record_columns import RequestSteps
from specbench.records import EngineStep, RequestRecord
from specbench.run_directory import Journal, RunDirectory

from .cases import Settings, submit_batch, synchronize


class SwitchedSteps(RequestSteps):
    """Takes rows, or with the switch off drops them."""

    is_on = True

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        keep = self.add

        def add(row: Iterable[float]) -> None:
            if SwitchedSteps.is_on:
                keep(row)

        self.add = add


@dataclass(frozen=True, slots=True)
class RecordingCost:
    """Medians over steps of the whole batch."""

    with_s: float
    without_s: float
    num_steps: int

    @property
    def share(self) -> float:
        """Of a step."""
        return self.with_s / self.without_s - 1


def recording_cost(engine: LLMEngine, settings: Settings, batch: int, num_output: int, rounds: int) -> RecordingCost:
    """Alternating steps of a batch, with a journal and without."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds):
        directory = RunDirectory.create(settings.scratch / f"recording_{number}")
        with directory.open_journal() as journal:
            _run(engine, settings, batch, num_output, journal, seconds)
    return RecordingCost(
        statistics.median(seconds[True]), statistics.median(seconds[False]), min(map(len, seconds.values()))
    )


def _run(
    engine: LLMEngine, settings: Settings, batch: int, num_output: int, journal: Journal, seconds: dict[bool, list]
) -> None:
    submit_batch(engine, settings, batch, num_output, seed=0)
    for running in engine._running.values():
        running.verify_steps = SwitchedSteps(running.request.request_id)
    coins = random.Random(0)
    synchronize(settings.device)
    while engine.has_requests:
        SwitchedSteps.is_on = coins.random() < 0.5
        start_s = time.perf_counter()
        finished, step = engine.step()
        if SwitchedSteps.is_on and step is not None:
            journal.append_engine_step(step)
        passed_s = time.perf_counter() - start_s
        if step is not None and not finished and not step.num_prefill_tokens and step.num_decode_requests == batch:
            seconds[SwitchedSteps.is_on].append(passed_s)
        _journal(journal, finished)
    SwitchedSteps.is_on = True


def _journal(journal: Journal, finished: list[GenerateResult]) -> None:
    for result in finished:
        journal.append_request(result.record, result.verify_steps, None)


def host_seconds(batch: int, folder: Path, num_steps: int) -> float:
    """Seconds that recording takes for a step of so many requests, with no engine around it."""
    requests = [RequestSteps(str(index)) for index in range(batch)]
    step = EngineStep(0, 0.0, 0.1, 0, batch, 5 * batch, 1e-4, 5e-3, 1e-3, 2e-3, 1000, 0, 0)
    with RunDirectory.create(folder).open_journal() as journal:
        start_s = time.perf_counter()
        for number in range(num_steps):
            for request in requests:
                request.add((number, number, 4, 2, 3, batch, 0.5))
            journal.append_engine_step(step)
        return (time.perf_counter() - start_s) / num_steps


def request_line_seconds(folder: Path, num_steps: int) -> float:
    """Seconds that writing a finished request of so many steps takes; behind a step, where requests end one by one."""
    steps = RequestSteps("0")
    for number in range(num_steps):
        steps.add((number, 3 * number, 4, 2, 3, 64, number / 130))
    record = RequestRecord("0", "0", 0, 0, False, None, 1024, None, num_steps, "length", 0.1, 0.2, 0.3, 2.3, 0, None)
    with RunDirectory.create(folder).open_journal() as journal:
        start_s = time.perf_counter()
        for _ in range(20):
            journal.append_request(record, steps, None)
        return (time.perf_counter() - start_s) / 20
