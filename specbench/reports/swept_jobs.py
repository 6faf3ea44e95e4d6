"""The jobs of a sweep as data: what each one was, how it ended, what may be said of it beside the others.

Belongs here: reading the jobs, which settings tell them apart, speed-up against the job without speculation, which job
is best. Does not belong here: tables and sentences (sweep.py), plots (sweep_plots.py), running anything.

Jobs are compared where all settings but those of speculation are the same, on the same model, samples and hardware. A
job is the best of these in a figure only where it is better than every other one by more than chance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.errors import UserError
from specbench.records import BASELINE_FOLDER, INTERLEAVED
from specbench.reports.changes import SIGNIFICANCE, Change, tested_accuracy, tested_speed
from specbench.reports.comparability import comparability
from specbench.reports.compared_run import ComparedRun, load_run
from specbench.reports.figures import ACCURACY, OUTPUT_THROUGHPUT, Figure, latency_figures
from specbench.reports.paired_answers import paired_answers
from specbench.reports.speedup import SpeedUp, speedup
from specbench.reports.statistics import holm

#: Groups of settings that may differ between jobs that are compared: speculation, and what is done after the run.
_FREE_GROUPS = ("spec", "report")
#: Figures in which a job can be the best.
BEST_FIGURES = (
    ACCURACY,
    OUTPUT_THROUGHPUT,
    *(one for one in latency_figures() if one.path in ("latency.ttft_ms.p50", "latency.tpot_ms.p50")),
)


@dataclass(frozen=True, slots=True)
class JobEnding:
    """One job of a sweep as it ended."""

    #: As the sweeper dealt them: `+model=inkling_nano`.
    overrides: tuple[str, ...]
    #: "finished", "failed", "skipped", or "lost" where the job left no word of how it ended.
    status: str
    exit_code: int
    directory: Path | None
    #: Why it failed.
    error: str | None
    #: What a sweeper that searches was given.
    objective: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SweptJob:
    """One job, with what it left."""

    ending: JobEnding
    #: Overrides in which it differs from other jobs of the sweep, key -> value.
    telling: dict[str, str]
    #: None where it left no finished run.
    run: ComparedRun | None
    #: Against the run without speculation that took turns with it, else the job without speculation; None where there
    #: is neither, or it is that job.
    speedup: SpeedUp | None
    #: Speed-ups of other jobs are against this one.
    is_base: bool
    #: Labels of the figures in which it is better than all others.
    best_in: tuple[str, ...]
    #: Another job ran at the same time.
    is_overlapped: bool

    @property
    def label(self) -> str:
        """`spec=mtp4 load.concurrency=8`"""
        return " ".join(f"{key}={value}" for key, value in self.telling.items()) or "the only job"


def swept_jobs(endings: Sequence[JobEnding]) -> list[SweptJob]:
    """Read what the jobs left and compare them."""
    telling = tell_apart([ending.overrides for ending in endings])
    runs = [_run_of(ending) for ending in endings]
    speedups = {index: own for index, run in enumerate(runs) if (own := _own_speedup(run)) is not None}
    bases: set[int] = set()
    best: dict[int, list[str]] = {}
    overlapped = overlapping(runs)
    for group in comparable_groups(runs):
        if (base := _base(group, runs)) is not None:
            bases.add(base)
            speedups = _speedups(base, group, runs) | speedups
        is_alone = overlapped.isdisjoint(group)
        for figure in (one for one in BEST_FIGURES if is_alone or one.kind != "speed"):
            if (index := _best(figure, group, runs)) is not None:
                best.setdefault(index, []).append(figure.label)
    return [
        SweptJob(ending, own, run, speedups.get(index), index in bases, tuple(best.get(index, ())), index in overlapped)
        for index, (ending, own, run) in enumerate(zip(endings, telling, runs, strict=True))
    ]


def tell_apart(overrides: Sequence[Sequence[str]]) -> list[dict[str, str]]:
    """Of each job's overrides those in which not all jobs are alike; all of them where there is one job."""
    split = [dict(_key_and_value(one) for one in job) for job in overrides]
    keys = dict.fromkeys(key for job in split for key in job)
    varying = [key for key in keys if len({job.get(key) for job in split}) > 1] or list(keys)
    return [{key: job[key] for key in varying if key in job} for job in split]


