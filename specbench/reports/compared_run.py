"""One of the runs that stand side by side: its records, its metrics and what it is called.

Belongs here: reading a run for comparison, and labels that tell runs apart. Does not belong here: what differs between
two runs (comparability.py), figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specbench.records import EngineStep, RunRecord, SampleRecord
from specbench.reports.drafted_run import DraftedRun
from specbench.reports.latency import count_devices
from specbench.reports.metrics import metrics_of
from specbench.reports.repeat_speed import repeats_of, speed_by_repeat
from specbench.reports.step_columns import StepColumns, step_columns
from specbench.run_directory import EventLog, RunDirectory

#: Settings that are named in a label before others, if they tell runs apart.
_TELLING = (
    *("spec.rejection_sample_method", "spec.faults", "cache.prefix_caching"),
    *("load.name", "load.rate", "load.burstiness", "load.concurrency", "parallel.name"),
)
#: Settings whose values speak for themselves, beside names of options.
_TOLD_BY_VALUE = ("spec.rejection_sample_method",)
#: Settings that change nothing that is measured.
SILENT_SETTINGS = (
    *("output_root", "dry_run", "strict"),
    *("report.name", "report.formats", "report.gates", "report.baseline", "report.objective"),
)


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRun:
    """A run and everything that a comparison reads of it."""

    label: str
    #: As the user named it.
    directory: str
    record: RunRecord
    metrics: dict
    columns: StepColumns
    samples: Sequence[SampleRecord]
    engine_steps: Sequence[EngineStep]

    @property
    def num_speculative_tokens(self) -> int:
        """k; 0 without speculation."""
        return self.metrics["acceptance"]["num_speculative_tokens"] or 0

    @property
    def is_drafted(self) -> bool:
        """Whether any step had drafts, and its steps are known one by one."""
        acceptance = self.metrics["acceptance"]
        return bool(acceptance["drafts"] and acceptance["by_previous"])

    @property
    def is_greedy(self) -> bool:
        """Whether it is known to have taken the most likely token each time."""
        return self.settings.get("sampling.temperature") == 0

    @property
    def is_sampled(self) -> bool:
        """Whether it is known to have drawn tokens by chance."""
        temperature = self.settings.get("sampling.temperature")
        return isinstance(temperature, int | float) and temperature > 0

    @property
    def num_repeats(self) -> int:
        return len(repeats_of(self.columns))

    @property
    def speed_by_repeat(self) -> list[dict]:
        """`latency` and `throughput` of each repeat, in order, each as in metrics.json."""
        return speed_by_repeat(self.columns, count_devices(self.record.config))

    @property
    def drafted(self) -> DraftedRun:
        """What the explanations of a difference need of it."""
        return DraftedRun(self.label, self.num_speculative_tokens, self.columns, self.samples)

    @property
    def settings(self) -> dict[str, object]:
        """Every setting that can change a figure, under `group.key`."""
        flat = flatten(self.record.config)
        return {key: value for key, value in flat.items() if key not in SILENT_SETTINGS}


def load_run(directory: Path) -> ComparedRun:
    """Read a run directory; figures are computed anew from its event log. Nothing is written."""
    opened = RunDirectory.open(directory)
    return run_of_log(opened.read_run(), opened.read_event_log(), str(directory))


def run_of_log(record: RunRecord, log: EventLog, directory: str) -> ComparedRun:
    """A run from its records."""
    columns = step_columns(log.requests, log.verify_steps)
    metrics = metrics_of(record, log, columns)
    return compared_run(record, metrics, columns, log.samples, log.engine_steps, directory)


def compared_run(
    record: RunRecord,
    metrics: dict,
    columns: StepColumns,
    samples: Sequence[SampleRecord],
    engine_steps: Sequence[EngineStep],
    directory: str,
) -> ComparedRun:
    """A run whose figures are known, labelled by its way of speculating."""
    return ComparedRun(record.config["spec"]["name"], directory, record, metrics, columns, samples, engine_steps)


def with_labels(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """The same runs under labels that are all different: what tells them apart, else a number."""
    labels = [run.label for run in runs]
    told = [
        f"{run.label} ({telling})" if labels.count(run.label) > 1 and (telling := _telling(run, runs)) else run.label
        for run in runs
    ]
    numbered = [
        f"{label} #{told[: index + 1].count(label)}" if told.count(label) > 1 else label
        for index, label in enumerate(told)
    ]
    return [replace(run, label=label) for run, label in zip(runs, numbered, strict=True)]


def flatten(value: object, prefix: str = "") -> dict[str, object]:
    """Nested mappings as one mapping of `outer.inner` to what is no mapping."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat: dict[str, object] = {}
    for key, inner in value.items():
        flat |= flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _telling(run: ComparedRun, runs: Sequence[ComparedRun]) -> str | None:
    """The first setting, of those that all runs of this label have, in which they differ; None where none does."""
    same = [other.settings for other in runs if other.label == run.label]
    shared = set.intersection(*map(set, same))
    for key in [*_TELLING, *sorted(shared)]:
        if key in shared and len({str(settings[key]) for settings in same}) > 1:
            value = _written(run.settings[key])
            own_name = key.rpartition(".")[2]
            return value if key in _TOLD_BY_VALUE or own_name == "name" else f"{own_name} {value}"
    return None


def _written(value: object) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list | tuple) else str(value)
