"""A line of the JSONL that SGLang's bench_serving appends, in.

Belongs here: its keys. Does not belong here: what becomes of what was read (imported_run.py, imports.py).

Its acceptance length is the server's own since it started, first rank only, with the token of the prefill and without
what a stop discarded: no count comes with it, so it is taken as it is and said so.
"""

from __future__ import annotations

from specbench.reports.exchange.imported_run import ImportedRun, Setup
from specbench.reports.exchange.result_fields import Fields
from specbench.reports.exchange.serving_requests import prompts_digest, read_requests, read_samples, reported_latency

TOOL = "SGLang bench_serving"
_LATENCIES = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "itl_ms": "itl_step_ms", "e2e_latency_ms": "e2el_ms"}
_THROUGHPUT = {
    "duration": "duration_s",
    "request_throughput": "request_per_s",
    "output_throughput": "output_token_per_s",
    "total_throughput": "total_token_per_s",
}


def is_sglang_result(fields: Fields) -> bool:
    return fields.has("duration", "completed", "mean_e2e_latency_ms")


def import_sglang(fields: Fields) -> ImportedRun:
    """One line, with `--output-details` or without."""
    requests = read_requests(fields)
    completed = fields.count("completed") or 0
    length = fields.number("accept_length")
    reported: dict = {
        "requests": {"completed": completed},
        "latency": reported_latency(fields, _LATENCIES, completed, requests),
        "throughput": _throughput(fields),
    }
    if length is not None:
        reported["acceptance"] = {"acceptance_length": length}
    setup = Setup(
        tool=TOOL,
        model=fields.text("model_id") or fields.text("model"),
        data=fields.text("dataset_name"),
        data_digest=prompts_digest(fields),
        num_samples=len(requests) or completed,
        concurrency=fields.count("max_concurrency"),
        notices=_notices(length, bool(requests)),
    )
    return ImportedRun(setup, reported, requests, read_samples(fields, requests))


def _throughput(fields: Fields) -> dict:
    """The total is the sum of both directions in results that don't give it."""
    throughput = {ours: fields.number(theirs) for theirs, ours in _THROUGHPUT.items()}
    inputs, outputs = fields.number("input_throughput"), fields.number("output_throughput")
    if throughput["total_token_per_s"] is None and inputs is not None and outputs is not None:
        throughput["total_token_per_s"] = inputs + outputs
    return throughput


def _notices(length: float | None, has_requests: bool) -> list[str]:
    notices = []
    if length is None:
        notices.append("It has no acceptance length: speculation was off, or the server did not tell")
    else:
        notices.append(
            "Its acceptance length is the server's since it started, of one rank, with the token of the prefill: not "
            "quite what is called so elsewhere here"
        )
    if not has_requests:
        notices.append("It was written without --output-details: no request by itself is known")
    return notices
