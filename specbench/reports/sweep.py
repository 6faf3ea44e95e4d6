"""The report of a sweep: sweep.md, sweep.csv and plots, a row for each job however it ended.

Belongs here: the table of jobs, the sections below it, the files. Does not belong here: what is computed of the jobs
(swept_jobs.py), the cost of a step (cost_model.py), plots (sweep_plots.py).

No speed stands without its job's output check, and a job that failed is a row that says why.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from specbench.reports.cells import decimal_cell, percent_cell
from specbench.reports.comparability import comparability
from specbench.reports.compared_costs import compared_costs
from specbench.reports.compared_run import ComparedRun
from specbench.reports.cost_section import sweep_cost_section
from specbench.reports.markdown import data_title, model_title
from specbench.reports.metric_path import metric_at
from specbench.reports.number_format import NOT_MEASURED, decimal, decimal_range
from specbench.reports.plot_style import Plot, svg_text
from specbench.reports.side_by_side import check_text
from specbench.reports.statistics import MIN_REPEATS
from specbench.reports.sweep_plots import SweepPoint, acceptance_against_k, pareto
from specbench.reports.swept_jobs import JobEnding, SweptJob, comparable_groups, shared_overrides, swept_jobs
from specbench.reports.table import Cell, ReportTable, Section, section_markdown, table_csv, text_cell

SWEEP_FILE, SWEEP_TABLE_FILE, PLOTS_FOLDER = "sweep.md", "sweep.csv", "plots"
#: Column -> address in metrics.json, of the table that is read and of sweep.csv.
_FIGURES = {
    "accuracy": "eval.accuracy",
    "output_token_per_s": "throughput.output_token_per_s",
    "output_token_per_s_per_user": "throughput.output_token_per_s_per_user",
    "acceptance_length": "acceptance.acceptance_length",
    "acceptance_rate": "acceptance.acceptance_rate",
    "ttft_p50_ms": "latency.ttft_ms.p50",
    "tpot_p50_ms": "latency.tpot_ms.p50",
}
_HEADER = (
    *("Job", "Status", "Output check", "Best in"),
    *("Accuracy", "Output tok/s", "Per user", "Speed-up", "Length", "Rate", "TTFT P50 (ms)", "TPOT P50 (ms)"),
)
_WITH_PERCENT = ("accuracy", "acceptance_rate")
_EXITS = {1: "with failures", 3: "a gate failed", 4: "a gate is undecided"}


@dataclass(eq=False)
class SweepReport:
    """What a sweep came to."""

    command: str
    jobs: Sequence[SweptJob]
    #: The sweep's own directory.
    directory: Path
    #: Address in metrics.json of what a searching sweeper was given; None without one.
    objective: str | None

    @classmethod
    def of(cls, endings: Sequence[JobEnding], directory: Path, command: str, objective: str | None) -> SweepReport:
        """Read from the directories of the jobs."""
        return cls(command, swept_jobs(endings), directory, objective)

    @cached_property
    def table(self) -> ReportTable:
        """A row for each job."""
        header = (*_HEADER, *([f"Objective ({self.objective})"] if self.objective else []), "Directory")
        return ReportTable(
            name="jobs",
            title="Jobs",
            header=header,
            rows=tuple(self._row(job) for job in self.jobs),
            num_text_columns=4,
            notes=tuple(_notes(self.jobs)),
        )

    @property
    def markdown(self) -> str:
        """The whole document."""
        return "\n\n".join([self._head, *map(section_markdown, self._sections)]) + "\n"

    @property
    def csv(self) -> str:
        """Unrounded, a column for each override that any job has."""
        keys = sorted({_key(override) for job in self.jobs for override in job.ending.overrides})
        header = (*keys, "status", "exit_code", "error", *_FIGURES, "speedup", "speedup_low", "speedup_high")
        header += ("objective", "output_check", "best_in", "finished_at", "commit", "directory")
        rows = tuple(tuple(map(_plain_cell, self._values(job, keys))) for job in self.jobs)
        return table_csv(ReportTable("sweep", "Sweep", header, rows))

    @cached_property
    def plots(self) -> list[Plot]:
        """Those that have something to show."""
        drawn = [
            pareto([_pareto_point(job) for job in _with_runs(self.jobs)]),
            acceptance_against_k([_point_of_k(job) for job in _with_runs(self.jobs)]),
        ]
        return [plot for plot in drawn if plot is not None]

    @property
    def files(self) -> dict[str, str]:
        """File name -> content."""
        plots = {f"{PLOTS_FOLDER}/{plot.name}.svg": svg_text(plot) for plot in self.plots}
        return {**plots, SWEEP_TABLE_FILE: self.csv, SWEEP_FILE: self.markdown}

    @property
    def _head(self) -> str:
        ended = Counter(job.ending.status for job in self.jobs)
        counts = ", ".join(f"{number} {status}" for status, number in ended.items())
        shared = shared_overrides([job.ending.overrides for job in self.jobs])
        lines = [f"# Sweep of {len(self.jobs)} job{'' if len(self.jobs) == 1 else 's'}: {counts or 'none ran'}"]
        runs = [job.run for job in self.jobs if job.run is not None]
        ran = dict.fromkeys(
            f"{model_title(run.record.model)}; {data_title(run.record.data, run.record.config['eval']['name'])}"
            for run in runs
        )
        lines += list(ran)
        lines += [f"    {self.command}"]
        lines += [f"In every job: {' '.join(f'`{one}`' for one in shared)}"] if shared else []
        return "\n\n".join(lines)

    @cached_property
    def _sections(self) -> list[Section]:
        plots = tuple(f"**{plot.title}**\n\n![{plot.caption}]({PLOTS_FOLDER}/{plot.name}.svg)" for plot in self.plots)
        sections = [
            Section("Jobs", (self.table,)),
            Section("Plots", plots),
            *_cost_sections(self.jobs),
        ]
        return [section for section in sections if section.blocks]

    def _row(self, job: SweptJob) -> tuple[Cell, ...]:
        metrics = None if job.run is None else job.run.metrics
        figures = {name: _figure_cell(name, metrics) for name in _FIGURES}
        speed = ("output_token_per_s", "output_token_per_s_per_user")
        rest = ("acceptance_length", "acceptance_rate", "ttft_p50_ms", "tpot_p50_ms")
        objective = job.ending.objective
        objective_cells = [Cell(objective, NOT_MEASURED if objective is None else f"{objective:.6g}")]
        return (
            text_cell(job.label),
            text_cell(_status(job)),
            text_cell(None if job.run is None else check_text(job.run)),
            Cell(", ".join(job.best_in), ", ".join(job.best_in)),
            figures["accuracy"],
            *(figures[name] for name in speed),
            _speedup_cell(job),
            *(figures[name] for name in rest),
            *(objective_cells if self.objective else []),
            text_cell(self._shown_directory(job)),
        )

    def _shown_directory(self, job: SweptJob) -> str | None:
        """From the sweep's directory, where there is a way."""
        return None if job.ending.directory is None else os.path.relpath(job.ending.directory, self.directory)

    def _values(self, job: SweptJob, keys: Iterable[str]) -> Iterable[float | str | None]:
        """A row of sweep.csv."""
        own = {_key(override): override.partition("=")[2] for override in job.ending.overrides}
        record = None if job.run is None else job.run.record
        yield from (own.get(key) for key in keys)
        yield from (job.ending.status, job.ending.exit_code, job.ending.error)
        yield from (None if job.run is None else _number(job.run.metrics, path) for path in _FIGURES.values())
        yield None if job.speedup is None else job.speedup.value
        yield from (None, None) if job.speedup is None or job.speedup.interval is None else job.speedup.interval
        yield job.ending.objective
        yield None if job.run is None else job.run.metrics["checks"]["output"]["status"]
        yield ", ".join(job.best_in) or None
        yield from (None, None) if record is None else (record.finished_at, record.commit)
        yield None if job.ending.directory is None else str(job.ending.directory)


