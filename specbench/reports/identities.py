"""Equations that the counters of a run must satisfy among themselves, checked on every run.

Belongs here: each identity with both its sides. Does not belong here: what is done about a broken one.

Sides are compared as counts and shown as they are read; `holds` is None where an identity says nothing about the run.
"""

from __future__ import annotations

import numpy as np

from specbench.reports.step_columns import StepColumns

_SAYS_NOTHING = {"left": None, "right": None, "holds": None}


def identity_checks(columns: StepColumns, acceptance: dict, *, has_steps: bool = True) -> dict[str, dict]:
    """Identity -> left, right, holds, from the columns and the `acceptance` block of metrics.json.

    Without `has_steps`, for a source that gives its counts in sum, only what relates those counts is checked.
    """
    if not has_steps:
        unseen = ("rate_from_length", "generated_tokens", "tokens_of_each_request", "rows_consistent")
        return {"sum_of_positions": _sum_of_positions(acceptance)} | {name: dict(_SAYS_NOTHING) for name in unseen}
    return {
        "sum_of_positions": _sum_of_positions(acceptance),
        "rate_from_length": _rate_from_length(columns, acceptance),
        "generated_tokens": _generated_tokens(columns),
        "tokens_of_each_request": _tokens_of_each_request(columns),
        "rows_consistent": _rows_consistent(columns),
    }


def broken_identities(metrics: dict) -> list[str]:
    """Names of those that do not hold."""
    return [name for name, check in metrics["checks"]["identities"].items() if check["holds"] is False]


def distrust(metrics: dict) -> str | None:
    """Why no figure of this run can be trusted: identities that are broken, a wrong text; else None."""
    reasons = []
    if broken := broken_identities(metrics):
        reasons.append(f"identities broken ({', '.join(broken)})")
    if metrics["checks"]["output"]["status"] == "mismatch":
        reasons.append("the output check failed")
    if metrics["checks"]["losslessness"]["status"] == "mismatch":
        reasons.append("speculation is not lossless")
    return ", ".join(reasons) or None


def _compare(left: int, right: int) -> dict:
    return {"left": left, "right": right, "holds": left == right}


def _sum_of_positions(acceptance: dict) -> dict:
    """sum of per_position = acceptance_length - 1"""
    if not acceptance["drafts"] or not acceptance["accepted_at_position"]:
        return dict(_SAYS_NOTHING)
    at_positions = sum(acceptance["accepted_at_position"])
    return {
        "left": at_positions / acceptance["drafts"],
        "right": acceptance["acceptance_length"] - 1,
        "holds": at_positions == acceptance["accepted_tokens"],
    }


def _rate_from_length(columns: StepColumns, acceptance: dict) -> dict:
    """acceptance_rate = (acceptance_length - 1) / k, when every drafted row has k."""
    k = acceptance["num_speculative_tokens"]
    if not acceptance["drafts"] or (columns.num_drafted[columns.is_draft] != k).any():
        return dict(_SAYS_NOTHING)
    return {
        "left": acceptance["acceptance_rate"],
        "right": (acceptance["acceptance_length"] - 1) / k,
        "holds": acceptance["draft_tokens"] == acceptance["drafts"] * k,
    }


def _generated_tokens(columns: StepColumns) -> dict:
    """generated tokens = rows + accepted + requests that produced a first token - discarded"""
    generated = sum(request.num_output_tokens for request in columns.requests)
    first_tokens = sum(request.first_token_s is not None for request in columns.requests)
    accepted, discarded = int(columns.num_accepted.sum()), int(columns.num_discarded.sum())
    return _compare(generated, len(columns.request) + accepted + first_tokens - discarded)


def _tokens_of_each_request(columns: StepColumns) -> dict:
    """Requests with num_output_tokens = 0 and no rows, or 1 + sum(num_emitted); against all requests."""
    emitted = np.bincount(columns.request, weights=columns.num_emitted, minlength=len(columns.requests))
    agreeing = sum(
        request.num_output_tokens == (request.first_token_s is not None) + emitted[index]
        for index, request in enumerate(columns.requests)
    )
    return _compare(int(agreeing), len(columns.requests))


def _rows_consistent(columns: StepColumns) -> dict:
    """Rows of a known request, numbered without a gap, with counts that agree; against all rows.

    0 <= accepted <= drafted; discarded = accepted + 1 - emitted >= 0; trimmed = discarded > 0.
    """
    numbered = np.arange(len(columns.step)) - np.searchsorted(columns.request, columns.request)
    agrees = (
        (columns.step == numbered)
        & (columns.num_accepted >= 0)
        & (columns.num_accepted <= columns.num_drafted)
        & (columns.num_emitted >= 0)
        & (columns.num_discarded >= 0)
        & (columns.num_discarded == columns.num_accepted + 1 - columns.num_emitted)
        & (columns.is_trimmed == (columns.num_discarded > 0))
    )
    return _compare(int(agrees.sum()), len(columns.step) + columns.num_orphan_rows)
