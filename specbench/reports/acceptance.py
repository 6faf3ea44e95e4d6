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


def _summed_from(counts: np.ndarray) -> np.ndarray:
    """Row i: the sum of rows i and beyond."""
    return counts[::-1].cumsum(axis=0)[::-1]


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
        at_least = _summed_from(self.by_accepted)
        return [int(count) for count in at_least[1 : self.num_speculative_tokens + 1]]

    @property
    def reached_position(self) -> list[int]:
        """[k] Steps with accepted >= i and drafted > i: those in which position i could still be accepted."""
        at_least = _summed_from(_summed_from(self.joint.T).T)
        return [int(at_least[position + 1, position]) for position in range(self.num_speculative_tokens)]

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


@dataclass(frozen=True, slots=True, eq=False)
class DraftCells:
    """The drafts of some rows, each as its cell of the joint table: every count is a count of cells."""

    #: k
    num_speculative_tokens: int
    #: [num_drafts] Index of each draft's row; a slice where every row drafted.
    rows: np.ndarray | slice
    #: [num_drafts] Index into the flattened joint table.
    cell: np.ndarray
    #: Of the joint table.
    shape: tuple[int, int]

    @classmethod
    def of(cls, num_drafted: np.ndarray, num_accepted: np.ndarray, num_speculative_tokens: int) -> DraftCells:
        """Of rows that drafted and accepted so many, [num_rows] each. Rows with nothing drafted are left out."""
        is_draft = num_drafted > 0
        rows = slice(None) if is_draft.all() else np.flatnonzero(is_draft)
        num_drafted, num_accepted = num_drafted[rows], num_accepted[rows]
        num_columns = 1 + max(num_speculative_tokens, int(num_accepted.max(initial=0)))
        num_rows = 1 + max(num_speculative_tokens, int(num_drafted.max(initial=0)))
        return cls(num_speculative_tokens, rows, num_drafted * num_columns + num_accepted, (num_rows, num_columns))

    def pooled(self) -> AcceptanceCounts:
        """All drafts as one count."""
        joint = np.bincount(self.cell, minlength=self.shape[0] * self.shape[1])
        return AcceptanceCounts(self.num_speculative_tokens, joint.reshape(self.shape))

    def by_group(self, group: np.ndarray, num_groups: int) -> list[AcceptanceCounts]:
        """One count for each group 0..num_groups-1, given `group` [num_rows]. Rows outside those are left out."""
        group, size = group[self.rows], self.shape[0] * self.shape[1]
        is_inside = (group >= 0) & (group < num_groups)
        cell = group * size + self.cell
        joint = np.bincount(cell if is_inside.all() else cell[is_inside], minlength=num_groups * size)
        tables = joint.reshape(num_groups, *self.shape)
        return [AcceptanceCounts(self.num_speculative_tokens, table) for table in tables]


def acceptance_metrics(columns: StepColumns, num_speculative_tokens: int | None) -> dict:
    """The `acceptance` block of metrics.json. Without `num_speculative_tokens` speculation was off."""
    if num_speculative_tokens is None:
        return _not_measured()
    cells = DraftCells.of(columns.num_drafted, columns.num_accepted, num_speculative_tokens)
    counts = cells.pooled()
    autocorrelation, within_request = autocorrelations(columns)
    return {
        "num_speculative_tokens": num_speculative_tokens,
        **pooled(counts),
        "accepted_histogram": counts.histogram,
        "by_previous": _by_previous(columns, cells),
        "per_request_mean_length": per_request_mean_length(columns),
        "autocorrelation": autocorrelation,
        "autocorrelation_within_request": within_request,
        "by_category": _by_category(columns, cells),
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
    drafts, accepted = _by_request(columns)
    has_drafts = drafts > 0
    return float((1 + accepted[has_drafts] / drafts[has_drafts]).mean()) if has_drafts.any() else None


def _by_request(columns: StepColumns) -> tuple[np.ndarray, np.ndarray]:
    """(drafts, accepted drafts) of each request, [num_requests] each."""
    num_requests = len(columns.requests)
    accepted = np.where(columns.is_draft, columns.num_accepted, 0)
    return (
        np.bincount(columns.request, weights=columns.is_draft, minlength=num_requests),
        np.bincount(columns.request, weights=accepted, minlength=num_requests),
    )


def autocorrelations(columns: StepColumns) -> tuple[list[float | None], list[float | None]]:
    """Autocorrelation of num_accepted at lags 1..8, over pairs of drafts of one request that lie `lag` steps apart.

    mean over pairs of d_t d_(t+lag) / mean over drafts of d², with d = accepted - mean. The mean is first that of all
    drafts, then that of the request, which leaves out that some requests are easier than others.
    """
    drafts, accepted = _by_request(columns)
    means = (
        np.full(len(drafts), accepted.sum() / max(drafts.sum(), 1)),
        accepted / np.maximum(drafts, 1),
    )
    # What is no draft deviates by nothing, so that it adds nothing to a sum of products.
    deviations = [(columns.num_accepted - mean[columns.request]) * columns.is_draft for mean in means]
    lagged = [_lagged(columns, deviations, lag) for lag in AUTOCORRELATION_LAGS]
    spreads = [float(deviation @ deviation) / max(drafts.sum(), 1) for deviation in deviations]
    pooled_ones, within = (
        [None if one is None or not spread > 0 else one / spread for one in products]
        for spread, products in zip(spreads, zip(*lagged, strict=True), strict=True)
    )
    return pooled_ones, within


def _lagged(columns: StepColumns, deviations: list[np.ndarray], lag: int) -> list[float | None]:
    """Mean product over the pairs at one lag, for each of `deviations`."""
    is_pair = (columns.request[lag:] == columns.request[:-lag]) & (columns.step[lag:] - columns.step[:-lag] == lag)
    num_pairs = int(np.count_nonzero(is_pair & columns.is_draft[lag:] & columns.is_draft[:-lag]))
    return [ratio((one[lag:] * is_pair) @ one[:-lag], num_pairs) for one in deviations]


def _by_previous(columns: StepColumns, cells: DraftCells) -> list[dict]:
    """A bucket for each value of `previous`: null (no previous row), -1 (it drafted nothing), 0..k."""
    counts = cells.by_group(columns.previous - NO_PREVIOUS, cells.num_speculative_tokens + 1 - NO_PREVIOUS)
    return [
        {"previous": None if index == 0 else index + NO_PREVIOUS, **pooled(bucket)}
        for index, bucket in enumerate(counts)
    ]


def _by_category(columns: StepColumns, cells: DraftCells) -> dict[str, dict]:
    """The pooled figures of each category; empty where requests have none."""
    names = sorted({request.category for request in columns.requests if request.category is not None})
    if not names:
        return {}
    index_of = {name: index for index, name in enumerate(names)}
    of_request = np.array(
        [-1 if one.category is None else index_of[one.category] for one in columns.requests], np.int64
    )
    counts = cells.by_group(of_request[columns.request], len(names))
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
