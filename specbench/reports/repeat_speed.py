"""Speed of each repeat of a run, the only source of intervals of speed.

Belongs here: a run's rows split by repeat, the speed figures of each, the intervals of a run's own throughput. Does not
belong here: what an interval is (statistics.py).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import numpy as np

from specbench.reports.latency import latency_metrics, throughput_metrics
from specbench.reports.statistics import MIN_REPEATS, repeat_interval
from specbench.reports.step_columns import StepColumns

if TYPE_CHECKING:  # which needs the metrics, which need the intervals from here
    from specbench.reports.compared_run import ComparedRun

#: How the names of rates end; a duration is longer with each repeat.
_RATES = ("_per_s", "_per_s_per_device", "_per_s_per_user")
#: Columns that are not one value a row, or are worked out anew.
_NOT_ROWS = ("requests", "request", "num_orphan_rows")


def speed_by_repeat(run: ComparedRun) -> list[dict]:
    """`latency` and `throughput` of each repeat, in order, each as in metrics.json."""
    num_devices = run.record.config["parallel"]["tensor_parallel_size"]
    parts = [_of_repeat(run.columns, repeat) for repeat in _repeats(run.columns)]
    return [{"latency": latency_metrics(part), "throughput": throughput_metrics(part, num_devices)} for part in parts]


def throughput_intervals(columns: StepColumns, num_devices: int | None) -> dict[str, list[float]]:
    """Metric path to [low, high] of the mean over repeats, for each rate of the `throughput` block.

    Nothing under three repeats, nor of a rate that a repeat has not or that is the same in all.
    """
    repeats = _repeats(columns)
    if len(repeats) < MIN_REPEATS:
        return {}
    parts = [throughput_metrics(_of_repeat(columns, repeat), num_devices) for repeat in repeats]
    found = {}
    for name in (name for name in parts[0] if name.endswith(_RATES)):
        values = [part[name] for part in parts if part[name] is not None]
        interval = repeat_interval(values) if len(values) == len(parts) else None
        if interval is not None and interval[0] < interval[1]:
            found[f"throughput.{name}"] = list(interval)
    return found


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
