"""Verify steps and engine steps as numpy columns: a run has millions of them, too many for an object each.

Belongs here: the columns of those two record types, from records and back to them, and gathering them batch by batch.
Does not belong here: files (record_tables.py, run_directory.py), figures (reports/).

Both are sequences of their records, so that a list of records can stand wherever columns do; whoever computes asks for
`of(...)` first. Integers are int64 whatever their type on disk, so that a product of counts cannot overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, overload

import numpy as np

from specbench.records import EngineStep, VerifyStep

#: Columns of records.VerifyStep that are numbers: all but the request.
VERIFY_STEP_NUMBERS = tuple(column.name for column in fields(VerifyStep) if column.name != "request_id")
ENGINE_STEP_NUMBERS = tuple(column.name for column in fields(EngineStep))
#: Rows that wait as Python objects before they become arrays.
BATCH_ROWS = 65_536

_BOOL_COLUMNS = ("is_trimmed",)


@dataclass(frozen=True, slots=True, eq=False)
class VerifyStepColumns(Sequence[VerifyStep]):
    """Verify steps as recorded, warm-up included. Every array is [num_rows]."""

    #: Distinct ids.
    request_ids: Sequence[str]
    #: row -> index into `request_ids`
    request: np.ndarray
    step: np.ndarray
    engine_step: np.ndarray
    output_index: np.ndarray
    num_drafted: np.ndarray
    num_accepted: np.ndarray
    num_emitted: np.ndarray
    num_discarded: np.ndarray
    is_trimmed: np.ndarray
    batch_size: np.ndarray
    end_s: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[VerifyStep]) -> VerifyStepColumns:
        """The columns of `steps`; those of columns are they themselves."""
        if isinstance(steps, VerifyStepColumns):
            return steps
        index_of: dict[str, int] = {}
        request = [index_of.setdefault(step.request_id, len(index_of)) for step in steps]
        return cls(tuple(index_of), np.array(request, np.int64), **_columns_of(steps, VERIFY_STEP_NUMBERS))

    def __len__(self) -> int:
        return len(self.step)

    @overload
    def __getitem__(self, index: int) -> VerifyStep: ...
    @overload
    def __getitem__(self, index: slice) -> list[VerifyStep]: ...
    def __getitem__(self, index: int | slice) -> VerifyStep | list[VerifyStep]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        numbers = [getattr(self, name)[index].item() for name in VERIFY_STEP_NUMBERS]
        return VerifyStep(self.request_ids[self.request[index]], *numbers)


@dataclass(frozen=True, slots=True, eq=False)
class EngineStepColumns(Sequence[EngineStep]):
    """Steps of the engine in the order recorded. Every array is [num_rows]; a duration not measured is NaN."""

    engine_step: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    num_prefill_tokens: np.ndarray
    num_decode_requests: np.ndarray
    num_tokens: np.ndarray
    schedule_s: np.ndarray
    target_s: np.ndarray
    verify_s: np.ndarray
    draft_s: np.ndarray
    kv_blocks_used: np.ndarray
    num_preempted: np.ndarray
    num_evicted_blocks: np.ndarray
    idle_s: np.ndarray

    @classmethod
    def of(cls, steps: Sequence[EngineStep]) -> EngineStepColumns:
        """The columns of `steps`; those of columns are they themselves."""
        return steps if isinstance(steps, EngineStepColumns) else cls(**_columns_of(steps, ENGINE_STEP_NUMBERS))

    def __len__(self) -> int:
        return len(self.engine_step)

    @overload
    def __getitem__(self, index: int) -> EngineStep: ...
    @overload
    def __getitem__(self, index: slice) -> list[EngineStep]: ...
    def __getitem__(self, index: int | slice) -> EngineStep | list[EngineStep]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        numbers = [getattr(self, name)[index].item() for name in ENGINE_STEP_NUMBERS]
        measured: list[Any] = [None if number != number else number for number in numbers]
        return EngineStep(*measured)


class RequestSteps(Sequence[VerifyStep]):
    """The decode steps of one request while it runs: numbers appended, no object a row until somebody asks for one."""

    #: What is recorded of a step; the other columns follow from these.
    RECORDED = ("engine_step", "output_index", "num_drafted", "num_accepted", "num_emitted", "batch_size", "end_s")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._numbers: list[float] = []
        #: Takes one step's numbers, in the order of RECORDED.
        self.add: Callable[[Iterable[float]], None] = self._numbers.extend

    def __len__(self) -> int:
        return len(self._numbers) // len(self.RECORDED)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    @overload
    def __getitem__(self, index: int) -> VerifyStep: ...
    @overload
    def __getitem__(self, index: slice) -> list[VerifyStep]: ...
    def __getitem__(self, index: int | slice) -> VerifyStep | list[VerifyStep]:
        lists = self.lists()
        if isinstance(index, slice):
            return [self._row(lists, row) for row in range(*index.indices(len(self)))]
        return self._row(lists, range(len(self))[index])

    def _row(self, lists: Mapping[str, list], row: int) -> VerifyStep:
        return VerifyStep(self._request_id, *(lists[name][row] for name in VERIFY_STEP_NUMBERS))

    def __iter__(self) -> Iterator[VerifyStep]:
        lists = self.lists()
        return (self._row(lists, row) for row in range(len(self)))

    def lists(self) -> dict[str, list]:
        """Column -> value of each step, for all of VERIFY_STEP_NUMBERS."""
        width = len(self.RECORDED)
        recorded = {name: self._numbers[column::width] for column, name in enumerate(self.RECORDED)}
        pairs = zip(recorded["num_accepted"], recorded["num_emitted"], strict=True)
        num_discarded = [num_accepted + 1 - num_emitted for num_accepted, num_emitted in pairs]
        return recorded | {
            "step": list(range(len(num_discarded))),
            "num_discarded": num_discarded,
            "is_trimmed": [count > 0 for count in num_discarded],
        }


def step_lists(steps: Sequence[VerifyStep], first_engine_step: int = 0) -> dict[str, list]:
    """Column -> value of each step, names once and not once a step; engine steps are counted on from the first."""
    if isinstance(steps, RequestSteps):
        lists = steps.lists()
    else:
        lists = {name: list(map(attrgetter(name), steps)) for name in VERIFY_STEP_NUMBERS}
    return lists | {"engine_step": [first_engine_step + number for number in lists["engine_step"]]}


class ColumnBatches:
    """Columns that grow by pieces, of which only the last BATCH_ROWS rows wait as objects."""

    def __init__(self, names: Sequence[str]) -> None:
        self._waiting: dict[str, list] = {name: [] for name in names}
        self._arrays: dict[str, list[np.ndarray]] = {name: [] for name in names}
        self._names = frozenset(names)

    def add_piece(self, piece: Mapping[str, list]) -> None:
        """Values of equal number for each column; KeyError or ValueError where they are not."""
        if len({len(piece[name]) for name in self._names}) > 1:
            raise ValueError("its columns are not of equal length")
        for name, waiting in self._waiting.items():
            waiting.extend(piece[name])
        self._pack(BATCH_ROWS)

    def arrays(self) -> dict[str, np.ndarray]:
        """Column -> [num_rows]; ValueError, TypeError or OverflowError where a value is no number."""
        self._pack(1)
        return {name: np.concatenate([_array(name, []), *arrays]) for name, arrays in self._arrays.items()}

    def _pack(self, at_least: int) -> None:
        if len(next(iter(self._waiting.values()))) < at_least:
            return
        for name, values in self._waiting.items():
            self._arrays[name].append(_array(name, values))
            values.clear()


def _columns_of(records: Sequence[VerifyStep] | Sequence[EngineStep], names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: _array(name, list(map(attrgetter(name), records))) for name in names}


def _array(name: str, values: list) -> np.ndarray:
    """Seconds are float64 and None is NaN there; flags are bool; all else is int64."""
    if name.endswith("_s"):
        return np.array(values, np.float64)
    return np.array(values, bool if name in _BOOL_COLUMNS else np.int64)
