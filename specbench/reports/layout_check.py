"""Whether two runs that differ only in how the model is spread over devices drafted and accepted alike, step by step.

Belongs here: that one check, and a layout in words. Does not belong here: whether only the layout differs
(comparability.py), texts.

Splitting a model over ranks changes the order of sums, not the drafts. In float32 every step is the same, unless two
logits are closer than rounding (some 1e-6 of them), which records do not say. In bfloat16 a near tie may be decided
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specbench.reports.number_format import count
from specbench.reports.step_columns import StepColumns
from specbench.reports.text_difference import SampleKey


@dataclass(frozen=True, slots=True)
class LayoutCheck:
    """Steps of both runs, put into one order."""

    #: Of the base run and of the other, in words.
    layouts: tuple[str, str]
    holds: bool
    #: Steps of the base run.
    steps: int
    #: The first request whose steps differ, and which step of it; None where none does.
    first_difference: tuple[SampleKey, int] | None
    #: Both runs computed in float32.
    is_exact: bool

    @property
    def is_fault(self) -> bool:
        """A fault, as far as records can tell."""
        return not self.holds and self.is_exact

    @property
    def sentence(self) -> str:
        layouts = f"Layouts ({' against '.join(reversed(self.layouts))})"
        if self.holds:
            return f"{layouts}: acceptance is **identical** in all {count(self.steps)} steps"
        if self.first_difference is None:
            return f"{layouts}: **different requests ran**, so acceptance cannot be the same"
        (sample_id, turn, repeat), step = self.first_difference
        return (
            f"{layouts}: acceptance is **different**, first at step {step} of sample {sample_id} (turn {turn}, "
            f"repeat {repeat}); "
            + (
                "it must not depend on how the model is spread, unless two logits of float32 are closer than rounding"
                if self.is_exact
                else "but for near ties in bfloat16 it does not depend on how the model is spread"
            )
        )


def layout_text(config: Mapping[str, Any]) -> str:
    """How a run's model was spread, from its configuration as run.json holds it."""
    parallel = config["parallel"]
    size = parallel["tensor_parallel_size"]
    if size == 1:
        return "one rank"
    experts = ", whole experts" if parallel.get("experts") == "whole" else ""
    sharing = f", {share} to a GPU" if (share := parallel.get("ranks_per_gpu", 1)) > 1 else ""
    return f"tensor parallel over {size} ranks{experts}{sharing}"


def check_layouts(base: StepColumns, new: StepColumns, layouts: tuple[str, str], *, is_exact: bool) -> LayoutCheck:
    """Compare drafted and accepted counts of every step of every request. is_exact: both ran in float32."""
    keys, new_keys = _keys(base), _keys(new)
    if sorted(keys) != sorted(new_keys):
        return LayoutCheck(layouts, False, len(base.step), None, is_exact)
    order = {key: rank for rank, key in enumerate(sorted(keys))}
    first, second = _ordered(base, keys, order), _ordered(new, new_keys, order)
    rows = min(len(first), len(second))
    differing = np.flatnonzero((first[:rows] != second[:rows]).any(axis=1))
    if len(differing) == 0 and len(first) == len(second):
        return LayoutCheck(layouts, True, len(first), None, is_exact)
    row = int(differing[0]) if len(differing) else rows
    rank, step = (first if row < len(first) else second)[row, :2]
    return LayoutCheck(layouts, False, len(first), (sorted(keys)[int(rank)], int(step)), is_exact)


def _keys(columns: StepColumns) -> list[SampleKey]:
    return [(request.sample_id, request.turn, request.repeat) for request in columns.requests]


def _ordered(columns: StepColumns, keys: list[SampleKey], order: dict[SampleKey, int]) -> np.ndarray:
    """[num_rows, 4] Rank of the request, step, drafted, accepted, in this order."""
    rank = np.array([order[key] for key in keys], np.int64)[columns.request]
    rows = np.stack([rank, columns.step, columns.num_drafted, columns.num_accepted], axis=1)
    return rows[np.lexsort((columns.step, rank))]
