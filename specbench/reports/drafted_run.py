"""What the explanations of a difference need of each of two runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.records import SampleRecord
from specbench.reports.step_columns import StepColumns


@dataclass(frozen=True, slots=True, eq=False)
class DraftedRun:
    """One run, under the name that sentences call it by."""

    label: str
    #: k
    num_speculative_tokens: int
    columns: StepColumns
    #: Read by the same-token check alone.
    samples: Sequence[SampleRecord] = ()
