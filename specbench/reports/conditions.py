"""Acceptance against where a step stood: turn, output position, prompt length, cached share of the prompt, batch size.

Belongs here: the buckets, with fixed edges that are the same for every run, and what is counted in each. Does not
belong here: text (condition_sections.py), whether a trend is a fault (drafting_checks.py).

A bucket in which nothing was drafted is left out. Requests differ in length and kind, so buckets hold different
requests: each says how many.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specbench.reports.acceptance import DraftCells, pooled
from specbench.reports.sample_sums import SampleSums, bucket_sums
from specbench.reports.step_columns import StepColumns

_LOOKUP_LIMIT = 1 << 20
_POWERS = tuple(2.0**power for power in range(24))


@dataclass(frozen=True, slots=True)
class Buckets:
    """Half-open buckets [edges[i], edges[i + 1]) of one quantity; the last has no upper edge."""

    edges: tuple[float, ...]
    labels: tuple[str, ...]

    def index(self, values: np.ndarray) -> np.ndarray:
        """[n] Bucket of each of `values` [n]; -1 below the first edge."""
        edges = np.array(self.edges)
        if len(values) < _LOOKUP_LIMIT or values.dtype.kind != "i" or values.max() > _LOOKUP_LIMIT or values.min() < 0:
            return np.searchsorted(edges, values, side="right") - 1
        # Millions of small whole numbers: the bucket of each number is found once.
        return (np.searchsorted(edges, np.arange(values.max() + 1), side="right") - 1)[values]


def _of_whole_numbers(edges: tuple[float, ...]) -> Buckets:
    """[16, 32) holds 16 to 31."""
    closed = [
        f"{low:,.0f}" if below == low + 1 else f"{low:,.0f} to {below - 1:,.0f}" for low, below in pairwise(edges)
    ]
    return Buckets(edges, (*closed, f"{edges[-1]:,.0f} and more"))


#: Powers of two, since lengths and batches of a workload spread over orders of magnitude.
BUCKETS = {
    "by_turn": _of_whole_numbers(tuple(map(float, range(16)))),
    "by_output_position": _of_whole_numbers((0.0, *_POWERS[4:])),
    "by_prompt_length": _of_whole_numbers((0.0, *_POWERS[6:])),
    # Nothing cached is a bucket of its own: there the drafter's caches were written by the request itself.
    "by_cached_fraction": Buckets(
        (0.0, 1 / _POWERS[-1], 0.25, 0.5, 0.75), ("0%", "under 25%", "25% to 50%", "50% to 75%", "75% and more")
    ),
    # Up to a power of two (1, 2, 3 to 4, 5 to 8), as batches are padded.
    "by_batch_size": _of_whole_numbers((1.0, *(power + 1 for power in _POWERS))),
}


def condition_tables(columns: StepColumns, num_speculative_tokens: int | None) -> dict[str, list[dict]]:
    """Condition -> its buckets: label, edges, requests, and the pooled figures. Empty when speculation was off."""
    if num_speculative_tokens is None:
        return {name: [] for name in BUCKETS}
    cells = DraftCells.of(columns.num_drafted, columns.num_accepted, num_speculative_tokens)
    found = _buckets(columns)
    return {name: _table(buckets, found[name], columns, cells) for name, buckets in BUCKETS.items()}


def condition_sums(columns: StepColumns, num_speculative_tokens: int) -> list[SampleSums]:
    """Of each condition the sums by sample that the figures of its buckets are made of."""
    cells = DraftCells.of(columns.num_drafted, columns.num_accepted, num_speculative_tokens)
    found = []
    for name, bucket in _buckets(columns).items():
        counts = cells.by_group(bucket, len(BUCKETS[name].edges))
        kept = [index for index, count in enumerate(counts) if count.drafts]
        paths = {index: condition_path(name, place) for place, index in enumerate(kept)}
        if paths:
            found.append(bucket_sums(columns, bucket, paths, num_speculative_tokens))
    return found


def condition_path(name: str, place: int) -> str:
    """Where the figures of a bucket stand in metrics.json; `place` counts those that hold drafts."""
    return f"acceptance.{name}[{place}]"


def cached_fractions(columns: StepColumns) -> np.ndarray:
    """[num_requests] Share of the prompt found in the prefix cache; -1, in no bucket, where it was not asked."""
    num_cached = np.array([_or_minus_one(one.num_cached_prompt_tokens) for one in columns.requests], np.int64)
    num_prompt = np.array([one.num_prompt_tokens for one in columns.requests], np.int64)
    return np.where(num_cached < 0, -1.0, num_cached / np.maximum(num_prompt, 1))


def _or_minus_one(value: int | None) -> int:
    return -1 if value is None else value


def _buckets(columns: StepColumns) -> dict[str, np.ndarray]:
    """Condition -> [num_rows] bucket of each row."""
    num_prompt_tokens = np.array([one.num_prompt_tokens for one in columns.requests], np.int64)
    turn = np.array([one.turn for one in columns.requests], np.int64)
    return {
        "by_turn": BUCKETS["by_turn"].index(turn)[columns.request],
        "by_output_position": BUCKETS["by_output_position"].index(columns.output_index),
        "by_prompt_length": BUCKETS["by_prompt_length"].index(num_prompt_tokens)[columns.request],
        "by_cached_fraction": BUCKETS["by_cached_fraction"].index(cached_fractions(columns))[columns.request],
        "by_batch_size": BUCKETS["by_batch_size"].index(columns.batch_size),
    }


def _table(buckets: Buckets, bucket: np.ndarray, columns: StepColumns, cells: DraftCells) -> list[dict]:
    num_buckets = len(buckets.edges)
    counts = cells.by_group(bucket, num_buckets)
    requests = _num_requests(bucket, num_buckets, columns)
    edges = (*buckets.edges, None)
    return [
        {
            "bucket": buckets.labels[index],
            "low": edges[index],
            "below": edges[index + 1],
            "requests": int(requests[index]),
            **pooled(count),
        }
        for index, count in enumerate(counts)
        if count.drafts
    ]


def _num_requests(bucket: np.ndarray, num_buckets: int, columns: StepColumns) -> np.ndarray:
    """[num_buckets] Distinct requests with a draft in each bucket."""
    is_present = np.zeros((num_buckets + 1, len(columns.requests)), bool)
    # Rows that count nowhere mark a row of their own, the last one.
    is_present[np.where(columns.is_draft, bucket, -1), columns.request] = True
    return is_present[:-1].sum(axis=1)
