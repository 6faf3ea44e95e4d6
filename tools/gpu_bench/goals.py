"""What is to be reached, and whether it was."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure against its bound. It may not be above it, or with `is_least` not below."""

    goal: str
    #: None: could not be measured, which is no success.
    measured: float | None
    bound: float
    is_least: bool = False
    #: Stands for a section that did not end.
    is_failure: bool = False

    @property
    def is_met(self) -> bool:
        if self.measured is None:
            return False
        return self.measured >= self.bound if self.is_least else self.measured <= self.bound

    def line(self) -> str:
        relation = ">=" if self.is_least else "<="
        if self.measured is None:
            return f"{self.goal:<78}{'n/a':>9} {relation}{self.bound:>8.3f}  not measured"
        result = "met" if self.is_met else "MISSED"
        return f"{self.goal:<78}{self.measured:>9.3f} {relation}{self.bound:>8.3f}  {result}"


def quotient(measured: float | None, reference: float | None) -> float | None:
    """None where one of both could not be measured."""
    return None if measured is None or reference is None else measured / reference


#: batch -> times the floor, of plain decoding on the shape of Qwen3-8B
DECODE_RATIO = {1: 1.25, 16: 1.25, 64: 1.20}
#: batch -> times the step of one row, of 8 drafts verified
VERIFY_RATIO = {1: 1.08, 16: 1.20}
VERIFY_DRAFTS = 8
#: Times its floor: a further draft of one module that runs again, and a draft of 8 modules.
FURTHER_DRAFT_RATIO, DRAFT_RATIO = 1.3, 1.3
DRAFT_BATCHES = (1, 16)
#: Of a step: between verification and drafting, and between steps.
GAP_SHARE = 0.03
#: Output tokens a second against (acceptance length) / (measured verify + draft time).
END_TO_END_SHARE = 0.95
#: Of a step at 64 requests, for its records.
RECORDING_SHARE = 0.01
#: Attention of 9 rows against that of one, at these batches and so many tokens of context.
ATTENTION_RATIO, ATTENTION_BATCHES, ATTENTION_CONTEXT = 1.25, (16, 64), 8192
#: Bytes a second of loading against those of reading the files.
LOADING_SHARE = 0.8
#: A step with n-gram drafts against one whose drafts cost nothing.
NGRAM_RATIO = 1.03
#: Requests that run at a time where prompts come between steps of decoding.
PREFILL_BATCH = 16
#: (shape, how sums over ranks are made, batch) -> a step on one GPU against one on two.
PARALLEL_SPEEDUP = {("qwen3_8b", "nccl", 16): 1.5, ("qwen3_8b", "one_shot", 16): 1.65}
