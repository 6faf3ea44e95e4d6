"""Whether two runs that differ only in how the model is spread over devices drafted and accepted alike, step by step.

Belongs here: that one check. Does not belong here: whether only the layout differs (comparability.py), texts.

Splitting a model over ranks changes the order of sums, not the drafts: where texts are the same, so is every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specbench.reports.number_format import count
from specbench.reports.step_columns import StepColumns
from specbench.reports.text_difference import SampleKey


@dataclass(frozen=True, slots=True)
class LayoutCheck:
    """Steps of both runs, put into one order."""

    holds: bool
    #: Steps of the base run.
    steps: int
    #: The first request whose steps differ, and which step of it; None where none does.
    first_difference: tuple[SampleKey, int] | None

    @property
    def sentence(self) -> str:
        if self.holds:
            return f"Layouts: acceptance is **identical** in all {count(self.steps)} steps"
        if self.first_difference is None:
            return "Layouts: **different requests ran**, so acceptance cannot be the same"
        (sample_id, turn, repeat), step = self.first_difference
        return (
            f"Layouts: acceptance is **different**, first at step {step} of sample {sample_id} (turn {turn}, "
            f"repeat {repeat}); it should not depend on how the model is spread"
        )


def check_layouts(base: StepColumns, new: StepColumns) -> LayoutCheck:
    """Compare drafted and accepted counts of every step of every request."""
    keys, new_keys = _keys(base), _keys(new)
    if sorted(keys) != sorted(new_keys):
        return LayoutCheck(False, len(base.step), None)
    order = {key: rank for rank, key in enumerate(sorted(keys))}
    first, second = _ordered(base, keys, order), _ordered(new, new_keys, order)
    rows = min(len(first), len(second))
    differing = np.flatnonzero((first[:rows] != second[:rows]).any(axis=1))
    if len(differing) == 0 and len(first) == len(second):
        return LayoutCheck(True, len(first), None)
    row = int(differing[0]) if len(differing) else rows
    rank, step = (first if row < len(first) else second)[row, :2]
    return LayoutCheck(False, len(first), (sorted(keys)[int(rank)], int(step)))


def _keys(columns: StepColumns) -> list[SampleKey]:
    return [(request.sample_id, request.turn, request.repeat) for request in columns.requests]


def _ordered(columns: StepColumns, keys: list[SampleKey], order: dict[SampleKey, int]) -> np.ndarray:
    """[num_rows, 4] Rank of the request, step, drafted, accepted, in this order."""
    rank = np.array([order[key] for key in keys], np.int64)[columns.request]
    rows = np.stack([rank, columns.step, columns.num_drafted, columns.num_accepted], axis=1)
    return rows[np.lexsort((columns.step, rank))]
