"""What is recorded of a request, whether it ran or could not.

Belongs here: the request's own counts and times. Does not belong here: the client's times (submission.py), its verify
steps (record_columns.py).
"""

from __future__ import annotations

from dataclasses import replace

from specbench.engine.request import Request
from specbench.generate import GenerateRequest, GenerateResult
from specbench.records import RequestRecord


def request_record(request: Request) -> RequestRecord:
    assert request.finish_reason is not None
    return replace(
        _unrun_record(request.source, request.num_prompt_tokens, request.arrival_s, request.finish_reason, error=None),
        num_cached_prompt_tokens=request.num_cached_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        first_scheduled_s=request.first_scheduled_s,
        first_token_s=request.first_token_s,
        last_token_s=request.last_token_s,
        num_preemptions=request.num_preemptions,
    )


def failed_result(source: GenerateRequest, arrival_s: float, error: str) -> GenerateResult:
    """The result of a request that could not be queued."""
    token_ids = list(source.prompt_token_ids or ())
    return GenerateResult(_unrun_record(source, len(token_ids), arrival_s, "error", error), [], token_ids, [], "")


def _unrun_record(
    source: GenerateRequest, num_prompt_tokens: int, arrival_s: float, finish_reason: str, error: str | None
) -> RequestRecord:
    """What is known of a request before it runs."""
    return RequestRecord(
        request_id=source.request_id,
        sample_id=source.sample_id,
        turn=source.turn,
        repeat=source.repeat,
        is_warmup=source.is_warmup,
        category=source.category,
        num_prompt_tokens=num_prompt_tokens,
        num_cached_prompt_tokens=None,
        num_output_tokens=0,
        finish_reason=finish_reason,
        arrival_s=arrival_s,
        first_scheduled_s=None,
        first_token_s=None,
        last_token_s=None,
        num_preemptions=0,
        error=error,
    )