# ---- The table of jobs


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _plain_cell(value: float | str | None) -> Cell:
    return Cell(value, "")


def _number(metrics: dict, path: str) -> float | None:
    value = metric_at(metrics, path)
    assert value is None or isinstance(value, int | float), path
    return value


def _figure_cell(name: str, metrics: dict | None) -> Cell:
    value = None if metrics is None else _number(metrics, _FIGURES[name])
    return percent_cell(value) if name in _WITH_PERCENT else decimal_cell(value)


def _speedup_cell(job: SweptJob) -> Cell:
    found = job.speedup
    if found is None:
        return Cell(None, "base" if job.is_base else NOT_MEASURED)
    interval = "" if found.interval is None else f" ({decimal_range(found.interval)})"
    return Cell(found.value, f"{decimal(found.value)}{interval}")


def _status(job: SweptJob) -> str:
    """How it ended; of a skipped job when it had finished and under which commit, of a failed one why it failed."""
    ending = job.ending
    if ending.error is not None:
        return f"{ending.status}: {' '.join(ending.error.split())}"
    exit_text = f", {_EXITS[ending.exit_code]}" if ending.exit_code in _EXITS else ""
    if ending.status != "skipped" or job.run is None:
        return f"{ending.status}{exit_text}"
    record = job.run.record
    commit = "outside git" if record.commit is None else f"commit {record.commit[:12]}"
    changes = " with changes" if record.is_dirty else ""
    return f"skipped: finished at {record.finished_at}, {commit}{changes}{exit_text}"


