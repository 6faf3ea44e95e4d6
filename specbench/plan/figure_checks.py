"""Whether the figures that gates, a baseline and a searching sweeper name can come out of a run that has not begun.

Does not belong here: judging them (reports/gates.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specbench import __version__
from specbench.errors import UserError
from specbench.evals.task import Task
from specbench.model_choice import ModelChoice
from specbench.records import INTERLEAVED, DataIdentity, ModelIdentity, RunRecord, SampleRecord
from specbench.run_config import RunConfig
from specbench.run_directory import EventLog, RunDirectory


def check_figures(config: RunConfig, choice: ModelChoice, num_modules: int, task: Task) -> None:
    """UserError for a gate that cannot be judged and for a baseline that cannot be read or did not finish."""
    report = config.report
    if report.baseline not in (None, INTERLEAVED):
        assert report.baseline is not None
        _check_baseline(Path(report.baseline))
    if not report.gates:
        return
    from specbench.reports.gates import check_gates, parse_gates
    from specbench.reports.metrics import compute_metrics

    log = EventLog(samples=_samples_to_be(task, config.eval.scorer))
    skeleton = compute_metrics(_record_to_be(config, choice, num_modules, task.data), log)
    gates = parse_gates(report.gates)
    check_gates(gates, skeleton, has_baseline=report.baseline is not None)
    dimensions = skeleton["eval"]["by"]
    for path in (gate.path for gate in gates if gate.path.startswith("eval.by.")):
        if not dimensions:
            raise UserError(
                f"report.gates: {path}: accuracy on {task.data.name} is given by no dimension; name eval.accuracy"
            )


def _check_baseline(directory: Path) -> None:
    status = RunDirectory.open(directory).read_run().status
    if status != "finished":
        raise UserError(f"report.baseline: {directory} is a run that has not finished ({status}); name another")


def _samples_to_be(task: Task, scorer: str | None) -> list[SampleRecord]:
    """One of each kind that accuracy is given by."""
    if scorer is None:
        return []
    kinds = {(sample.category, tuple(sample.groups.items())) for sample in task.samples}
    return [
        SampleRecord(
            sample_id=str(index),
            turn=0,
            repeat=0,
            prompt=None,
            prompt_token_ids=None,
            output_text="",
            reasoning_text="",
            output_token_ids=(),
            reference=None,
            extracted={scorer: None},
            score={scorer: 0.0},
            is_truncated=False,
            category=category,
            groups=dict(groups),
        )
        for index, (category, groups) in enumerate(sorted(kinds, key=str))
    ]


def check_objective(config: RunConfig) -> None:
    """UserError where what a searching sweeper is to be given can be no figure of a job."""
    from specbench.reports.metric_path import check_path
    from specbench.reports.metrics import compute_metrics

    path = config.report.objective
    if path is None:
        raise UserError(
            "report.objective: unset, and hydra/sweeper searches for something; say which path of metrics.json, such "
            "as report.objective=throughput.output_token_per_s"
        )
    data = DataIdentity(config.eval.name, None, None, None, packaged=False)
    choice = ModelChoice(config.model.name, config.model.name, Path(), None, packaged=False)
    try:
        check_path(compute_metrics(_record_to_be(config, choice, 0, data), EventLog()), path)
    except UserError as error:
        raise UserError(f"report.objective: {error}") from error


def _record_to_be(config: RunConfig, choice: ModelChoice, num_modules: int, data: DataIdentity) -> RunRecord:
    """As much of run.json as decides which figures there will be."""
    model = ModelIdentity(choice.requested, choice.ran, None, None, None, choice.packaged)
    return RunRecord(
        status="running",
        config=config.to_dict(),
        command="",
        version=__version__,
        commit=None,
        is_dirty=None,
        hardware={},
        packages={},
        model=replace(model, num_modules=num_modules),
        data=data,
        acceptance_source="engine",
        started_at="",
    )
