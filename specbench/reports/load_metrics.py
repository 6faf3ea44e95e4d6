"""How the load was: whether the client kept its timetable, what met its SLOs, and when the target was steadily busy.

Belongs here: the `load` block of metrics.json. Does not belong here: latencies (latency.py), text (load_section.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from specbench.records import RequestRecord, RunRecord
from specbench.reports.acceptance import ratio
from specbench.reports.latency import distribution, is_completed
from specbench.reports.step_columns import StepColumns

#: In a steady state at least this share of load.concurrency is out, as in vLLM's benchmark.
STEADY_SHARE = 0.95
#: Beyond this mean lag the timetable was not kept.
MAX_MEAN_LAG_MS = 2.0
#: Fewer gaps say nothing of a law.
MIN_GAPS = 20


def load_metrics(run: RunRecord, columns: StepColumns, duration_s: float | None) -> dict:
    """The `load` block, of the measured requests; `duration_s` is that of `throughput`.

    A resumed run has neither gaps nor a steady state: between its segments nothing ran.
    """
    load, is_whole = run.config.get("load", {}), run.num_segments == 1
    timed = [request for request in columns.requests if request.scheduled_s is not None]
    return {
        "name": load.get("name"),
        "lag_ms": distribution(1000 * np.array([_lag_s(request) for request in timed])),
        "client_queue_ms": distribution(1000 * np.array([_queue_s(request) for request in timed])),
        "gaps": _gaps(load, timed if is_whole else []),
        "backlog": _backlog(load, timed if is_whole else []),
        "goodput": _goodput(run.config.get("report", {}), columns.requests, duration_s),
        "steady_state": _steady_state(load, columns if is_whole else None),
    }


def _by_repeat(requests: Sequence[RequestRecord]) -> list[list[RequestRecord]]:
    in_order = sorted(requests, key=lambda one: one.repeat)
    return [list(group) for _, group in groupby(in_order, key=lambda one: one.repeat)]


def _queue_s(request: RequestRecord) -> float:
    return request.client_queue_s or 0.0


def _lag_s(request: RequestRecord) -> float:
    assert request.scheduled_s is not None
    return request.arrival_s - request.scheduled_s - _queue_s(request)


def _gaps(load: dict, timed: Sequence[RequestRecord]) -> dict:
    """Gaps between the arrivals of each repeat, and the chance of gaps as far from the load's law as these.

    By Kolmogorov and Smirnov's test. None for a law that has no gaps, and where a wait for a place bent it.
    """
    gaps_s = np.concatenate(
        [np.zeros(0), *(np.diff(np.sort([one.arrival_s for one in group])) for group in _by_repeat(timed))]
    )
    if len(gaps_s) == 0:
        return {"n": 0, "mean_s": None, "variation": None, "p_value": None}
    mean_s = float(gaps_s.mean())
    is_judged = len(gaps_s) >= MIN_GAPS and not any(_queue_s(request) for request in timed)
    return {
        "n": len(gaps_s),
        "mean_s": mean_s,
        "variation": ratio(float(gaps_s.std()), mean_s),
        "p_value": _gap_test(load, gaps_s) if is_judged else None,
    }


def _gap_test(load: dict, gaps_s: np.ndarray) -> float | None:
    shape = {"poisson": 1.0, "gamma": load.get("burstiness")}.get(load["name"])
    if shape is None:
        return None
    from scipy.stats import kstest  # takes a second to import

    return float(kstest(gaps_s, "gamma", args=(shape, 0, 1 / (load["rate"] * shape))).pvalue)


def _backlog(load: dict, timed: Sequence[RequestRecord]) -> dict:
    """Requests due and not yet done, in the client or the target, after a quarter of the timetable and at its last one,
    pooled over repeats, and how far chance alone moves their difference. A target that keeps up with a rate has as many
    at either time. (Of those that are out alone, a cap on them would hide it.)

    The time between adds its arrivals and takes its ends: as counts, of variance n (over `burstiness` of clustered
    arrivals). None where the rate is not the same all along.
    """
    nothing = {"at_quarter": None, "at_end": None, "standard_error": None}
    if load.get("name") not in ("poisson", "gamma"):
        return nothing
    at_quarter = at_end = variance = 0.0
    for group in _by_repeat(timed):
        ended = [one for one in group if one.last_token_s is not None]
        if len(ended) < MIN_GAPS:
            return nothing
        due_s = np.array([one.scheduled_s for one in ended])
        end_s = np.array([one.last_token_s for one in ended])
        quarter_s, last_s = np.quantile(due_s, 0.25), due_s.max()
        quarter, end = (int(((due_s <= at_s) & (end_s > at_s)).sum()) for at_s in (quarter_s, last_s))
        num_due = int((due_s > quarter_s).sum())
        at_quarter, at_end = at_quarter + quarter, at_end + end
        variance += num_due / min(1.0, load.get("burstiness") or 1.0) + (num_due - end + quarter)
    return {"at_quarter": at_quarter, "at_end": at_end, "standard_error": variance**0.5} if variance else nothing


def _goodput(report: dict, requests: Sequence[RequestRecord], duration_s: float | None) -> dict:
    """Requests that were completed within every SLO that is set, of all measured ones.

    Without an SLO there is no goodput. A request of one token has no TPOT and meets any. As TTFT and E2EL do, the SLOs
    count from submission: `client_queue_ms`, beside it, is outside.
    """
    limits = {name: report.get(f"slo_{name}") for name in ("ttft_ms", "tpot_ms", "e2el_ms")}
    slos = {f"slo_{name}": limit for name, limit in limits.items()}
    if not any(limit is not None for limit in limits.values()) or not requests:
        return slos | {"met": None, "total": None, "share": None, "request_per_s": None}
    met = sum(is_completed(request) and _meets(request, limits) for request in requests)
    return slos | {
        "met": met,
        "total": len(requests),
        "share": met / len(requests),
        "request_per_s": met / duration_s if duration_s else None,
    }


def _meets(request: RequestRecord, limits: dict[str, float | None]) -> bool:
    assert request.first_token_s is not None and request.last_token_s is not None
    later_tokens = request.num_output_tokens - 1
    seen_s = {
        "ttft_ms": request.first_token_s - request.arrival_s,
        "tpot_ms": (request.last_token_s - request.first_token_s) / later_tokens if later_tokens else 0.0,
        "e2el_ms": request.last_token_s - request.arrival_s,
    }
    return all(limit is None or 1000 * seen_s[name] <= limit for name, limit in limits.items())


@dataclass(frozen=True, slots=True)
class _Window:
    """The steady state of one repeat, in seconds since the run's start."""

    from_s: float
    to_s: float


