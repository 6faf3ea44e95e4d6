"""How many drafts were accepted: pooled, by position, by previous step, by request, by category, over time.

Belongs here: counts of accepted drafts, then their quotients. Does not belong here: text, other figures.

Everything is counted in one table, joint[d, a] = steps that drafted d and accepted a, and divided last. Conventions:
a step with nothing drafted is not a draft; accepted counts drafts only; a quotient without a denominator is None.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbench.reports.step_columns import NO_PREVIOUS, StepColumns

AUTOCORRELATION_LAGS = range(1, 9)


def ratio(numerator: float, denominator: float) -> float | None:
    """numerator / denominator; None where nothing was counted."""
    return float(numerator / denominator) if denominator else None


@dataclass(frozen=True, slots=True, eq=False)
class AcceptanceCounts:
    """Drafts counted by what they drafted and accepted."""

    #: k
    num_speculative_tokens: int
    #: [drafted, accepted] -> steps
    joint: np.ndarray

    @property
    def by_accepted(self) -> np.ndarray:
        """[accepted] -> steps"""
        return self.joint.sum(axis=0)

    @property
    def drafts(self) -> int:
        return int(self.joint.sum())

    @property
    def draft_tokens(self) -> int:
        return int(self.joint.sum(axis=1) @ np.arange(self.joint.shape[0]))

    @property
    def accepted_tokens(self) -> int:
        return int(self.by_accepted @ np.arange(self.joint.shape[1]))

    @property
    def accepted_at_position(self) -> list[int]:
        """[k] Steps with accepted > i."""
        return [int(self.by_accepted[position + 1 :].sum()) for position in range(self.num_speculative_tokens)]

    @property
    def reached_position(self) -> list[int]:
        """[k] Steps with accepted >= i and drafted > i: those in which position i could still be accepted."""
        return [int(self.joint[position + 1 :, position:].sum()) for position in range(self.num_speculative_tokens)]

    @property
    def histogram(self) -> list[int]:
        """[k + 1] Steps with exactly j accepted."""
        return [int(count) for count in self.by_accepted[: self.num_speculative_tokens + 1]]

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted"""
        return ratio(self.accepted_tokens, self.draft_tokens)

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts: tokens a step yields, the bonus token included."""
        return None if self.drafts == 0 else 1 + self.accepted_tokens / self.drafts

    @property
    def per_position(self) -> list[float | None]:
        """[k] accepted_i / drafts, over all drafts."""
        return [ratio(accepted, self.drafts) for accepted in self.accepted_at_position]

    @property
    def per_position_conditional(self) -> list[float | None]:
        """[k] Steps with accepted > i over steps with accepted >= i and drafted > i: given the previous position."""
        pairs = zip(self.accepted_at_position, self.reached_position, strict=True)
        return [ratio(accepted, reached) for accepted, reached in pairs]


def count_acceptance(
    num_drafted: np.ndarray, num_accepted: np.ndarray, num_speculative_tokens: int
) -> AcceptanceCounts:
    """Count rows of num_drafted, num_accepted [num_rows]. Rows with nothing drafted are left out."""
    groups = np.zeros(len(num_drafted), np.int64)
    return count_by_group(groups, 1, num_drafted, num_accepted, num_speculative_tokens)[0]


def count_by_group(
    group: np.ndarray, num_groups: int, num_drafted: np.ndarray, num_accepted: np.ndarray, num_speculative_tokens: int
) -> list[AcceptanceCounts]:
    """One count for each group 0..num_groups-1, given `group` [num_rows]. Rows outside those groups are left out."""
    kept = (num_drafted > 0) & (group >= 0) & (group < num_groups)
    group, num_drafted, num_accepted = group[kept], num_drafted[kept], num_accepted[kept]
    num_columns = 1 + max(num_speculative_tokens, int(num_accepted.max(initial=0)))
    num_rows = 1 + max(num_speculative_tokens, int(num_drafted.max(initial=0)))
    cell = (group * num_rows + num_drafted) * num_columns + num_accepted
    joint = np.bincount(cell, minlength=num_groups * num_rows * num_columns)
    tables = joint.reshape(num_groups, num_rows, num_columns)
    return [AcceptanceCounts(num_speculative_tokens, table) for table in tables]


def acceptance_metrics(columns: StepColumns, num_speculative_tokens: int | None) -> dict:
    """The `acceptance` block of metrics.json. Without `num_speculative_tokens` speculation was off."""
    if num_speculative_tokens is None:
        return _not_measured()
    counts = count_acceptance(columns.num_drafted, columns.num_accepted, num_speculative_tokens)
    return {
        "num_speculative_tokens": num_speculative_tokens,
        **pooled(counts),
        "accepted_histogram": counts.histogram,
        "by_previous": _by_previous(columns, num_speculative_tokens),
        "per_request_mean_length": per_request_mean_length(columns),
        "autocorrelation": autocorrelation(columns, is_within_request=False),
        "autocorrelation_within_request": autocorrelation(columns, is_within_request=True),
        "by_category": _by_category(columns, num_speculative_tokens),
    }


def pooled(counts: AcceptanceCounts) -> dict:
    """All that is read off one count, under the names of metrics.json."""
    return {
        "drafts": counts.drafts,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "acceptance_rate": counts.acceptance_rate,
        "acceptance_length": counts.acceptance_length,
        "accepted_at_position": counts.accepted_at_position,
        "reached_position": counts.reached_position,
        "per_position": counts.per_position,
        "per_position_conditional": counts.per_position_conditional,
    }


def per_request_mean_length(columns: StepColumns) -> float | None:
    """Mean over requests of 1 + accepted / drafts: each request weighs the same, whatever its length."""
    is_draft = columns.is_draft
    request = columns.request[is_draft]
    drafts = np.bincount(request)
    accepted = np.bincount(request, weights=columns.num_accepted[is_draft])
    has_drafts = drafts > 0
    return float((1 + accepted[has_drafts] / drafts[has_drafts]).mean()) if has_drafts.any() else None


def autocorrelation(columns: StepColumns, *, is_within_request: bool) -> list[float | None]:
    """[8] Autocorrelation of num_accepted at lags 1..8, over pairs of drafts of one request that lie `lag` steps apart.

    mean over pairs of d_t d_(t+lag) / mean over drafts of d², with d = accepted - mean; the mean is that of all drafts,
    or with `is_within_request` that of the request, which leaves out that some requests are easier than others.
    """
    deviation = _deviation(columns, is_within_request)
    spread = np.square(deviation[columns.is_draft]).sum()
    if not spread > 0:
        return [None for _ in AUTOCORRELATION_LAGS]
    variance = float(spread / columns.is_draft.sum())
    return [_lagged(columns, deviation, variance, lag) for lag in AUTOCORRELATION_LAGS]


def _lagged(columns: StepColumns, deviation: np.ndarray, variance: float, lag: int) -> float | None:
    is_pair = (
        (columns.request[lag:] == columns.request[:-lag])
        & (columns.step[lag:] == columns.step[:-lag] + lag)
        & columns.is_draft[lag:]
        & columns.is_draft[:-lag]
    )
    mean_product = ratio((deviation[lag:] * deviation[:-lag])[is_pair].sum(), is_pair.sum())
    return None if mean_product is None else mean_product / variance


def _deviation(columns: StepColumns, is_within_request: bool) -> np.ndarray:
    """[num_rows] num_accepted less its mean over drafts; what stands in rows that are no drafts is not used."""
    group = columns.request if is_within_request else np.zeros_like(columns.request)
    is_draft = columns.is_draft
    num_groups = int(group.max(initial=-1)) + 1
    count = np.bincount(group[is_draft], minlength=num_groups)
    total = np.bincount(group[is_draft], weights=columns.num_accepted[is_draft], minlength=num_groups)
    mean = total / np.maximum(count, 1)
    return columns.num_accepted - mean[group]


def _by_previous(columns: StepColumns, num_speculative_tokens: int) -> list[dict]:
    """A bucket for each value of `previous`: null (no previous row), -1 (it drafted nothing), 0..k."""
    counts = count_by_group(
        columns.previous - NO_PREVIOUS,
        num_speculative_tokens + 1 - NO_PREVIOUS,
        columns.num_drafted,
        columns.num_accepted,
        num_speculative_tokens,
    )
    return [
        {"previous": None if index == 0 else index + NO_PREVIOUS, **pooled(bucket)}
        for index, bucket in enumerate(counts)
    ]


def _by_category(columns: StepColumns, num_speculative_tokens: int) -> dict[str, dict]:
    """The pooled figures of each category; empty where requests have none."""
    names = sorted({request.category for request in columns.requests if request.category is not None})
    index_of = {name: index for index, name in enumerate(names)}
    of_request = np.array(
        [-1 if one.category is None else index_of[one.category] for one in columns.requests], np.int64
    )
    counts = count_by_group(
        of_request[columns.request], len(names), columns.num_drafted, columns.num_accepted, num_speculative_tokens
    )
    return {name: pooled(count) for name, count in zip(names, counts, strict=True)}


def _not_measured() -> dict:
    scalars = (
        "num_speculative_tokens",
        "drafts",
        "draft_tokens",
        "accepted_tokens",
        "acceptance_rate",
        "acceptance_length",
        "per_request_mean_length",
    )
    lists = (
        "accepted_at_position",
        "reached_position",
        "per_position",
        "per_position_conditional",
        "accepted_histogram",
        "by_previous",
        "autocorrelation",
        "autocorrelation_within_request",
    )
    return dict.fromkeys(scalars) | {name: [] for name in lists} | {"by_category": {}}
