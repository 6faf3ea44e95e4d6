"""How much requests differ in accepted drafts, against how much the two halves of one request do.

Belongs here: those two mean squares. Does not belong here: what counts as too much (drafting_checks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np

from specbench.reports.clusters import MIN_SAMPLES
from specbench.reports.step_columns import StepColumns

_NUM_NAMED = 3


@dataclass(frozen=True, slots=True)
class RequestSpread:
    """Requests with two drafts or more."""

    num_requests: int
    num_categories: int
    #: Mean square between requests of one category over that between halves of one request.
    ratio: float
    #: Standard deviation between requests, chance taken off, over the mean of accepted drafts a step.
    relative: float
    #: The requests that lie furthest below their category: "r17 (0.12)".
    lowest: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Halves:
    """Drafts and accepted drafts in the first and second half of each request, [2, num_requests]."""

    drafts: np.ndarray
    accepted: np.ndarray


def request_spread(columns: StepColumns, category_of_request: np.ndarray) -> RequestSpread | None:
    """Given each request's category [num_requests]. None under 20 requests with two drafts, or with nothing accepted.

    Σ n (mean - mean of category)² / (requests - categories), against Σ w (mean of half 1 - of half 2)² / requests with
    w = n1 n2 / (n1 + n2): both are the variance of one draft where requests do not differ.
    """
    halves = _halves(columns)
    drafts, accepted = halves.drafts.sum(axis=0), halves.accepted.sum(axis=0)
    kept = (halves.drafts > 0).all(axis=0)
    if kept.sum() < MIN_SAMPLES or not accepted[kept].any():
        return None
    category = category_of_request[kept]
    within = _within(halves.drafts[:, kept], halves.accepted[:, kept])
    drafts, accepted = drafts[kept], accepted[kept]
    mean = np.bincount(category, weights=accepted) / np.maximum(np.bincount(category, weights=drafts), 1)
    deviation = accepted / drafts - mean[category]
    num_requests, num_categories = len(drafts), len(np.unique(category))
    if num_requests <= num_categories:
        return None
    between = float(drafts @ deviation**2) / (num_requests - num_categories)
    drafts_a_request = (drafts.sum() - (drafts**2).sum() / drafts.sum()) / (num_requests - 1)
    spread = sqrt(max(between - within, 0.0) / drafts_a_request)
    names = np.flatnonzero(kept)[np.argsort(deviation * np.sqrt(drafts))[:_NUM_NAMED]]
    return RequestSpread(
        num_requests=num_requests,
        num_categories=num_categories,
        ratio=between / within if within else float("inf"),
        relative=spread / float(accepted.sum() / drafts.sum()),
        lowest=tuple(_named(columns, index, halves) for index in names),
    )


def _halves(columns: StepColumns) -> _Halves:
    is_draft = columns.is_draft
    num_drafts = np.bincount(columns.request, weights=is_draft, minlength=len(columns.requests)).astype(np.int64)
    accepted = np.append(0, np.cumsum(columns.num_accepted[is_draft]))  # before each draft, and after the last
    end = np.cumsum(num_drafts)
    start, middle = end - num_drafts, end - num_drafts // 2
    return _Halves(
        np.stack([middle - start, end - middle]),
        np.stack([accepted[middle] - accepted[start], accepted[end] - accepted[middle]]).astype(np.float64),
    )


def _within(drafts: np.ndarray, accepted: np.ndarray) -> float:
    difference = accepted[0] / drafts[0] - accepted[1] / drafts[1]
    weight = drafts[0] * drafts[1] / drafts.sum(axis=0)
    return float((weight * difference**2).mean())


def _named(columns: StepColumns, index: int, halves: _Halves) -> str:
    mean = halves.accepted[:, index].sum() / halves.drafts[:, index].sum()
    return f"{columns.requests[index].request_id} ({mean:.2f})"
