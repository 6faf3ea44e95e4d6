"""Speed of each repeat of a run, the only source of intervals of speed.

Belongs here: a run's rows split by repeat, the speed figures of each, the intervals of a run's own throughput. Does not
belong here: what an interval is (statistics.py).
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from specbench.reports.latency import latency_metrics, throughput_metrics
from specbench.reports.statistics import MIN_REPEATS, repeat_interval
from specbench.reports.step_columns import StepColumns

#: How the names of rates end; a duration is longer with each repeat.
_RATES = ("_per_s", "_per_s_per_device", "_per_s_per_user")
#: Columns that are not one value a row, or are worked out anew.
_NOT_ROWS = ("requests", "request", "num_orphan_rows")


def speed_by_repeat(columns: StepColumns, num_devices: int | None) -> list[dict]:
    """`latency` and `throughput` of each repeat, in order, each as in metrics.json."""
    parts = [_of_repeat(columns, repeat) for repeat in repeats_of(columns)]
    return [{"latency": latency_metrics(part), "throughput": throughput_metrics(part, num_devices)} for part in parts]


def throughput_intervals(columns: StepColumns, num_devices: int | None) -> dict[str, list[float]]:
    """Metric path to [low, high] of the mean over repeats, for each rate of the `throughput` block.

    Nothing under three repeats, nor of a rate that a repeat has not or that is the same in all.
    """
    repeats = repeats_of(columns)
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


def repeats_of(columns: StepColumns) -> list[int]:
    """Their numbers, in order."""
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