def shared_overrides(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Those that all of several jobs have."""
    first = overrides[0] if len(overrides) > 1 else ()
    return [one for one in first if all(one in job for job in overrides)]


def comparable_groups(runs: Sequence[ComparedRun | None]) -> list[list[int]]:
    """Indices of runs that only speculation tells apart. A directory that two jobs name is in a group once."""
    groups: list[list[int]] = []
    seen: set[str] = set()
    for index, run in enumerate(runs):
        if run is None or run.directory in seen:
            continue
        seen.add(run.directory)
        alike = (group for group in groups if _are_alike(_known(runs, group[0]), run))
        found = next(alike, None)
        if found is None:
            groups.append([index])
        else:
            found.append(index)
    return groups


def overlapping(runs: Sequence[ComparedRun | None]) -> set[int]:
    """Indices of runs that began before another one had ended."""
    times = sorted(
        (run.record.started_at, run.record.finished_at or "", index, run.directory)
        for index, run in enumerate(runs)
        if run is not None
    )
    found: set[int] = set()
    for place, (_, finished_at, index, directory) in enumerate(times):
        later = [other for start, _, other, named in times[place + 1 :] if start < finished_at and named != directory]
        found.update([index, *later] if later else [])
    return found


def _key_and_value(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+").partition("=")
    return key, value


def _run_of(ending: JobEnding) -> ComparedRun | None:
    """A finished run that can no longer be read is none."""
    if ending.status not in ("finished", "skipped") or ending.directory is None:
        return None
    try:
        return load_run(ending.directory)
    except UserError:
        return None


def _are_alike(first: ComparedRun, second: ComparedRun) -> bool:
    grounds = comparability(first, second)
    is_void = not grounds.has_paired_answers or grounds.void_of_speed is not None
    return not is_void and _setting(first) == _setting(second)


def _setting(run: ComparedRun) -> dict[str, object]:
    return {key: value for key, value in run.settings.items() if key.partition(".")[0] not in _FREE_GROUPS}


def _known(runs: Sequence[ComparedRun | None], index: int) -> ComparedRun:
    run = runs[index]
    assert run is not None
    return run


def _own_speedup(run: ComparedRun | None) -> SpeedUp | None:
    """Against the run that took turns with it; None where none did."""
    if run is None or run.record.config.get("report", {}).get("baseline") != INTERLEAVED:
        return None
    try:
        return speedup(load_run(Path(run.directory, BASELINE_FOLDER)), run)
    except UserError:
        return None


def _base(group: Sequence[int], runs: Sequence[ComparedRun | None]) -> int | None:
    """The first of a group of several that ran without speculation."""
    plain = (index for index in group if _known(runs, index).record.config["spec"]["method"] == "none")
    return next(plain, None) if len(group) > 1 else None


def _speedups(base: int, group: Sequence[int], runs: Sequence[ComparedRun | None]) -> dict[int, SpeedUp]:
    """Index -> speed-up of each other one of the group."""
    found = {index: speedup(_known(runs, base), _known(runs, index)) for index in group if index != base}
    return {index: one for index, one in found.items() if one is not None}


def _best(figure: Figure, group: Sequence[int], runs: Sequence[ComparedRun | None]) -> int | None:
    """The index of the job whose figure is better than that of every other job of the group; None where chance may be
    behind any of these differences, or nothing was tested."""
    measured = [(value, index) for index in group if (value := figure.value(_known(runs, index).metrics)) is not None]
    if len(measured) < 2:
        return None
    _, best = max(measured) if figure.better == "higher" else min(measured)
    others = [index for _, index in measured if index != best]
    changes = [_tested(figure, _known(runs, other), _known(runs, best)) for other in others]
    p_values = holm([None if change is None else change.p_value for change in changes])
    is_clear = all(p is not None and p <= SIGNIFICANCE for p in p_values)
    return best if is_clear and all(change and change.base != change.new for change in changes) else None


def _tested(figure: Figure, base: ComparedRun, new: ComparedRun) -> Change | None:
    tested: Iterable[Change] = (
        tested_accuracy(paired_answers(base, new)) if figure.path == ACCURACY.path else tested_speed(base, new)
    )
    return next((change for change in tested if change.figure.path == figure.path), None)
