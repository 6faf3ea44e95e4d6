"""Requests of a serving benchmark from the parallel lists that vLLM and SGLang write alike.

Belongs here: those lists as request and sample records, and the latencies that both name alike. Does not belong here:
the keys of either alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from specbench.records import RequestRecord, SampleRecord
from specbench.reports.exchange.imported_run import distribution_of
from specbench.reports.exchange.result_fields import Fields


def read_requests(fields: Fields) -> list[RequestRecord]:
    """A record for each entry of `ttfts`; none where the result has no lists.

    Without `start_times` every request arrives at 0: latencies are right then, and the order of requests is not known.
    """
    ttfts = fields.numbers("ttfts")
    if ttfts is None:
        return []
    num = len(ttfts)
    outputs, inputs = fields.counts("output_lens", num), fields.counts("input_lens", num)
    if outputs is None or inputs is None:
        return []
    starts = fields.numbers("start_times", num) or [0.0] * num
    errors = fields.list("errors", num) or [""] * num
    ends, origin = _latencies(fields, ttfts), min(starts, default=0.0)
    return [
        _request(index, starts[index] - origin, inputs[index], outputs[index], ttfts[index], ends[index], errors[index])
        for index in range(num)
    ]


def read_samples(fields: Fields, requests: list[RequestRecord]) -> list[SampleRecord]:
    """The texts, where the result has them. Their token ids are not known."""
    texts = fields.list("generated_texts", len(requests)) if requests else None
    if texts is None:
        return []
    return [_sample(request, text) for request, text in zip(requests, texts, strict=True) if request.error is None]


def prompts_digest(fields: Fields) -> str | None:
    """Of the lengths of the prompts in their order, which tell one set of samples from another."""
    lengths = fields.counts("input_lens")
    return None if lengths is None else hashlib.sha256(json.dumps(lengths).encode()).hexdigest()


def reported_latency(
    fields: Fields, names: Mapping[str, str], completed: int, requests: Sequence[RequestRecord]
) -> dict:
    """The `latency` block from sums; `names` are theirs -> ours.

    How many gaps there were, and requests of more than one token, only the lists tell.
    """
    gaps = fields.number_lists("itls")
    n = {
        "itl_step_ms": None if gaps is None else sum(map(len, gaps)),
        "tpot_ms": sum(request.num_output_tokens > 1 for request in requests) if requests else None,
    }
    latency = {}
    for theirs, ours in names.items():
        mean, median, p90, p99 = (fields.number(f"{name}_{theirs}") for name in ("mean", "median", "p90", "p99"))
        if mean is not None:
            latency[ours] = distribution_of(n.get(ours, completed), mean, median, p90, p99)
    return latency


def _latencies(fields: Fields, ttfts: list[float]) -> list[float]:
    """End-to-end seconds of each request: as given, else time to first token and all gaps behind it."""
    given = fields.numbers("latencies", len(ttfts))
    if given is not None:
        return given
    gaps = fields.number_lists("itls", len(ttfts))
    return ttfts if gaps is None else [ttft + sum(one) for ttft, one in zip(ttfts, gaps, strict=True)]


def _request(
    index: int, start_s: float, num_prompt: int, num_output: int, ttft_s: float, end_s: float, error: object
) -> RequestRecord:
    failed = bool(error) or num_output == 0
    return RequestRecord(
        request_id=str(index),
        sample_id=str(index),
        turn=0,
        repeat=0,
        is_warmup=False,
        category=None,
        num_prompt_tokens=num_prompt,
        num_cached_prompt_tokens=None,
        num_output_tokens=0 if failed else num_output,
        # Whether it stopped or ran into its limit is not told.
        finish_reason="error" if failed else "stop",
        arrival_s=start_s,
        first_scheduled_s=None,
        first_token_s=None if failed else start_s + ttft_s,
        last_token_s=None if failed else start_s + end_s,
        num_preemptions=0,
        error=(str(error or "").strip() or "no output") if failed else None,
    )


def _sample(request: RequestRecord, text: str) -> SampleRecord:
    return SampleRecord(
        sample_id=request.sample_id,
        turn=0,
        repeat=0,
        prompt=None,
        prompt_token_ids=None,
        output_text=text,
        reasoning_text="",
        output_token_ids=[],
        reference=None,
        extracted={},
        score={},
        is_truncated=False,
    )