def _notes(jobs: Sequence[SweptJob]) -> Iterable[str]:
    """What the table does not say, and why."""
    runs = [job.run for job in jobs]
    if len(_with_runs(jobs)) < 2 and not any(job.speedup for job in jobs):
        return
    if any(job.is_overlapped for job in jobs):
        yield (
            "**Jobs ran at the same time**: on one machine each slowed the others, and no speed of theirs can be "
            "compared."
        )
    if any(job.speedup for job in jobs):
        yield (
            "Speed-up: output tokens/s over those of the run that took turns with it (report.baseline=none), else of "
            "the job with spec=none and otherwise the same settings."
        )
    else:
        yield "No speed-up: no job with spec=none has otherwise the settings of another one."
    if max((len(group) for group in comparable_groups(runs)), default=0) < 2:
        return
    if any(job.best_in for job in jobs):
        yield (
            "Best in: better than every other job of otherwise the same settings, by more than chance (paired tests, "
            "adjusted by Holm)."
        )
    else:
        yield (
            "No job is marked as the best: none is better than all others of otherwise the same settings by more than "
            "chance."
        )
    if all(run is None or run.metrics["throughput"]["duration_s"] is None or _few_repeats(run) for run in runs):
        yield f"Speed has no interval and is not tested: that takes load.repeats={MIN_REPEATS} or more."
    else:
        yield (
            "Jobs run one after the other, so a drift of the machine is part of what they differ by; "
            "report.baseline=none takes turns."
        )


def _few_repeats(run: ComparedRun) -> bool:
    return len({request.repeat for request in run.columns.requests}) < MIN_REPEATS


def _with_runs(jobs: Sequence[SweptJob]) -> list[SweptJob]:
    return [job for job in jobs if job.run is not None]


# ---- Sections


def _cost_sections(jobs: Sequence[SweptJob]) -> Iterable[Section]:
    """One for each model, data and machine."""
    left = [replace(job.run, label=job.label) for job in jobs if job.run is not None]
    while left:
        base = left[0]
        grounds = [(run, comparability(base, run)) for run in left[1:]]
        same = [run for run, found in grounds if found.is_paired and found.void_of_speed is None]
        costs = compared_costs(base, [pair for pair in grounds if pair[0] in same])
        if costs is not None:
            yield sweep_cost_section(costs)
        left = [run for run in left[1:] if run not in same]


# ---- Points of the plots


def _pareto_point(job: SweptJob) -> SweepPoint:
    """A series for each way of speculating, labelled by what else tells jobs apart."""
    run = job.run
    assert run is not None
    spec = [f"{key.rpartition('.')[2]} {value}" for key, value in job.telling.items() if key.startswith("spec.")]
    return SweepPoint(", ".join([run.label, *spec]), _rest(job), run.metrics)


def _point_of_k(job: SweptJob) -> SweepPoint:
    """A series for each method and whatever else tells jobs apart, without k."""
    run = job.run
    assert run is not None
    rest = _rest(job, is_named=True)
    return SweepPoint(", ".join([run.record.config["spec"]["method"], *([rest] if rest else [])]), "", run.metrics)


def _rest(job: SweptJob, *, is_named: bool = False) -> str:
    """What tells a job apart besides speculation: a value alone speaks for itself in a plot of one such key."""
    rest = {key: value for key, value in job.telling.items() if key.partition(".")[0] != "spec"}
    if len(rest) == 1 and not is_named:
        return next(iter(rest.values()))
    return ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in rest.items())
