"""A sweep around its jobs: its directory, what each job leaves there, and the report when all have ended.

Belongs here: everything of a sweep that is neither Hydra's (cli.py) nor one job's (benchmark.py). Does not belong here:
what the report says (reports/sweep.py).

A launcher may run a job in another process, and a sweeper may keep what jobs return to itself. So each job writes how
it ended into the sweep's directory, and the report is made from these files alone:

    outputs/sweeps/2026-11-30_04-26-41/    sweep.json, sweep.md, sweep.csv, plots/, jobs/0000.json, what Hydra and its
                                           plugins write
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from specbench import benchmark, terminal
from specbench.benchmark import Invocation
from specbench.errors import UserError
from specbench.outcome import Outcome
from specbench.reports.metric_path import number_at
from specbench.reports.swept_jobs import JobEnding
from specbench.run_config import RunConfig

JOBS_FOLDER = "jobs"
PLAN_FILE = "sweep.json"


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep set out to do."""

    command: str
    #: The overrides of every job, where they are known beforehand: one that left no word is a row of the report too.
    jobs: Sequence[Sequence[str]]
    #: Address in metrics.json of what a searching sweeper is given; None without one.
    objective: str | None


def new_directory(output_root: str) -> Path:
    """Where a sweep that begins now is to be reported; a second one within a second gets a number."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path, number = Path(output_root, "sweeps", stamp).absolute(), 1
    while path.exists():
        number += 1
        path = path.with_name(f"{stamp}_{number}")
    return path


def run_job(config: RunConfig, invocation: Invocation, directory: Path, number: int) -> float | None:
    """Run job `number` of the sweep in `directory` and leave word of how it ended.

    Returns the objective; None where none is set or the job has none to give.
    """
    outcome = benchmark.run_sweep_job(config, invocation)
    objective, error = _objective(outcome, config.report.objective)
    ending = {
        "job": invocation.job_name,
        "overrides": list(invocation.overrides),
        "status": outcome.status,
        "exit_code": outcome.exit_code,
        "directory": None if outcome.directory is None else str(outcome.directory.absolute()),
        "error": outcome.error,
        "objective": objective,
    }
    if error is not None:
        terminal.say(f"specbench: job {invocation.job_name}: {error}")
    _write(directory / JOBS_FOLDER / f"{number:04}.json", ending)
    return objective


def begin(directory: Path, plan: SweepPlan) -> None:
    """Leave word of what is to run."""
    content = {"command": plan.command, "jobs": [list(job) for job in plan.jobs], "objective": plan.objective}
    _write(directory / PLAN_FILE, content)


def is_sweep(directory: Path) -> bool:
    return (directory / PLAN_FILE).is_file()


def report(directory: Path) -> list[int]:
    """Write and print the report of the jobs that have run, and return the exit code of each."""
    from specbench.reports.sweep import SWEEP_FILE, SweepReport

    plan = _read_plan(directory)
    endings = _endings(directory, plan.jobs)
    made = SweepReport.of(endings, directory, plan.command, plan.objective)
    for name, content in made.files.items():
        _write_text(directory / name, content)
    terminal.print_table(made.table)
    print(f"report: {directory / SWEEP_FILE}")
    return [ending.exit_code for ending in endings]


def _read_plan(directory: Path) -> SweepPlan:
    path = directory / PLAN_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return SweepPlan(content["command"], content["jobs"], content["objective"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); run the sweep again, finished jobs are skipped") from error


def _objective(outcome: Outcome, path: str | None) -> tuple[float | None, str | None]:
    """The job's objective, or why it has none."""
    if path is None or outcome.metrics is None:
        return None, None
    try:
        value = number_at(outcome.metrics, path)
    except UserError as error:
        return None, f"report.objective: {error}"
    return (None, f"report.objective: {path} was not measured") if value is None else (float(value), None)


def _endings(directory: Path, planned: Sequence[Sequence[str]]) -> list[JobEnding]:
    """In the order in which the jobs were dealt."""
    found = {int(path.stem): _read(path) for path in sorted((directory / JOBS_FOLDER).glob("*.json"))}
    lost = {number: _lost(overrides) for number, overrides in enumerate(planned)}
    return [ending for _, ending in sorted({**lost, **found}.items())]


def _lost(overrides: Sequence[str]) -> JobEnding:
    return JobEnding(tuple(overrides), "lost", 1, None, "it left no word: it was killed, or never began")


def _read(path: Path) -> JobEnding:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    directory = content["directory"]
    return JobEnding(
        overrides=tuple(content["overrides"]),
        status=content["status"],
        exit_code=content["exit_code"],
        directory=None if directory is None else Path(directory),
        error=content["error"],
        objective=content["objective"],
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    _write_text(path, json.dumps(content, indent=2) + "\n")


def _write_text(path: Path, content: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); say output_root=DIR") from error
