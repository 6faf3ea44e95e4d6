"""Where the rows of a step lie in the caches: what every layer reads and none computes.

Belongs here: the types. Does not belong here: how they are made (metadata_builder.py), who owns a block table, what a
layer does with a slot.

A step packs the rows of all its requests; rows of one request are consecutive positions. Counts come from the host,
positions from the device: nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.engine.kernels.step_rows import StepRows


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What the target hands to sampling and to a proposer."""

    #: [num_tokens, hidden], after the final norm
    hidden_states: Tensor
    #: [num_tokens, hidden], before it
    residual: Tensor


@dataclass(frozen=True, slots=True)
class HostRows:
    """What the host knows of a step's rows."""

    #: [num_reqs + 1] row counts summed up, dead rows included
    query_start_loc_np: Sequence[int]
    #: [num_reqs] upper bound of (position of the last row laid out) + 1
    max_seq_lens_np: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of a step. Every request has at least one."""

    #: [num_reqs + 1] row counts summed up, dead rows included
    query_start_loc_np: tuple[int, ...]
    #: [num_reqs] int64, position of each request's first row
    first_position: Tensor
    #: [num_reqs] int64, rows that count; the rest of a request's rows are dead: they write nothing that is read, and
    #: their outputs are finite garbage. None: all count.
    num_live: Tensor | None
    #: [num_reqs] upper bound of (position of the last row laid out) + 1
    max_seq_lens_np: Sequence[int]

    @property
    def host(self) -> HostRows:
        return HostRows(self.query_start_loc_np, self.max_seq_lens_np)


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The rows of a step of which the host knows no more than an upper bound: a graph serves any counts below it."""

    #: [num_reqs + 1] int32; the last is the number of rows
    query_start_loc: Tensor
    #: [num_reqs] int64
    first_position: Tensor
    num_live: Tensor
    #: [num_tokens] int64: row -> request, and its position; 0 where it is dead
    request_of_row: Tensor
    positions: Tensor
    #: [num_tokens] bool
    is_live: Tensor
    max_seq_len: int

    @classmethod
    def of(
        cls,
        num_rows: Tensor,
        first_position: Tensor,
        num_tokens: int,
        max_seq_len: int,
        num_live: Tensor | None = None,
    ) -> DeviceLayout:
        """num_rows: [num_reqs] int64, rows of each request; the last one has none, and the dead rows that are left of
        `num_tokens`. num_live: how many of them count; None: all."""
        ends = num_rows.cumsum(0)
        starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1], torch.full_like(ends[:1], num_tokens)])
        row = torch.arange(num_tokens, device=num_rows.device)
        request_of_row = torch.searchsorted(ends, row, right=True).clamp_max_(len(num_rows) - 1)
        offsets = row - starts[request_of_row]
        num_live = num_rows if num_live is None else num_live
        is_live = offsets < num_live[request_of_row]
        positions = (first_position[request_of_row] + offsets) * is_live
        return cls(starts.int(), first_position, num_live, request_of_row, positions, is_live, max_seq_len)


@dataclass(frozen=True, slots=True)
class SegmentKeys:
    """The keys that a segment's rows see in one cache group: K slots a request, not all of them visible to all rows."""

    #: [num_reqs * K]
    slots: Tensor
    #: [num_reqs, 1, 1, Q, K] column of the relative bias table: 0 for a key after the row, 1 + distance up to the
    #: group's extent, extent + 1 for anything farther back.
    columns: Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows that one attention call covers: num_reqs requests of Q rows each."""

    num_reqs: int
    #: Q
    num_rows: int
    #: The rows of the step, request by request: a slice or [num_reqs * Q] indices (a request with fewer rows repeats
    #: its last one). None: all rows, in order.
    rows: slice | Tensor | None
    #: attention group name -> keys
    keys: Mapping[str, SegmentKeys]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of a step as a kernel over paged caches takes them. Shapes depend on requests and rows alone, so that
    steps of one shape can replay one graph.

    Row r of the step, of request i, is at position first_position[i] + r - query_start_loc[i].
    """

    num_reqs: int
    #: The most rows of one request; what each has where all have as many.
    max_rows: int
    #: [num_reqs + 1] int32
    query_start_loc: Tensor
    #: [num_reqs] int64, position of each request's first row
    first_position: Tensor
    #: [num_reqs] int64: a request's rows from this one on are dead: they write to the scratch slot, and what comes out
    #: of them means nothing. A request of padding has none that lives. None: all live.
    num_live: Tensor | None
    #: group name -> [num_reqs, num_columns] int32: the null block, then logical block j in column j + 1
    block_tables: Mapping[str, Tensor]
    #: Tokens of a cache block.
    block_size: int
    #: None: the device alone knows which request has which rows.
    host: HostRows | None

    @property
    def step_rows(self) -> StepRows:
        """The rows alone."""
        return StepRows(self.query_start_loc, self.num_reqs, self.max_rows)


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Positions and slots of one step's rows. The same object serves every layer and every MTP module."""

    #: Rows, dead ones included.
    num_tokens: int
    #: Upper bound, known on the host, of any row's position + 1.
    max_seq_len: int
    #: [num_tokens] int64
    positions: Tensor
    #: group name -> [num_tokens] int64, -1 where the row is dead
    slot_mapping: Mapping[str, Tensor]
    #: convolution group name -> [num_tokens * kernel] int64, oldest tap first, the row's own slot last
    tap_slots: Mapping[str, Tensor]
    paged: PagedRows
    #: What plain torch reads keys by; empty where the attention backend does without.
    segments: tuple[Segment, ...]


def num_table_columns(max_positions: int, block_size: int) -> int:
    """Columns of a block table: the null block first, then the blocks of `max_positions` positions."""
    return 1 + -(-max_positions // block_size)
