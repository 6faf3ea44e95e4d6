"""Counts of drafts summed by sample, and which of them make which metric of metrics.json.

Belongs here: the sums that intervals and paired tests start from, and their metric paths. Does not belong here:
resampling and tests (statistics.py), the figures themselves (acceptance.py), text.

A path is the way to the figure in metrics.json, with list indices: in `acceptance.by_previous[2].per_position[0]`
bucket 0 is null, 1 is -1, and 2 + j is j accepted. Two totals over buckets stand only here and in `intervals`:
`acceptance.by_previous.below_k` (0..k-1 together) and `acceptance.by_previous.with_previous` (0..k together).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records import RequestRecord
from specbench.reports.statistics import Ratios
from specbench.reports.step_columns import NO_PREVIOUS, StepColumns

#: Rows that are counted at once, so that temporaries stay small beside the columns.
_CHUNK_ROWS = 1_000_000
BELOW_K = "acceptance.by_previous.below_k"
WITH_PREVIOUS = "acceptance.by_previous.with_previous"


@dataclass(frozen=True, slots=True, eq=False)
class SampleSums:
    """Metrics of one run as quotients of sums over its samples."""

    #: Row -> sample, in sorted order.
    sample_ids: tuple[str, ...]
    #: [num_samples, num_quantities]
    sums: np.ndarray
    #: [num_metrics] over the columns of `sums`
    ratios: Ratios
    #: [num_metrics] Where the metric stands in metrics.json.
    paths: tuple[str, ...]

    def restricted(self, sample_ids: Sequence[str], paths: Sequence[str]) -> SampleSums:
        """The same for some samples and some metrics; columns are the numerators, then the denominators."""
        row_of = {name: row for row, name in enumerate(self.sample_ids)}
        column_of = {path: column for column, path in enumerate(self.paths)}
        rows = [row_of[name] for name in sample_ids]
        chosen = [column_of[path] for path in paths]
        columns = np.concatenate([self.ratios.numerator[chosen], self.ratios.denominator[chosen]])
        index = np.arange(len(chosen))
        ratios = Ratios(index, len(chosen) + index, self.ratios.offset[chosen])
        return SampleSums(tuple(sample_ids), self.sums[rows][:, columns], ratios, tuple(paths))


def paired(base: SampleSums, new: SampleSums) -> tuple[SampleSums, SampleSums]:
    """Both runs over the samples and the metrics that both have: equal rows, columns, ratios and paths."""
    sample_ids = sorted(set(base.sample_ids) & set(new.sample_ids))
    in_new = set(new.paths)
    paths = [path for path in base.paths if path in in_new]
    return base.restricted(sample_ids, paths), new.restricted(sample_ids, paths)


def sample_index(requests: Sequence[RequestRecord]) -> tuple[tuple[str, ...], np.ndarray]:
    """Sorted sample ids, and [num_requests] request -> index into them."""
    names = sorted({request.sample_id for request in requests})
    index_of = {name: index for index, name in enumerate(names)}
    return tuple(names), np.array([index_of[request.sample_id] for request in requests], np.int64)


def acceptance_sums(columns: StepColumns, num_speculative_tokens: int) -> SampleSums:
    """Rate, length and positions: of all drafts, and given the previous step."""
    sample_ids, sample_of = sample_index(columns.requests)
    k, num_buckets = num_speculative_tokens, num_speculative_tokens + 1 - NO_PREVIOUS
    bucket = np.minimum(columns.previous, k) - NO_PREVIOUS
    tables = _tables(columns, sample_of, len(sample_ids), bucket, num_buckets, k)
    after_drafts = tables[:, -k - 1 :]
    by_previous = {f"acceptance.by_previous[{index}]": tables[:, index] for index in range(num_buckets)}
    by_previous |= {BELOW_K: after_drafts[:, :-1].sum(axis=1), WITH_PREVIOUS: after_drafts.sum(axis=1)}
    parts = [_draft_sums(sample_ids, tables.sum(axis=1), "acceptance")]
    parts += [_draft_sums(sample_ids, table, prefix) for prefix, table in by_previous.items()]
    return _side_by_side([*parts, _mean_length_sums(columns, sample_ids, sample_of)])


def bucket_sums(
    columns: StepColumns, bucket: np.ndarray, paths: Mapping[int, str], num_speculative_tokens: int
) -> SampleSums:
    """Rate, length and position 0 of some buckets: `bucket` [num_steps] of each step, and where the figures of the
    chosen ones stand in metrics.json."""
    sample_ids, sample_of = sample_index(columns.requests)
    place_of = np.full(int(bucket.max(initial=-1)) + 2, len(paths))  # the last place: of no bucket, or of no chosen one
    place_of[list(paths)] = np.arange(len(paths))
    tables = _tables(columns, sample_of, len(sample_ids), place_of[bucket], len(paths) + 1, num_speculative_tokens)
    parts = [_draft_sums(sample_ids, tables[:, place], prefix) for place, prefix in enumerate(paths.values())]
    wanted = ("acceptance_rate", "acceptance_length", "per_position[0]")
    chosen = [
        part.restricted(sample_ids, [f"{path}.{name}" for name in wanted])
        for part, path in zip(parts, paths.values(), strict=True)
    ]
    return _side_by_side(chosen)


def category_sums(columns: StepColumns, num_speculative_tokens: int) -> dict[str, SampleSums]:
    """Rate, length and positions of each category, over the samples that have requests of it."""
    names = sorted({request.category for request in columns.requests if request.category is not None})
    index_of = {name: index for index, name in enumerate(names)}
    sample_ids, sample_of = sample_index(columns.requests)
    category_of = np.array(
        [-1 if one.category is None else index_of[one.category] for one in columns.requests], np.int64
    )
    # Pairs of category and sample, in that order, so that a category's samples lie together.
    pairs, row_of = np.unique(category_of * len(sample_ids) + sample_of, return_inverse=True)
    whole = np.zeros(len(columns.request), np.int64)
    tables = _tables(columns, row_of, len(pairs), whole, 1, num_speculative_tokens)[:, 0]
    by_category = {}
    for name, index in index_of.items():
        is_of = pairs // len(sample_ids) == index
        chosen = tuple(sample_ids[sample] for sample in pairs[is_of] % len(sample_ids))
        by_category[name] = _draft_sums(chosen, tables[is_of], category_path(name))
    return by_category


def category_path(name: str) -> str:
    """Where a category's figures stand in metrics.json."""
    return f"acceptance.by_category.{name}"


