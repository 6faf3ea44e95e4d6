"""How long requests took and how much was generated a second.

Belongs here: latencies of completed requests and throughput of the run. Does not belong here: what was accepted, text.

Times are seconds in the records and milliseconds here. Warm-up is left out of everything; failed and aborted requests
are left out of latencies and of generated tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specbench.records import RequestRecord
from specbench.reports.step_columns import StepColumns

COMPLETED = ("stop", "length")

#: A 99th percentile of fewer requests than this is marked.
MIN_REQUESTS_OF_P99 = 100


def is_completed(request: RequestRecord) -> bool:
    """Whether it ended by itself, at a stop or at a length."""
    return request.finish_reason in COMPLETED


def distribution(values: np.ndarray) -> dict:
    """n, mean, p50, p90, p99 (linear interpolation) of values [n]; None where n is 0."""
    if len(values) == 0:
        return {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    p50, p90, p99 = np.percentile(values, [50, 90, 99])
    return {"n": len(values), "mean": float(values.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99)}


def distribution_of_repeated(values: np.ndarray, counts: np.ndarray) -> dict:
    """`distribution` of values [n] that stand counts [n] times each, without writing them out."""
    order = np.argsort(values)
    values, places = values[order], np.cumsum(counts[order])
    total = int(places[-1]) if len(places) else 0
    if total == 0:
        return distribution(values[:0])
    mean = float((values * counts[order]).sum() / total)
    quantiles = {f"p{percent}": _repeated_quantile(values, places, percent / 100) for percent in (50, 90, 99)}
    return {"n": total, "mean": mean, **quantiles}


def _repeated_quantile(values: np.ndarray, places: np.ndarray, share: float) -> float:
    """Between the values at the places around share * (n - 1); places [n] counts those up to each value."""
    place = share * (int(places[-1]) - 1)
    low, high = values[np.searchsorted(places, [int(place), min(int(place) + 1, int(places[-1]) - 1)], side="right")]
    return float(low + (high - low) * (place - int(place)))


def latency_metrics(columns: StepColumns) -> dict:
    """The `latency` block of metrics.json."""
    completed = [request for request in columns.requests if is_completed(request)]
    gap_s, num_tokens = gaps_between_emissions(columns)
    return {
        "ttft_ms": distribution(1000 * time_to_first_token(completed)),
        "tpot_ms": distribution(1000 * time_per_output_token(completed)),
        "itl_step_ms": distribution(1000 * gap_s),
        "itl_token_ms": distribution_of_repeated(1000 * gap_s / np.maximum(num_tokens, 1), num_tokens),
        "e2el_ms": distribution(1000 * end_to_end(completed)),
    }


def time_to_first_token(requests: Sequence[RequestRecord]) -> np.ndarray:
    """first_token - arrival, in seconds."""
    return np.array([one.first_token_s - one.arrival_s for one in requests if one.first_token_s is not None])


def end_to_end(requests: Sequence[RequestRecord]) -> np.ndarray:
    """last_token - arrival, in seconds."""
    return np.array([one.last_token_s - one.arrival_s for one in requests if one.last_token_s is not None])


def time_per_output_token(requests: Sequence[RequestRecord]) -> np.ndarray:
    """(last_token - first_token) / (output_tokens - 1), in seconds. Requests of one token have none."""
    return np.array(
        [
            (one.last_token_s - one.first_token_s) / (one.num_output_tokens - 1)
            for one in requests
            if one.first_token_s is not None and one.last_token_s is not None and one.num_output_tokens > 1
        ]
    )


def gaps_between_emissions(columns: StepColumns) -> tuple[np.ndarray, np.ndarray]:
    """[num_gaps] seconds between a request's emissions and how many tokens ended each gap.

    The first gap starts at the first token. A row that kept nothing reached no reader, so it ends no gap.
    """
    first_token_s = np.array(
        [_first_token_s(request) if is_completed(request) else np.nan for request in columns.requests]
    )
    emits = columns.num_emitted > 0
    request, end_s, num_tokens = columns.request[emits], columns.end_s[emits], columns.num_emitted[emits]
    start_s = np.empty(len(end_s))
    start_s[1:] = end_s[:-1]
    is_first = np.ones(len(end_s), bool)
    is_first[1:] = request[1:] != request[:-1]
    start_s[is_first] = first_token_s[request[is_first]]
    is_measured = ~np.isnan(first_token_s[request])
    return (end_s - start_s)[is_measured], num_tokens[is_measured]


def _first_token_s(request: RequestRecord) -> float:
    return np.nan if request.first_token_s is None else request.first_token_s


def count_devices(config: Mapping[str, Any]) -> int | None:
    """From a run's configuration as run.json holds it."""
    parallel = config["parallel"]
    size = parallel["tensor_parallel_size"]
    return None if size is None else math.ceil(size / parallel.get("ranks_per_gpu", 1))


def throughput_metrics(columns: StepColumns, num_devices: int | None) -> dict:
    """The `throughput` block of metrics.json.

    duration = first arrival to last token; tokens of completed requests only; "per user" is output tokens over the
    summed end-to-end times, what one request in flight is given a second; verify steps are rows, drafted or not.
    """
    completed = [request for request in columns.requests if is_completed(request)]
    duration_s = _duration_s(columns.requests)
    output_tokens = sum(request.num_output_tokens for request in completed)
    total_tokens = output_tokens + sum(request.num_prompt_tokens for request in completed)
    served_s = float(end_to_end(completed).sum())
    output_rate = _per_second(output_tokens, duration_s)
    device_rate = None if output_rate is None or num_devices is None else output_rate / num_devices
    return {
        "duration_s": duration_s,
        "request_per_s": _per_second(len(completed), duration_s),
        "output_token_per_s": output_rate,
        "output_token_per_s_per_device": device_rate,
        "output_token_per_s_per_user": _per_second(output_tokens, served_s),
        "total_token_per_s": _per_second(total_tokens, duration_s),
        "verify_step_per_s": _per_second(len(columns.request), duration_s) if len(columns.request) else None,
    }


def _duration_s(requests: Sequence[RequestRecord]) -> float | None:
    """First arrival to last token; None where no token came."""
    last_token_s = [request.last_token_s for request in requests if request.last_token_s is not None]
    if not last_token_s:
        return None
    return max(last_token_s) - min(request.arrival_s for request in requests)


def _per_second(count: int, duration_s: float | None) -> float | None:
    return count / duration_s if duration_s else None
