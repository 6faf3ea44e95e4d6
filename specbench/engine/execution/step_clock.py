"""How long the parts of a step took, measured without waiting for any.

Belongs here: marks between parts, on a CPU by the host's clock, on a GPU by events in the stream, which are read when
the step has been waited for anyway. Does not belong here: the host's own work (llm_engine.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class PartSeconds:
    """None where it was not measured."""

    target_s: float | None
    verify_s: float | None
    draft_s: float | None
    #: From the end of the step before to this one's first work: the device had nothing to do.
    idle_s: float | None


class StepTimes:
    """The marks of one step: before the target, behind it, behind verification, behind drafting."""

    def __init__(self, stream: torch.cuda.Stream | None, previous_end: torch.cuda.Event | None):
        #: That the step runs in; None on a CPU.
        self.stream = stream
        self._previous_end = previous_end
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self.stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self.stream)
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())

    @property
    def end(self) -> torch.cuda.Event | None:
        return self._events[-1] if self._events else None

    def seconds(self) -> PartSeconds:
        """Called once the step is done."""
        if self.stream is None:
            begin, target, verify, draft = self._times
            return PartSeconds(target - begin, verify - target, draft - verify, None)
        idle_s = None if self._previous_end is None else _seconds(self._previous_end, self._events[0])
        target_s, verify_s, draft_s = (_seconds(start, end) for start, end in pairwise(self._events))
        return PartSeconds(target_s, verify_s, draft_s, idle_s)


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return start.elapsed_time(end) / 1e3


class StepClock:
    """Makes the marks of each step, and remembers where the last one ended."""

    def __init__(self, device: torch.device):
        # Asked once: to ask takes longer than an event does.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._previous_end: torch.cuda.Event | None = None

    def begin(self) -> StepTimes:
        """The next step's marks, the first of them made."""
        times = StepTimes(self._stream, self._previous_end)
        times.mark()
        return times

    def end(self, times: StepTimes) -> None:
        """Make the last mark."""
        times.mark()
        self._previous_end = times.end