def _tables(
    columns: StepColumns, row_of: np.ndarray, num_rows: int, bucket: np.ndarray, num_buckets: int, k: int
) -> np.ndarray:
    """[num_rows, num_buckets, 2k + 3] drafts, draft tokens, accepted tokens, accepted at and reached each position.

    `row_of` [num_requests] is the row that a request is counted in; `bucket` is [num_steps]. A draft reaches position i
    with accepted >= i and drafted > i, that is with min(accepted, drafted - 1) >= i.
    """
    most = max(k, int(columns.num_accepted.max(initial=0)))
    accepted_counts = np.zeros(num_rows * num_buckets * (most + 1))
    reached_counts = np.zeros_like(accepted_counts)
    draft_tokens = np.zeros(num_rows * num_buckets)
    for first in range(0, len(columns.request), _CHUNK_ROWS):
        chunk = slice(first, first + _CHUNK_ROWS)
        drafted, accepted, row = columns.num_drafted[chunk], columns.num_accepted[chunk], row_of[columns.request[chunk]]
        kept = drafted > 0
        drafted, accepted = drafted[kept], accepted[kept]
        cell = row[kept] * num_buckets + bucket[chunk][kept]
        draft_tokens += np.bincount(cell, weights=drafted, minlength=len(draft_tokens))
        cell *= most + 1
        accepted_counts += np.bincount(cell + accepted, minlength=len(accepted_counts))
        reached_counts += np.bincount(cell + np.minimum(accepted, drafted - 1), minlength=len(reached_counts))
    by_accepted = accepted_counts.reshape(num_rows, num_buckets, most + 1)
    at_least, reached = (
        counts.reshape(num_rows, num_buckets, most + 1)[..., ::-1].cumsum(axis=-1)[..., ::-1]
        for counts in (accepted_counts, reached_counts)
    )
    accepted_tokens = by_accepted @ np.arange(most + 1)
    scalars = np.stack([at_least[..., 0], draft_tokens.reshape(num_rows, num_buckets), accepted_tokens], axis=-1)
    return np.concatenate([scalars, at_least[..., 1 : k + 1], reached[..., :k]], axis=-1)


def _draft_sums(sample_ids: tuple[str, ...], table: np.ndarray, prefix: str) -> SampleSums:
    """The metrics of one table [num_samples, 2k + 3] of counts."""
    k = (table.shape[1] - 3) // 2
    positions = range(k)
    quotients = {"acceptance_rate": (2, 1, 0), "acceptance_length": (2, 0, 1)}
    quotients |= {f"per_position[{position}]": (3 + position, 0, 0) for position in positions}
    quotients |= {
        f"per_position_conditional[{position}]": (3 + position, 3 + k + position, 0) for position in positions
    }
    numerator, denominator, offset = np.array(list(quotients.values())).T
    return SampleSums(
        sample_ids, table, Ratios(numerator, denominator, offset), tuple(f"{prefix}.{name}" for name in quotients)
    )


def _mean_length_sums(columns: StepColumns, sample_ids: tuple[str, ...], sample_of: np.ndarray) -> SampleSums:
    """The mean of requests' own lengths."""
    drafts, accepted = (
        np.bincount(columns.request, weights=values, minlength=len(sample_of))
        for values in (columns.is_draft, columns.num_accepted * columns.is_draft)
    )
    has_drafts = drafts > 0
    rows = sample_of[has_drafts]
    lengths = np.bincount(rows, weights=1 + accepted[has_drafts] / drafts[has_drafts], minlength=len(sample_ids))
    sums = np.stack([lengths, np.bincount(rows, minlength=len(sample_ids))], axis=1)
    ratios = Ratios(np.array([0]), np.array([1]), np.array([0]))
    return SampleSums(sample_ids, sums, ratios, ("acceptance.per_request_mean_length",))


def _side_by_side(parts: Sequence[SampleSums]) -> SampleSums:
    """The metrics of all parts, which have the same samples."""
    starts = np.cumsum([0, *(part.sums.shape[1] for part in parts)])[:-1]
    ratios = Ratios(
        np.concatenate([start + part.ratios.numerator for start, part in zip(starts, parts, strict=True)]),
        np.concatenate([start + part.ratios.denominator for start, part in zip(starts, parts, strict=True)]),
        np.concatenate([part.ratios.offset for part in parts]),
    )
    sums = np.concatenate([part.sums for part in parts], axis=1)
    return SampleSums(parts[0].sample_ids, sums, ratios, tuple(path for part in parts for path in part.paths))
