"""How many times as fast a run is as the same requests without speculation.

Belongs here: the quotient of throughputs and its interval over repeats. Does not belong here: which run is the base,
throughput itself (latency.py), text.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

from specbench.reports.compared_run import ComparedRun
from specbench.reports.figures import OUTPUT_THROUGHPUT
from specbench.reports.statistics import Interval, repeat_interval


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Output tokens a second over those of the base."""

    value: float
    #: Student's over the logarithms of the quotients of repeat i; None under 3 repeats in either run.
    interval: Interval | None


def speedup(base: ComparedRun, new: ComparedRun) -> SpeedUp | None:
    """`new` over `base`; None where the throughput of either was not measured."""
    before, after = OUTPUT_THROUGHPUT.value(base.metrics), OUTPUT_THROUGHPUT.value(new.metrics)
    if not before or after is None:
        return None
    return SpeedUp(after / before, _interval(base, new))


def _interval(base: ComparedRun, new: ComparedRun) -> Interval | None:
    """Quotients are compared by their logarithms: twice as fast is as far from equal as half as fast."""
    first, second = (_throughputs(run) for run in (base, new))
    if len(first) != len(second):
        return None
    logs = repeat_interval([log(after / before) for before, after in zip(first, second, strict=True)])
    return None if logs is None else (exp(logs[0]), exp(logs[1]))


def _throughputs(run: ComparedRun) -> list[float]:
    """Of each repeat; nothing where any was not measured, or times run over several segments."""
    values = [OUTPUT_THROUGHPUT.value(one) for one in run.speed_by_repeat]
    known = [value for value in values if value]
    return known if len(known) == len(values) and run.record.num_segments == 1 else []
