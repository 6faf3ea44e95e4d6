"""Speed of each repeat of a run, the only source of intervals of speed.

Belongs here: a run's rows split by repeat, and the speed figures of each. Does not belong here: intervals
(statistics.py).
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from specbench.reports.compared_run import ComparedRun
from specbench.reports.latency import latency_metrics, throughput_metrics
from specbench.reports.step_columns import StepColumns

#: Columns that are not one value a row, or are worked out anew.
_NOT_ROWS = ("requests", "request", "num_orphan_rows")


def speed_by_repeat(run: ComparedRun) -> list[dict]:
    """`latency` and `throughput` of each repeat, in order, each as in metrics.json."""
    num_devices = run.record.config["parallel"]["tensor_parallel_size"]
    parts = [_of_repeat(run.columns, repeat) for repeat in _repeats(run.columns)]
    return [{"latency": latency_metrics(part), "throughput": throughput_metrics(part, num_devices)} for part in parts]


def num_repeats(run: ComparedRun) -> int:
    return len(_repeats(run.columns))


def _repeats(columns: StepColumns) -> list[int]:
    return sorted({request.repeat for request in columns.requests})


def _of_repeat(columns: StepColumns, repeat: int) -> StepColumns:
    """The requests of one repeat and their rows."""
    is_chosen = np.array([request.repeat == repeat for request in columns.requests], bool)
    index_of = np.cumsum(is_chosen) - 1
    rows = is_chosen[columns.request]
    names = [field.name for field in fields(StepColumns) if field.name not in _NOT_ROWS]
    return replace(
        columns,
        requests=[request for request in columns.requests if request.repeat == repeat],
        request=index_of[columns.request[rows]],
        num_orphan_rows=0,
        **{name: getattr(columns, name)[rows] for name in names},
    )
