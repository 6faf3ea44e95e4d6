"""The client of any target: which requests have been submitted by now.

Belongs here: keeping to a load's timetable, the client's places, turns that wait for the answer before them. Does not
belong here: when requests are to arrive (arrivals.py), how a target runs them (engine/, servers/).

Where there is a timetable, a thread keeps it: a request that falls due while the target computes is submitted then, and
its wait for the next step is part of its TTFT. Looked at between steps alone, arrivals would slip behind a slow target.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType

from specbench.generate import GenerateRequest, GenerateResult, Load


@dataclass(frozen=True, slots=True)
class Submission:
    """One request that is out. Times are those of the client's clock."""

    request: GenerateRequest
    arrival_s: float
    #: When the timetable had it; None where there is none, and for a turn behind another one.
    scheduled_s: float | None = None
    #: Of the time since then, the wait for a place among load.concurrency.
    client_queue_s: float | None = None
    #: Why it can't run: the turn before it failed.
    error: str | None = None


def next_turn(before: GenerateRequest, answer: str, request: GenerateRequest) -> GenerateRequest:
    """`request`, which follows `before`, with the conversation so far in front of its messages: as chats are replayed
    by clients, the answer's text alone, without its reasoning."""
    assert before.messages is not None and request.messages is not None
    messages = (*before.messages, {"role": "assistant", "content": answer}, *request.messages)
    return dataclasses.replace(request, messages=messages, audio=before.audio + request.audio, follows=None)


class Client:
    """Submits `requests` as `load` says, from `__enter__` on; `clock` gives seconds.

    A request holds its place until the last turn of its conversation has ended.
    """

    def __init__(self, requests: Iterable[GenerateRequest], load: Load, clock: Callable[[], float]) -> None:
        requests = list(requests)
        self._load = load
        self._clock = clock
        self._firsts = deque(request for request in requests if request.follows is None)
        #: The request that is followed -> the one behind it.
        self._behind = {request.follows: request for request in requests if request.follows is not None}
        self._num_begun = 0
        self._out: dict[str, Submission] = {}
        self._submitted: deque[Submission] = deque()
        #: Whether a request is due that has no place.
        self._is_full = False
        self._last_unblocked_s = self._began_s = 0.0
        self._is_closed = False
        #: Guards all of the above.
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep_timetable, name="specbench-client", daemon=True)

    def __enter__(self) -> Client:
        self._began_s = self._clock()
        with self._changed:
            known = {request.request_id for request in (*self._firsts, *self._behind.values())}
            for followed in self._behind.keys() - known:
                self._put(self._behind_a_failure(followed))
            # At once: a thread, or a target, takes milliseconds to come round to it.
            self._submit_due()
        if self._firsts and self._load.scheduled_s(0) is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_done(self) -> bool:
        """Whether every request has been submitted and has ended."""
        with self._changed:
            return not (self._firsts or self._out)

    def take(self) -> list[Submission]:
        """What has been submitted since the last call, in order. Does not wait."""
        with self._changed:
            self._submit_due()
            taken = list(self._submitted)
            self._submitted.clear()
            return taken

    def wait(self) -> None:
        """Until `take` has something to give. Only where requests are left and none is running."""
        with self._changed:
            while not self._submitted and self._firsts:
                self._submit_due()
                if not self._submitted:
                    self._changed.wait()

    def finished(self, result: GenerateResult) -> GenerateResult:
        """A submitted request has ended: the result with the client's times in its record."""
        with self._changed:
            submission = self._out.pop(result.record.request_id)
            if result.record.request_id in self._behind:
                self._put(self._next_turn(submission.request, result))
            elif self._is_full:
                self._last_unblocked_s = self._clock()
            self._submit_due()
            self._changed.notify_all()
        record = dataclasses.replace(
            result.record, scheduled_s=submission.scheduled_s, client_queue_s=submission.client_queue_s
        )
        return dataclasses.replace(result, record=record)

    def _keep_timetable(self) -> None:
        with self._changed:
            while self._firsts and not self._is_closed:
                due_s = self._next_due_s()
                wait_s = None if self._is_full or due_s is None else due_s - self._clock()
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                else:
                    self._submit_due()
                    self._changed.notify_all()

    def _next_due_s(self) -> float | None:
        scheduled_s = self._load.scheduled_s(self._num_begun)
        return None if scheduled_s is None else self._began_s + scheduled_s

    def _submit_due(self) -> None:
        """Every request that is due and has a place."""
        limit = self._load.concurrency
        while self._firsts:
            now_s, due_s = self._clock(), self._next_due_s()
            if due_s is not None and due_s > now_s:
                return
            self._is_full = limit is not None and len(self._out) >= limit
            if self._is_full:
                return
            request = self._firsts.popleft()
            self._num_begun += 1
            # What fell due while no place was free has waited for the place that was freed last.
            queue_s = None if due_s is None else max(0.0, self._last_unblocked_s - due_s)
            self._put(Submission(request, now_s, due_s, queue_s))

    def _next_turn(self, before: GenerateRequest, result: GenerateResult) -> Submission:
        if result.record.error is not None:
            return self._behind_a_failure(before.request_id)
        request = self._behind.pop(before.request_id)
        return Submission(next_turn(before, result.output_text, request), self._clock())

    def _behind_a_failure(self, followed: str) -> Submission:
        error = f"the turn before it, {followed}, failed: there is no answer to go on from"
        return Submission(self._behind.pop(followed), self._clock(), error=error)

    def _put(self, submission: Submission) -> None:
        self._out[submission.request.request_id] = submission
        self._submitted.append(submission)
