"""metrics.json of one run, assembled from its event log.

Belongs here: which block comes from where, and the keys. Does not belong here: formulas (acceptance.py, latency.py,
accuracy.py, identities.py, intervals.py), text (markdown.py).
"""

from __future__ import annotations

import math

from specbench.record_columns import EngineStepColumns
from specbench.records import SCHEMA_VERSION, RequestRecord, RunRecord
from specbench.reports.acceptance import acceptance_metrics, ratio
from specbench.reports.accuracy import accuracy_metrics
from specbench.reports.conditions import condition_tables
from specbench.reports.cost_model import cost_metrics
from specbench.reports.diagnosis import health_checks
from specbench.reports.identities import identity_checks
from specbench.reports.intervals import acceptance_intervals
from specbench.reports.latency import count_devices, is_completed, latency_metrics, throughput_metrics
from specbench.reports.load_metrics import load_metrics
from specbench.reports.losslessness_section import losslessness_metrics
from specbench.reports.repeat_speed import throughput_intervals
from specbench.reports.step_columns import StepColumns, measured, step_columns
from specbench.run_directory import EventLog

#: `acceptance_source` of a run whose every step was seen.
ENGINE = "engine"


def compute_metrics(run: RunRecord, log: EventLog) -> dict:
    """metrics.json as plain containers."""
    return metrics_of(run, log, step_columns(log.requests, log.verify_steps))


def metrics_of(run: RunRecord, log: EventLog, columns: StepColumns) -> dict:
    """`compute_metrics` for whoever needs the measured `columns` of `log` too."""
    k = _num_speculative_tokens(run, columns)
    reported = run.reported_metrics
    acceptance = acceptance_metrics(columns, k) | condition_tables(columns, k) | reported.get("acceptance", {})
    has_steps = run.acceptance_source == ENGINE or len(columns.request) > 0
    throughput = _throughput(run, columns) | reported.get("throughput", {})
    metrics = {
        "schema_version": SCHEMA_VERSION,
        "requests": _request_counts(log.requests) | reported.get("requests", {}),
        "acceptance": acceptance,
        "latency": latency_metrics(columns) | reported.get("latency", {}),
        "throughput": throughput,
        "load": load_metrics(run, columns, throughput["duration_s"]),
        "cache": _cache(columns, log),
        "eval": accuracy_metrics(run.data.name, run.config["eval"]["scorer"], columns.requests, log.samples),
        "checks": {
            "identities": identity_checks(columns, acceptance, has_steps=has_steps),
            "output": _output_check(run),
            "losslessness": losslessness_metrics(run.losslessness),
        },
        "intervals": acceptance_intervals(columns, k) | _speed_intervals(run, columns),
    }
    cost_model = {"cost_model": cost_metrics(columns, log.engine_steps, k or 0)}
    return metrics | {"health": health_checks(run, columns, metrics | cost_model, log.samples)} | cost_model


def _num_speculative_tokens(run: RunRecord, columns: StepColumns) -> int | None:
    """k; None when speculation was off or no step was seen. Rows are believed over the configuration."""
    spec = run.config["spec"]
    most_drafted = int(columns.num_drafted.max(initial=0))
    if run.acceptance_source != ENGINE and not len(columns.request):
        return None
    if spec["method"] == "none" and most_drafted == 0:
        return None
    configured = spec["num_speculative_tokens"]
    return max(most_drafted, run.model.num_modules if configured is None else configured)


def _throughput(run: RunRecord, columns: StepColumns) -> dict:
    """Not measured for a resumed run: between its segments nothing ran."""
    metrics = throughput_metrics(columns, count_devices(run.config))
    return metrics if run.num_segments == 1 else dict.fromkeys(metrics)


def _speed_intervals(run: RunRecord, columns: StepColumns) -> dict[str, list[float]]:
    """Over repeats, where throughput is measured at all."""
    if run.num_segments > 1 or "throughput" in run.reported_metrics:
        return {}
    return throughput_intervals(columns, count_devices(run.config))


def _request_counts(requests: list[RequestRecord]) -> dict[str, int]:
    kept = measured(requests)
    return {
        "completed": sum(is_completed(request) for request in kept),
        "failed": sum(request.finish_reason == "error" for request in kept),
        "aborted": sum(request.finish_reason == "aborted" for request in kept),
        "warmup": len(requests) - len(kept),
        "warmup_failed": sum(request.is_warmup and not is_completed(request) for request in requests),
    }


def _cache(columns: StepColumns, log: EventLog) -> dict:
    """Prompt tokens looked up in the prefix cache and found there, and what the pressure on blocks led to.

    A request is looked up once, when it is first admitted: what it finds of its own after a preemption is no hit.
    """
    asked = [request for request in columns.requests if request.num_cached_prompt_tokens is not None]
    query_tokens = sum(request.num_prompt_tokens for request in asked) if asked else None
    hit_tokens = sum(request.num_cached_prompt_tokens or 0 for request in asked) if asked else None
    steps = EngineStepColumns.of(log.engine_steps)
    began_s = min((request.arrival_s for request in columns.requests), default=math.inf)
    is_measured = steps.start_s >= began_s  # warm-up came before
    return {
        "query_tokens": query_tokens,
        "hit_tokens": hit_tokens,
        "hit_rate": None if query_tokens is None or hit_tokens is None else ratio(hit_tokens, query_tokens),
        "preemptions": sum(request.num_preemptions for request in columns.requests),
        "evicted_blocks": int(steps.num_evicted_blocks[is_measured].sum()) if is_measured.any() else None,
        "most_blocks_used": int(steps.kv_blocks_used[is_measured].max()) if is_measured.any() else None,
    }


def _output_check(run: RunRecord) -> dict:
    check = run.output_check
    if check is None:
        return {"status": "not_checked", "compared": None, "identical": None, "near_ties": None, "mismatches": None}
    return {
        "status": check.status,
        "compared": check.compared,
        "identical": check.identical,
        "near_ties": check.near_ties,
        "mismatches": check.mismatches,
    }
