"""The result JSON of `vllm bench serve`, in and out.

Belongs here: its keys. Does not belong here: what becomes of what was read (imported_run.py, imports.py).

There, percentages are percentages, times in lists are seconds and in sums milliseconds, and ITL is the gap between
chunks of a stream, which under speculation are steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import numpy as np

from specbench.records import RequestRecord
from specbench.reports.exchange.imported_run import (
    ImportedRun,
    Setup,
    acceptance_from_counts,
)
from specbench.reports.exchange.result_fields import Fields
from specbench.reports.exchange.serving_requests import prompts_digest, read_requests, read_samples, reported_latency
from specbench.reports.latency import gaps_between_emissions, is_completed
from specbench.reports.markdown import model_title, run_title
from specbench.reports.report_files import Report

TOOL = "vllm bench serve"
_LATENCIES = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "itl_ms": "itl_step_ms", "e2el_ms": "e2el_ms"}
_THROUGHPUT = {
    "duration": "duration_s",
    "request_throughput": "request_per_s",
    "output_throughput": "output_token_per_s",
    "total_token_throughput": "total_token_per_s",
}


def is_vllm_result(fields: Fields) -> bool:
    return fields.has("duration", "request_throughput", "total_token_throughput", "completed")


def import_vllm(fields: Fields) -> ImportedRun:
    """One result, detailed (`--save-detailed`) or not."""
    requests = read_requests(fields)
    acceptance = _acceptance(fields)
    completed = fields.count("completed") or 0
    failed = fields.count("failed") or 0
    reported: dict = {
        "requests": {"completed": completed, "failed": failed},
        "latency": reported_latency(fields, _LATENCIES, completed, requests),
        "throughput": {ours: fields.number(theirs) for theirs, ours in _THROUGHPUT.items()},
    }
    if acceptance is not None:
        reported["acceptance"] = acceptance
    setup = Setup(
        tool=TOOL,
        model=fields.text("model_id"),
        data_digest=prompts_digest(fields),
        num_samples=fields.count("num_prompts") or completed,
        method=None,
        num_speculative_tokens=None if acceptance is None else acceptance["num_speculative_tokens"],
        concurrency=fields.count("max_concurrency"),
        started_at=_date(fields.text("date")),
        notices=_notices(acceptance, bool(requests)),
    )
    return ImportedRun(setup, reported, requests, read_samples(fields, requests))


def _acceptance(fields: Fields) -> dict | None:
    drafts = fields.count("spec_decode_num_drafts")
    accepted = fields.count("spec_decode_accepted_tokens")
    if drafts is None or accepted is None:
        return None
    rates = fields.numbers("spec_decode_per_position_acceptance_rates") or []
    # Each is a count over drafts, so the count comes back exactly.
    positions = [round(rate * drafts) for rate in rates]
    return acceptance_from_counts(
        num_speculative_tokens=len(rates) or None,
        drafts=drafts,
        draft_tokens=fields.count("spec_decode_draft_tokens"),
        accepted_tokens=accepted,
        accepted_at_position=positions,
    )


def _notices(acceptance: dict | None, has_requests: bool) -> list[str]:
    notices = []
    if acceptance is None:
        notices.append("It has no acceptance: speculation was off, or the server's counters could not be read")
    else:
        notices.append("Acceptance is from the server's counters over the whole benchmark: no step by itself is known")
    if not has_requests:
        notices.append("It was saved without --save-detailed: no request by itself is known")
    return notices


def _date(text: str | None) -> str | None:
    """`20261130-020631`, in the time of the machine that wrote it, as ISO 8601 without a zone."""
    try:
        return None if text is None else datetime.strptime(text, "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        return text


def export_vllm(report: Report) -> dict:
    """A run as that result, detailed: requests in the order of their arrival, without warm-up.

    The name of what ran and of the data is in `model_id` and `label`, so that a packaged model can't pass for another.
    """
    run, metrics = report.run, report.metrics
    order = sorted(range(len(report.columns.requests)), key=lambda index: report.columns.requests[index].arrival_s)
    requests = [report.columns.requests[index] for index in order]
    return {
        "date": _written_date(run.started_at),
        "endpoint_type": "specbench",
        "backend": "specbench",
        "label": f"{run_title(run)}, {run.acceptance_source}",
        "model_id": model_title(run.model),
        "tokenizer_id": run.model.path or run.model.ran,
        "num_prompts": sum(metrics["requests"][state] for state in ("completed", "failed", "aborted")),
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": run.config.get("load", {}).get("concurrency"),
        **_totals(metrics, requests),
        **_lists(report, order, requests),
        **_spec_decode(metrics["acceptance"]),
        **_statistics(metrics["latency"]),
    }


def _totals(metrics: dict, requests: Sequence[RequestRecord]) -> dict:
    completed = [request for request in requests if is_completed(request)]
    return {
        **{theirs: metrics["throughput"][ours] for theirs, ours in _THROUGHPUT.items()},
        "completed": metrics["requests"]["completed"],
        "failed": metrics["requests"]["failed"] + metrics["requests"]["aborted"],
        "total_input_tokens": sum(request.num_prompt_tokens for request in completed) if requests else None,
        "total_output_tokens": sum(request.num_output_tokens for request in completed) if requests else None,
        "request_goodput": None,
    }


def _lists(report: Report, order: Sequence[int], requests: Sequence[RequestRecord]) -> dict:
    """The parallel lists; a request without tokens has zeros and its error."""
    columns = report.columns
    gap_s, _ = gaps_between_emissions(columns)
    emits = columns.num_emitted > 0
    is_measured = np.array([is_completed(one) for one in columns.requests], bool)[columns.request[emits]]
    owner = columns.request[emits][is_measured]
    first = np.searchsorted(owner, np.arange(len(columns.requests) + 1))
    texts = {(sample.sample_id, sample.turn, sample.repeat): sample.output_text for sample in report.samples}
    return {
        "input_lens": [one.num_prompt_tokens for one in requests],
        "output_lens": [one.num_output_tokens for one in requests],
        "ttfts": [_since_arrival(one, one.first_token_s) for one in requests],
        "itls": [gap_s[first[index] : first[index + 1]].tolist() for index in order],
        "latencies": [_since_arrival(one, one.last_token_s) for one in requests],
        "start_times": [one.arrival_s for one in requests],
        "generated_texts": [texts.get((one.sample_id, one.turn, one.repeat), "") for one in requests],
        "errors": [one.error or "" for one in requests],
    }


def _since_arrival(request: RequestRecord, at_s: float | None) -> float:
    return 0.0 if at_s is None else at_s - request.arrival_s


def _spec_decode(acceptance: dict) -> dict:
    """Nothing where nothing was drafted, as there."""
    if not acceptance["drafts"]:
        return {}
    return {
        "spec_decode_acceptance_rate": 100 * acceptance["acceptance_rate"],
        "spec_decode_acceptance_length": acceptance["acceptance_length"],
        "spec_decode_num_drafts": acceptance["drafts"],
        "spec_decode_draft_tokens": acceptance["draft_tokens"],
        "spec_decode_accepted_tokens": acceptance["accepted_tokens"],
        "spec_decode_per_position_acceptance_rates": acceptance["per_position"],
    }


def _statistics(latency: dict) -> dict:
    """Means and percentiles; there is no standard deviation in metrics.json, and none here."""
    return {
        f"{name}_{theirs}": latency[ours][key]
        for theirs, ours in _LATENCIES.items()
        for name, key in (("mean", "mean"), ("median", "p50"), ("p50", "p50"), ("p90", "p90"), ("p99", "p99"))
    }


def _written_date(started_at: str) -> str:
    try:
        return datetime.fromisoformat(started_at).strftime("%Y%m%d-%H%M%S")
    except ValueError:
        return started_at