def _steady_state(load: dict, columns: StepColumns | None) -> dict:
    """Neither start-up nor drain, pooled over repeats; None without `columns`.

    Of a closed load from the first to the last moment with 95 % of its requests out; of a timetable from the first
    request that ended to the last one of the timetable that arrived: turns behind it are drain.
    """
    if columns is None:
        return {"windows_s": []} | dict.fromkeys(("duration_s", "share", "mean_in_flight", "output_token_per_s"))
    first_s = min((request.arrival_s for request in columns.requests), default=0.0)
    spans_s, in_flight_s, windows = 0.0, 0.0, []
    for group in _by_repeat(columns.requests):
        flight = _Flight.of([one for one in group if one.last_token_s is not None])
        spans_s += flight.span_s
        window = flight.window(load)
        if window is not None:
            windows.append(window)
            in_flight_s += flight.integral(window)
    tokens = sum(_tokens_within(columns, window) for window in windows)
    duration_s = sum(window.to_s - window.from_s for window in windows)
    return {
        "windows_s": [[window.from_s - first_s, window.to_s - first_s] for window in windows],
        "duration_s": duration_s if windows else None,
        "share": ratio(duration_s, spans_s) if windows else None,
        "mean_in_flight": ratio(in_flight_s, duration_s),
        "output_token_per_s": ratio(tokens, duration_s),
    }


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """When requests were out: between arrival and last token."""

    #: [num_requests]
    arrival_s: np.ndarray
    end_s: np.ndarray
    #: Of the last one of the timetable; None without a timetable.
    last_scheduled_s: float | None

    @classmethod
    def of(cls, requests: Sequence[RequestRecord]) -> _Flight:
        return cls(
            arrival_s=np.array([one.arrival_s for one in requests]),
            end_s=np.array([one.last_token_s for one in requests]),
            last_scheduled_s=max((one.arrival_s for one in requests if one.scheduled_s is not None), default=None),
        )

    @property
    def span_s(self) -> float:
        return float(self.end_s.max() - self.arrival_s.min()) if len(self.end_s) else 0.0

    def window(self, load: dict) -> _Window | None:
        if not len(self.end_s):
            return None
        if load.get("name") == "closed":
            return self._with_at_least(STEADY_SHARE * load["concurrency"])
        from_s = float(self.end_s.min())
        if self.last_scheduled_s is None or self.last_scheduled_s <= from_s:
            return None
        return _Window(from_s, self.last_scheduled_s)

    def _with_at_least(self, num_out: float) -> _Window | None:
        times_s = np.concatenate([self.end_s, self.arrival_s])
        changes = np.concatenate([-np.ones(len(self.end_s)), np.ones(len(self.arrival_s))])
        order = np.argsort(times_s, kind="stable")  # what ends makes place for what arrives at the same time
        is_busy = np.cumsum(changes[order]) >= num_out
        if not is_busy.any():
            return None
        places = np.flatnonzero(is_busy)
        return _Window(float(times_s[order][places[0]]), float(times_s[order][places[-1] + 1]))

    def integral(self, window: _Window) -> float:
        """Seconds that requests were out within the window, summed over them."""
        inside = np.minimum(self.end_s, window.to_s) - np.maximum(self.arrival_s, window.from_s)
        return float(np.maximum(inside, 0.0).sum())


def _tokens_within(columns: StepColumns, window: _Window) -> int:
    is_inside = (columns.end_s > window.from_s) & (columns.end_s <= window.to_s)
    firsts = [one.first_token_s for one in columns.requests if one.first_token_s is not None]
    return int(columns.num_emitted[is_inside].sum()) + sum(window.from_s < at_s <= window.to_s for at_s in firsts)
