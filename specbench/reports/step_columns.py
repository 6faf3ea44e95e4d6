"""Requests and verify steps as numpy columns, which every acceptance and latency figure is computed from.

Belongs here: leaving out warm-up, the order of rows, what the previous row of a request was. Does not belong here: any
figure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.record_columns import VerifyStepColumns
from specbench.records import RequestRecord, VerifyStep

#: `previous` of a request's first row.
NO_PREVIOUS = -2
#: `previous` of a row that follows a row with nothing drafted.
NOTHING_DRAFTED = -1
#: Instead of an index into the measured requests.
WARM_UP, UNKNOWN = -1, -2


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
    """Columns of the measured rows among `steps`. Arrays are shared with `steps` where those are columns in order."""
    recorded, kept = VerifyStepColumns.of(steps), measured(requests)
    request = _request_index(requests, recorded)
    num_orphan_rows = int((request == UNKNOWN).sum())
    rows = _rows_in_order(request, recorded.step)
    request, step = request[rows], recorded.step[rows]
    drafted, accepted = recorded.num_drafted[rows], recorded.num_accepted[rows]
    return StepColumns(
        requests=kept,
        request=request,
        step=step,
        num_drafted=drafted,
        num_accepted=accepted,
        num_emitted=recorded.num_emitted[rows],
        num_discarded=recorded.num_discarded[rows],
        is_trimmed=recorded.is_trimmed[rows],
        end_s=recorded.end_s[rows],
        engine_step=recorded.engine_step[rows],
        output_index=recorded.output_index[rows],
        batch_size=recorded.batch_size[rows],
        previous=_previous(request, step, drafted, accepted),
        num_orphan_rows=num_orphan_rows,
    )


def _request_index(requests: Sequence[RequestRecord], recorded: VerifyStepColumns) -> np.ndarray:
    """[num_rows] Index among the measured requests, WARM_UP, or UNKNOWN for a request that is not in the log."""
    index_of = {request.request_id: WARM_UP for request in requests}
    index_of |= {request.request_id: index for index, request in enumerate(measured(requests))}
    indices = np.array([index_of.get(name, UNKNOWN) for name in recorded.request_ids], np.int64)
    return indices[recorded.request]


def _rows_in_order(request: np.ndarray, step: np.ndarray) -> slice | np.ndarray:
    """The measured rows by (request, step). A slice where they lie so already, as those of one segment do."""
    is_measured = request >= 0
    start = int(is_measured.argmax()) if is_measured.any() else len(request)
    later, earlier = slice(start + 1, None), slice(start, -1)
    is_in_order = (request[later] > request[earlier]) | (
        (request[later] == request[earlier]) & (step[later] >= step[earlier])
    )
    if is_measured[start:].all() and is_in_order.all():
        return slice(start, None)
    rows = np.lexsort((step, request))
    return rows[request[rows] >= 0]


def _previous(request: np.ndarray, step: np.ndarray, drafted: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """[num_rows] What the row before accepted. A row is the one before only when its step is one less."""
    previous = np.full(len(request), NO_PREVIOUS, np.int64)
    follows = (request[1:] == request[:-1]) & (step[1:] == step[:-1] + 1)
    before = np.where(drafted[:-1] > 0, accepted[:-1], NOTHING_DRAFTED)
    previous[1:] = np.where(follows, before, NO_PREVIOUS)
    return previous
