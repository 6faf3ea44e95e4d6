"""Warm-up and the measured requests: of one run, or of two that take turns repeat by repeat.

Belongs here: which requests run when on which engine, the clock, and that each is in its run's journal at once. Does
not belong here: what comes before and after (benchmark.py), how an engine runs them.

Of two runs in turns each has a clock that stands still while the other has the machine: its times, and all that is
computed from them, are those of a run by itself.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from specbench import terminal
from specbench.arrivals import ClosedLoad, make_load
from specbench.evals.task import Task, score_result, warmup_requests
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult, Load, Target
from specbench.plan import Plan
from specbench.record_columns import EngineStepColumns
from specbench.records import EngineStep, RunRecord
from specbench.run_directory import EventLog, Journal, RunDirectory
from specbench.submission import next_turn


class RunClock:
    """Seconds since the run's start. A resumed run goes on behind its last recorded time."""

    def __init__(self, from_s: float = 0.0) -> None:
        self._zero_s = time.perf_counter() - from_s
        self._stands_at_s: float | None = None

    def __call__(self) -> float:
        return (time.perf_counter() if self._stands_at_s is None else self._stands_at_s) - self._zero_s

    @contextmanager
    def standing(self) -> Iterator[None]:
        """No time passes inside."""
        self._stands_at_s = time.perf_counter()
        try:
            yield
        finally:
            self._zero_s += time.perf_counter() - self._stands_at_s
            self._stands_at_s = None


@dataclass(frozen=True, slots=True, eq=False)
class StartedRun:
    """A run whose engine is loaded."""

    plan: Plan
    engine: Target
    directory: RunDirectory
    record: RunRecord
    #: What an interrupted run has recorded.
    log: EventLog
    clock: RunClock

    @property
    def unfinished(self) -> list[GenerateRequest]:
        """What is left to run; a turn behind one that is done has the conversation so far in front."""
        done = {request.request_id for request in self.log.requests if request.error is None}
        ended = {request.request_id for request in self.log.requests}
        answers = {(one.sample_id, one.turn, one.repeat): one.output_text for one in self.log.samples}
        whole: dict[str, GenerateRequest] = {}
        for request in self.plan.requests:
            if request.follows in done:
                before = whole[request.follows]
                answer = answers[before.sample_id, before.turn, before.repeat]
                request = next_turn(before, answer, request)
            whole[request.request_id] = request
        return [request for request in whole.values() if request.request_id not in ended]


class Recorder:
    """Writes every finished request and step to the journal, and keeps the measured results for the output check."""

    def __init__(self, task: Task, journal: Journal, first_engine_step: int) -> None:
        self.measured: list[GenerateResult] = []
        self._task = task
        self._journal = journal
        self._first_engine_step = first_engine_step

    def finished(self, result: GenerateResult) -> None:
        """One finished request, failed ones included."""
        is_warmup = result.record.is_warmup
        sample = None if is_warmup else score_result(self._task, result)
        self._journal.append_request(result.record, result.verify_steps, sample, self._first_engine_step)
        if not is_warmup:
            # Log-probabilities of prompts are in the sample by now, and an object a token: too much to keep of a run.
            self.measured.append(dataclasses.replace(result, prompt_logprobs=None))

    def stepped(self, step: EngineStep) -> None:
        """One step of the engine."""
        if self._first_engine_step:
            step = dataclasses.replace(step, engine_step=self._first_engine_step + step.engine_step)
        self._journal.append_engine_step(step)


def measure(runs: Sequence[StartedRun]) -> list[list[GenerateResult]]:
    """Warm each run up, then run the first repeat of each, then the second of each, and so on.

    Returns each run's measured results; everything is in the journals when this returns.
    """
    with ExitStack() as journals:
        turns = [_Turns(run, journals.enter_context(run.directory.open_journal())) for run in runs]
        for turn in turns:
            with _all_others_standing(turn, turns):
                turn.warm_up()
        for repeat in range(max(run.plan.config.load.repeats for run in runs)):
            for turn in turns:
                with _all_others_standing(turn, turns):
                    turn.run_repeat(repeat)
        return [turn.recorder.measured for turn in turns]


class _Turns:
    """One run's share of the measuring."""

    def __init__(self, run: StartedRun, journal: Journal) -> None:
        self.run = run
        self.recorder = Recorder(run.plan.task, journal, first_engine_step=_next_engine_step(run.log))
        self._by_repeat = {
            repeat: list(requests)
            for repeat, requests in itertools.groupby(run.unfinished, key=lambda request: request.repeat)
        }

    def warm_up(self) -> None:
        """Nothing where nothing is left to run."""
        config = self.run.plan.config
        assert config.load.warmup is not None
        warmup = _warmup(self.run.plan, config.load.warmup, self.run.log) if self._by_repeat else []
        if warmup:
            terminal.status(f"warming up {config.spec.name} with {len(warmup)} requests")
            # As many at once as will be, and at once: warm-up is no part of the load.
            load = ClosedLoad(config.side_concurrency)
            self.run.engine.generate(warmup, load, GenerateListener(self.recorder.finished, self.recorder.stepped))

    def run_repeat(self, repeat: int) -> None:
        """What is left of one repeat."""
        requests, config = self._by_repeat.get(repeat), self.run.plan.config
        if not requests:
            return
        if config.load.reset_cache:
            self.run.engine.reset_prefix_cache()
        number = f" {repeat + 1}/{config.load.repeats}" if config.load.repeats > 1 else ""
        with terminal.LiveProgress(f"{config.spec.name}{number}", len(requests)) as progress:
            self.run.engine.generate(requests, self._load(repeat), _recorded_and_shown(self.recorder, progress))

    def _load(self, repeat: int) -> Load:
        """The load of what is left of a repeat: each request in its own place in the timetable."""
        config = self.run.plan.config
        firsts = [one for one in self.run.plan.requests if one.repeat == repeat and one.follows is None]
        left = {request.request_id for request in self._by_repeat[repeat]}
        return make_load(
            config.load,
            seed=config.sampling.seed,
            repeat=repeat,
            num_requests=len(firsts),
            places=[place for place, request in enumerate(firsts) if request.request_id in left],
        )


@contextmanager
def _all_others_standing(turn: _Turns, turns: Sequence[_Turns]) -> Iterator[None]:
    with ExitStack() as standing:
        for other in turns:
            if other is not turn:
                standing.enter_context(other.run.clock.standing())
        yield


def _recorded_and_shown(recorder: Recorder, progress: terminal.LiveProgress) -> GenerateListener:
    def finished(result: GenerateResult) -> None:
        recorder.finished(result)
        progress.finished(result)

    def stepped(step: EngineStep) -> None:
        recorder.stepped(step)
        progress.stepped(step)

    return GenerateListener(finished, stepped)


def _warmup(plan: Plan, count: int, log: EventLog) -> list[GenerateRequest]:
    """Warm-up requests; a resumed run warms up anew, under ids of its own."""
    requests = warmup_requests(plan.task, plan.config.sampling, count)
    num_before = sum(request.is_warmup for request in log.requests)
    return [dataclasses.replace(request, request_id=f"{request.request_id}-{num_before}") for request in requests]


def _next_engine_step(log: EventLog) -> int:
    return 1 + int(EngineStepColumns.of(log.engine_steps).engine_step.max(initial=-1))
