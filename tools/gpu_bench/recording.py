"""What recording costs: blocks of steps with it and blocks without, of the same batch.

Recording is: a row for each request of a step, a record of the step, and both in the journal of a run directory. In a
step without it the rows and the record go nowhere.

What counts is the time from the end of one step to the end of the next, as the engine stamps them. The time that a call
of `step` takes would not do: with steps that overlap, whatever the host does behind the end of a step lengthens that
call and shortens the next by as much, so that the calls tell the host's work and not what it costs.

Four blocks make a group, in the order ABBA or BAAB by a coin, so that a step that lengthens evenly with its context
counts for both alike; where it lengthens by a jump (all contexts reach another tile of keys at once) one group is off,
either way, and the median does not mind. Of two groups in a row, in one A records and B does not; in the other neither
does, which shows how far apart the measurement finds two things that are the same.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path

from specbench.engine.llm_engine import LLMEngine
from specbench.generate import GenerateResult
from specbench.record_columns import RequestSteps
from specbench.records import EngineStep, RequestRecord
from specbench.run_directory import Journal, RunDirectory

from .cases import Settings, submit_batch, synchronize

#: Steps of a block, and its first ones, which do not count: the host's work of a step shows one or two steps later.
BLOCK_STEPS, NUM_LEFT_OUT = 6, 2
_GROUP_STEPS = 4 * BLOCK_STEPS
_CONFIDENCE = 0.95


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
class Shares:
    """Relative differences, one a group of blocks: their median, and an interval that holds it."""

    median: float
    low: float
    high: float
    num_groups: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Shares:
        """Of one difference or more. The interval is between order statistics, by the binomial law of the counts below
        the median: the narrowest such with a chance of 95 %, or all that there are."""
        ordered = sorted(differences)
        rank = _order_statistic(len(ordered))
        return cls(statistics.median(ordered), ordered[rank], ordered[-1 - rank], len(ordered))

    def text(self) -> str:
        return f"{self.median:+.2%} [{self.low:+.2%}, {self.high:+.2%}] of {self.num_groups} groups"


def _order_statistic(count: int) -> int:
    """The rank from either end up to which as few values lie as a median may have outside of its interval."""
    rank, outside = 0, 2 / 2**count
    while rank + 1 < (count + 1) // 2 and outside + 2 * comb(count, rank + 1) / 2**count <= 1 - _CONFIDENCE:
        rank += 1
        outside += 2 * comb(count, rank) / 2**count
    return rank


@dataclass(frozen=True, slots=True)
class RecordingCost:
    """What blocks with and without showed."""

    #: With over without.
    share: Shares
    #: The same of blocks that are alike: what the measurement makes of no difference.
    null: Shares
    step_s: float
    #: Median host time between the end of a step and the next call, with and without.
    host_with_s: float
    host_without_s: float


@dataclass(frozen=True, slots=True)
class Group:
    """Four blocks."""

    #: Whether the order is BAAB.
    begins_with_b: bool
    #: Whether A records no more than B.
    is_null: bool
    #: Seconds from end to end of the steps that count.
    a_s: list[float] = field(default_factory=list)
    b_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Blocks:
    """Times of one run of a batch."""

    coins: random.Random
    groups: list[Group] = field(default_factory=list)
    #: recorded -> seconds of host time behind the end of a step
    host_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    num_steps: int = 0

    def __post_init__(self) -> None:
        self._begin_group()

    def _begin_group(self) -> None:
        is_second = len(self.groups) % 2 == 1
        is_null = not self.groups[-1].is_null if is_second else self.coins.random() < 0.5
        self.groups.append(Group(self.coins.random() < 0.5, is_null))

    @property
    def is_a(self) -> bool:
        """Whether the step to come belongs to A."""
        return (self.num_steps % _GROUP_STEPS // BLOCK_STEPS in (0, 3)) != self.groups[-1].begins_with_b

    @property
    def is_recorded(self) -> bool:
        """Whether the step to come is."""
        return self.is_a and not self.groups[-1].is_null

    def add(self, passed_s: float, host_s: float) -> None:
        """The step that came."""
        group = self.groups[-1]
        if self.num_steps % BLOCK_STEPS >= NUM_LEFT_OUT:
            (group.a_s if self.is_a else group.b_s).append(passed_s)
            self.host_s[self.is_recorded].append(host_s)
        self.num_steps += 1
        if self.num_steps % _GROUP_STEPS == 0:
            self._begin_group()

    def differences(self, is_null: bool) -> list[float]:
        """A over B of whole groups."""
        whole = [group for group in self.groups[:-1] if group.is_null == is_null]
        return [statistics.mean(group.a_s) / statistics.mean(group.b_s) - 1 for group in whole]


def recording_cost(engine: LLMEngine, settings: Settings, batch: int, num_output: int, rounds: int) -> RecordingCost:
    """Of `rounds` runs of a batch. `num_output` must leave room for two groups of four blocks."""
    runs = []
    for number in range(rounds):
        directory = RunDirectory.create(settings.scratch / f"recording_{number}")
        with directory.open_journal() as journal:
            runs.append(_run(engine, settings, batch, num_output, journal, random.Random(number)))
    real, null = ([one for run in runs for one in run.differences(is_null)] for is_null in (False, True))
    if not real or not null:
        raise ValueError(f"{num_output} output tokens hold no two groups of {_GROUP_STEPS} steps; ask for more")
    seconds = [one for run in runs for group in run.groups for one in (*group.a_s, *group.b_s)]
    host = {is_on: statistics.median([one for run in runs for one in run.host_s[is_on]]) for is_on in (True, False)}
    return RecordingCost(Shares.of(real), Shares.of(null), statistics.median(seconds), host[True], host[False])


def _run(
    engine: LLMEngine, settings: Settings, batch: int, num_output: int, journal: Journal, coins: random.Random
) -> Blocks:
    submit_batch(engine, settings, batch, num_output, seed=0)
    for running in engine._running.values():
        running.verify_steps = SwitchedSteps(running.request.request_id)
    blocks, previous_end_s = Blocks(coins), None
    synchronize(settings.device)
    while engine.has_requests:
        SwitchedSteps.is_on = blocks.is_recorded
        finished, step = engine.step()
        if SwitchedSteps.is_on and step is not None:
            journal.append_engine_step(step)
        host_end_s = engine.clock()
        if step is not None and not finished and not step.num_prefill_tokens and step.num_decode_requests == batch:
            if previous_end_s is not None:
                blocks.add(step.end_s - previous_end_s, host_end_s - step.end_s)
            previous_end_s = step.end_s
        _journal(journal, finished)
    SwitchedSteps.is_on = True
    return blocks


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
