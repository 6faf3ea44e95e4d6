"""Engine steps of one run with what each did and how long each part of it took.

Belongs here: the join of engine steps and verify steps, and the time that a step is charged. Does not belong here: a
law of cost (cost_law.py), a prediction (cost_model.py).

A step with requests in decode is charged from the end of the step before it to its own end: those requests were running
all the while, so whatever the host did in between (and the part of a step that another one overlapped) is counted once.
A step of prompts alone is charged from its start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.record_columns import EngineStepColumns
from specbench.records import EngineStep
from specbench.reports.step_columns import StepColumns

#: Numbers of engine steps may have gaps (steps of warm-up, of a resumed run), but not be arbitrary.
_MAX_SPAN = 1000


@dataclass(frozen=True, slots=True, eq=False)
class StepCosts:
    """Measured steps, in the order of their ends. Every array is [num_steps]; a part that was not timed is NaN."""

    #: Speculative tokens of the run; 0 when speculation was off.
    k: int
    step_s: np.ndarray
    #: Requests that verified or decoded.
    num_requests: np.ndarray
    #: All rows: 1 + drafts of each request, and prompt tokens.
    num_rows: np.ndarray
    num_prompt_tokens: np.ndarray
    #: Tokens kept by the measured requests in this step; NaN where steps and rows cannot be joined.
    num_kept_tokens: np.ndarray
    target_s: np.ndarray
    verify_s: np.ndarray
    draft_s: np.ndarray
    #: What is left of step_s: scheduling, sampling on the host, text, records, the wait for the next step.
    host_s: np.ndarray
    #: First arrival to the end of the last step.
    duration_s: float

    @property
    def is_decode_only(self) -> np.ndarray:
        """[num_steps]"""
        return (self.num_prompt_tokens == 0) & (self.num_requests > 0)

    @property
    def is_timed(self) -> bool:
        """Whether the parts of every step were measured."""
        return bool(np.isfinite(self.host_s).all())

    def at_batch(self, num_requests: int) -> np.ndarray:
        """[num_steps] Steps of so many requests in decode and no prompt."""
        return self.is_decode_only & (self.num_requests == num_requests)


def step_costs(columns: StepColumns, engine_steps: Sequence[EngineStep], k: int) -> StepCosts | None:
    """Steps since the first measured request arrived. None where the run recorded none of them."""
    steps = EngineStepColumns.of(engine_steps)
    arrival_s = min((request.arrival_s for request in columns.requests), default=float("inf"))
    order = np.argsort(steps.end_s, kind="stable")
    order = order[steps.start_s[order] >= arrival_s]
    if len(order) == 0:
        return None
    start_s, end_s, num_requests = steps.start_s[order], steps.end_s[order], steps.num_decode_requests[order]
    begun_s = start_s.copy()
    begun_s[1:] = np.where(num_requests[1:] > 0, end_s[:-1], np.maximum(start_s[1:], end_s[:-1]))
    target_s, verify_s, draft_s = steps.target_s[order], steps.verify_s[order], steps.draft_s[order]
    if k == 0:
        draft_s = np.where(np.isnan(target_s), np.nan, 0.0)
    step_s = end_s - begun_s
    return StepCosts(
        k=k,
        step_s=step_s,
        num_requests=num_requests,
        num_rows=steps.num_tokens[order],
        num_prompt_tokens=steps.num_prefill_tokens[order],
        num_kept_tokens=_kept_tokens(steps.engine_step[order], columns),
        target_s=target_s,
        verify_s=verify_s,
        draft_s=draft_s,
        host_s=step_s - target_s - verify_s - draft_s,
        duration_s=float(end_s[-1] - arrival_s),
    )


def _kept_tokens(engine_step: np.ndarray, columns: StepColumns) -> np.ndarray:
    """[num_steps] Tokens that the rows of each step emitted; NaN where engine steps have no numbers of their own."""
    first, span = int(engine_step.min()), int(np.ptp(engine_step)) + 1
    if len(np.unique(engine_step)) < len(engine_step) or span > _MAX_SPAN * len(engine_step):
        return np.full(len(engine_step), np.nan)
    place_of = np.full(span + 1, len(engine_step))  # a number that no step has falls behind the last
    place_of[engine_step - first] = np.arange(len(engine_step))
    number = columns.engine_step - first
    place = place_of[np.where((number >= 0) & (number < span), number, span)]
    kept = np.bincount(place, weights=columns.num_emitted, minlength=len(engine_step) + 1)
    return kept[: len(engine_step)]
