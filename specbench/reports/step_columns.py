"""Requests and verify steps as numpy columns, which every acceptance and latency figure is computed from.

Belongs here: leaving out warm-up, the order of rows, what the previous row of a request was. Does not belong here: any
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from specbench.records import RequestRecord, VerifyStep

#: `previous` of a request's first row.
NO_PREVIOUS = -2
#: `previous` of a row that follows a row with nothing drafted.
NOTHING_DRAFTED = -1


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """Verify steps of the measured requests, sorted by (request, step). Every array is [num_rows]."""

    #: The requests that are not warm-up.
    requests: list[RequestRecord]
    #: row -> index into `requests`
    request: np.ndarray
    step: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    num_emitted: np.ndarray
    num_discarded: np.ndarray
    is_trimmed: np.ndarray
    end_s: np.ndarray
    engine_step: np.ndarray
    #: Index in the request's output of the row's first emitted token.
    output_index: np.ndarray
    #: Requests in the engine step.
    batch_size: np.ndarray
    #: num_accepted of the same request's previous row, or NO_PREVIOUS, or NOTHING_DRAFTED.
    previous: np.ndarray
    #: Rows whose request is not in the log at all.
    num_orphan_rows: int

    @property
    def is_draft(self) -> np.ndarray:
        """[num_rows] A step with nothing drafted is not a draft."""
        return self.num_drafted > 0

    @property
    def is_same_request(self) -> np.ndarray:
        """[num_rows - 1] Whether rows i and i + 1 are of one request."""
        return self.request[1:] == self.request[:-1]


def measured(requests: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The requests that are not warm-up."""
    return [request for request in requests if not request.is_warmup]


def step_columns(requests: Sequence[RequestRecord], steps: Sequence[VerifyStep]) -> StepColumns:
    """Columns of the measured rows among `steps`."""
    kept = measured(requests)
    index_of = {request.request_id: index for index, request in enumerate(kept)}
    index_of_all = {request.request_id: -1 for request in requests} | index_of
    request = np.fromiter((index_of_all.get(step.request_id, -2) for step in steps), np.int64, len(steps))
    step = _column(steps, "step")
    rows = np.lexsort((step, request))
    rows = rows[request[rows] >= 0]
    request, step = request[rows], step[rows]
    drafted, accepted = _column(steps, "num_drafted")[rows], _column(steps, "num_accepted")[rows]
    return StepColumns(
        requests=kept,
        request=request,
        step=step,
        num_drafted=drafted,
        num_accepted=accepted,
        num_emitted=_column(steps, "num_emitted")[rows],
        num_discarded=_column(steps, "num_discarded")[rows],
        is_trimmed=_column(steps, "is_trimmed")[rows].astype(bool),
        end_s=_column(steps, "end_s", np.float64)[rows],
        engine_step=_column(steps, "engine_step")[rows],
        output_index=_column(steps, "output_index")[rows],
        batch_size=_column(steps, "batch_size")[rows],
        previous=_previous(request, step, drafted, accepted),
        num_orphan_rows=sum(one.request_id not in index_of_all for one in steps),
    )


def _column(steps: Sequence[VerifyStep], name: str, dtype: type = np.int64) -> np.ndarray:
    return np.fromiter(map(attrgetter(name), steps), dtype, len(steps))


def _previous(request: np.ndarray, step: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """[num_rows] What the row before accepted. A row is the one before only when its step is one less."""
    previous = np.full(len(request), NO_PREVIOUS, np.int64)
    follows = (request[1:] == request[:-1]) & (step[1:] == step[:-1] + 1)
    before = np.where(drafted[:-1] > 0, accepted[:-1], NOTHING_DRAFTED)
    previous[1:] = np.where(follows, before, NO_PREVIOUS)
    return previous
