"""Where the rows of a step lie in the caches: what every layer reads and none computes.

Belongs here: the types, and the builder that makes them from block tables and first positions. Does not belong here:
who owns a block table, what a layer does with a slot.

A step packs the rows of all its requests; rows of one request are consecutive positions. Counts come from the host,
positions from the device: nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.kernels.step_rows import StepRows
from specbench.engine.layers import fusion
from specbench.engine.layers.to_device import to_device

#: Requests with at most this many rows share one padded segment.
_MAX_SHARED_ROWS = 16
#: Longer chunks are cut into segments of this many rows, which bounds the scores that exist at a time.
_MAX_SEGMENT_ROWS = 128


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


@dataclass(frozen=True, slots=True)
class _SegmentPlan:
    """A segment before its keys are known."""

    #: Requests of the step: a slice or [num_reqs] indices.
    requests: slice | Tensor
    num_reqs: int
    num_rows: int
    rows: slice | Tensor | None
    #: [num_reqs] or [1, Q] broadcast to [num_reqs, Q]: offset of each row from its request's first row
    row_offsets: Tensor
    max_seq_len: int


class AttentionMetadataBuilder:
    """Builds the metadata of one owner's cache groups.

    Block tables come as one tensor [num_groups, num_reqs, num_columns], groups in the order given here. Column 0 is the
    null block and logical block j is column j + 1, so a tap before the sequence's start finds zeros without a test.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        block_size: int,
        relative_extents: Mapping[str, int],
        device: torch.device,
        needs_segments: bool = True,
    ) -> None:
        self._groups = tuple(groups)
        self._needs_segments = needs_segments
        self._names = tuple(spec.name for spec in groups)
        self._block_size = block_size
        self._extents = relative_extents
        self._device = device
        kernels = {spec.window for spec in groups if spec.kind == "short_conv"}
        assert len(kernels) <= 1
        self._kernel = kernels.pop() or 1 if kernels else 1
        # A tap lies at most one block before position 0.
        assert block_size >= self._kernel - 1
        #: The farthest that a row looks back; offsets start there.
        self._first_offset = -max(spec.window or 1 for spec in groups)
        self._arange = torch.arange(self._first_offset, 4 * block_size, device=device)
        # Shorter ones that it replaced: a graph may go on reading them.
        self._outgrown: list[Tensor] = []
        # (group, rows of a request) -> bias columns
        self._columns_of_window: dict[tuple[str, int], Tensor] = {}
        # (requests, rows of each) -> their first rows, which graphs go on reading: none is ever dropped
        self._uniform_starts: dict[tuple[int, int], Tensor] = {}

    def build(self, block_tables: Tensor, layout: RowLayout) -> AttentionMetadata:
        """Metadata of one step; `block_tables` is int32 and covers every position laid out."""
        starts = layout.query_start_loc_np
        num_rows = starts[1]
        max_seq_len = max(layout.max_seq_lens_np)
        self._grow_arange(max_seq_len + starts[-1])
        # Segments of many rows are cut, so that their scores fit in memory.
        is_short = num_rows <= _MAX_SHARED_ROWS or not self._needs_segments
        if is_short and starts == tuple(range(0, starts[-1] + 1, num_rows)):
            return self._build_uniform(block_tables, layout, num_rows, max_seq_len)
        return self._build_ragged(block_tables, layout)

    def _build_uniform(self, tables: Tensor, layout: RowLayout, num_rows: int, max_seq_len: int) -> AttentionMetadata:
        """All requests have the same few rows, decode's usual shape: one segment, and one look-up of every slot that a
        row, its taps or its window can touch."""
        if fusion.is_fused(tables) and not self._needs_segments:
            return self._build_by_kernel(tables, layout, num_rows, max_seq_len)
        size = self._block_size
        windows = {
            spec.name: spec.window
            for spec in self._groups
            if self._needs_segments
            and spec.kind == "sliding_window"
            and spec.window is not None
            and spec.window - 1 + num_rows < max_seq_len
        }
        reach = max([self._kernel, *windows.values()]) - 1
        # [num_reqs, reach + num_rows]: positions from `reach` before the first row on, plus one block, so that a
        # table's column is shifted // block_size and everything before position 0 is in the null block's column
        shifted = layout.first_position[:, None] + self._offsets(size - reach, size + num_rows)
        is_in_sequence = shifted >= size
        if reach > size:
            shifted.clamp_(min=0)
        columns = shifted // size
        blocks = tables.gather(2, columns.expand(len(self._groups), -1, -1))
        # [num_groups, num_reqs, reach + num_rows]: block * size + shifted % size
        slots = torch.add(shifted, blocks - columns, alpha=size)
        positions = shifted[:, reach:] - size
        tap_slots, keys = {}, {}
        for group, spec in enumerate(self._groups):
            if spec.kind == "short_conv":
                taps = slots[group, :, reach + 1 - self._kernel :].unfold(1, self._kernel, 1)
                tap_slots[spec.name] = taps.reshape(-1)
            elif spec.name in windows:
                first = reach + 1 - windows[spec.name]
                bias_columns = self._window_columns(spec.name, windows[spec.name], num_rows)
                bias_columns = bias_columns * is_in_sequence[:, None, None, None, first:]
                keys[spec.name] = SegmentKeys(slots[group, :, first:].reshape(-1), bias_columns)
            elif self._needs_segments:
                keys[spec.name] = self._all_keys(tables[group], positions, max_seq_len, self._extents[spec.name])
        slot_mapping = slots[:, :, reach:]
        if layout.num_live is not None:
            slot_mapping = torch.where(self._offsets(0, num_rows) < layout.num_live[:, None], slot_mapping, -1)
        # With one row a request this would be a view of every so many elements, and kernels go from one to the next.
        slot_mapping = slot_mapping.reshape(len(self._groups), -1).contiguous()
        return AttentionMetadata(
            num_tokens=slot_mapping.shape[1],
            max_seq_len=max_seq_len,
            positions=positions.view(-1),
            slot_mapping=dict(zip(self._names, slot_mapping.unbind(0), strict=True)),
            tap_slots=tap_slots,
            paged=self._paged(
                tables,
                layout.first_position,
                layout.num_live,
                self._uniform_start_loc(len(shifted), num_rows),
                num_rows,
                layout.host,
            ),
            segments=(Segment(len(shifted), num_rows, None, keys),) if self._needs_segments else (),
        )

    def _build_by_kernel(self, tables: Tensor, layout: RowLayout, num_rows: int, max_seq_len: int) -> AttentionMetadata:
        """The same in one launch."""
        from specbench.engine.kernels.step_preparation import row_slots

        positions, slots, taps = row_slots(
            layout.first_position, layout.num_live, tables, num_rows, self._block_size, self._kernel
        )
        by_group = zip(self._groups, taps.unbind(0), strict=True)
        start_loc = self._uniform_start_loc(len(layout.first_position), num_rows)
        return AttentionMetadata(
            num_tokens=len(positions),
            max_seq_len=max_seq_len,
            positions=positions,
            slot_mapping=dict(zip(self._names, slots.unbind(0), strict=True)),
            tap_slots={spec.name: of_group for spec, of_group in by_group if spec.kind == "short_conv"},
            paged=self._paged(tables, layout.first_position, layout.num_live, start_loc, num_rows, layout.host),
            segments=(),
        )

    def _uniform_start_loc(self, num_reqs: int, num_rows: int) -> Tensor:
        """[num_reqs + 1] int32: 0, num_rows, 2 * num_rows ..."""
        if (num_reqs, num_rows) not in self._uniform_starts:
            starts = torch.arange(0, num_reqs * num_rows + 1, num_rows, dtype=torch.int32, device=self._device)
            self._uniform_starts[num_reqs, num_rows] = starts
        return self._uniform_starts[num_reqs, num_rows]

    def _paged(
        self,
        tables: Tensor,
        first_position: Tensor,
        num_live: Tensor | None,
        query_start_loc: Tensor,
        max_rows: int,
        host: HostRows | None,
    ) -> PagedRows:
        return PagedRows(
            num_reqs=len(first_position),
            max_rows=max_rows,
            query_start_loc=query_start_loc,
            first_position=first_position,
            num_live=num_live,
            block_tables=dict(zip(self._names, tables.unbind(0), strict=True)),
            block_size=self._block_size,
            host=host,
        )

    def _window_columns(self, group: str, window: int, num_rows: int) -> Tensor:
        """[1, 1, 1, Q, window - 1 + Q] bias columns of Q consecutive rows over the keys from the first one's window
        on: the same wherever the rows are, as long as the keys exist."""
        if (group, num_rows) not in self._columns_of_window:
            rows = torch.arange(window, window + num_rows, device=self._device)
            columns = (rows[:, None] - torch.arange(window - 1 + num_rows, device=self._device)).clamp_(
                0, self._extents[group] + 1
            )
            self._columns_of_window[group, num_rows] = columns[None, None, None]
        return self._columns_of_window[group, num_rows]

    def _build_ragged(
        self,
        tables: Tensor,
        layout: RowLayout,
    ) -> AttentionMetadata:
        """Any mix of row counts: short ones share a padded segment, each longer chunk has its own."""
        starts = np.asarray(layout.query_start_loc_np)
        counts = np.diff(starts)
        offsets_np = np.concatenate([np.arange(count) for count in counts])
        offsets, requests, query_start_loc = to_device(
            [offsets_np, np.repeat(np.arange(len(counts)), counts), starts], self._device
        )
        positions = layout.first_position[requests] + offsets
        is_live = None if layout.num_live is None else offsets < layout.num_live[requests]
        slot_mapping, tap_slots = self._row_slots(tables, requests, positions, is_live)
        return AttentionMetadata(
            num_tokens=int(starts[-1]),
            max_seq_len=int(np.max(layout.max_seq_lens_np)),
            positions=positions,
            slot_mapping=slot_mapping,
            tap_slots=tap_slots,
            paged=self._paged(
                tables,
                layout.first_position,
                layout.num_live,
                query_start_loc.int(),
                int(counts.max()),
                layout.host,
            ),
            segments=self._ragged_segments(tables, layout) if self._needs_segments else (),
        )

    def build_on_device(self, tables: Tensor, layout: DeviceLayout) -> AttentionMetadata:
        """Metadata of a step whose row counts the device alone knows; without segments, which need them."""
        assert not self._needs_segments
        slot_mapping, tap_slots = self._row_slots(tables, layout.request_of_row, layout.positions, layout.is_live)
        num_tokens = len(layout.positions)
        return AttentionMetadata(
            num_tokens=num_tokens,
            max_seq_len=layout.max_seq_len,
            positions=layout.positions,
            slot_mapping=slot_mapping,
            tap_slots=tap_slots,
            paged=self._paged(tables, layout.first_position, layout.num_live, layout.query_start_loc, num_tokens, None),
            segments=(),
        )

    def _ragged_segments(self, tables: Tensor, layout: RowLayout) -> tuple[Segment, ...]:
        starts = np.asarray(layout.query_start_loc_np)
        plans = self._plan_segments(starts, np.diff(starts), np.asarray(layout.max_seq_lens_np))
        return tuple(
            Segment(plan.num_reqs, plan.num_rows, plan.rows, self._keys(tables, layout, plan)) for plan in plans
        )

    def _grow_arange(self, max_positions: int) -> None:
        needed = max_positions + 2 * self._block_size
        if needed > len(self._arange) + self._first_offset:
            self._outgrown.append(self._arange)
            self._arange = torch.arange(self._first_offset, 2 * needed, device=self._device)

    def _offsets(self, start: int, end: int) -> Tensor:
        """start .. end - 1, without making a tensor."""
        return self._arange[start - self._first_offset : end - self._first_offset]

    def _row_slots(
        self, tables: Tensor, requests: Tensor, positions: Tensor, is_live: Tensor | None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Own slots and tap slots by group, from each row's request and position, [num_tokens]; is_live: bool."""
        # [num_tokens, kernel]: shifted up by one block, so that taps before position 0 are in the null block's column
        shifted = positions[:, None] + self._offsets(self._block_size + 1 - self._kernel, self._block_size + 1)
        blocks = tables[:, requests[:, None], shifted // self._block_size]
        # [num_groups, num_tokens, kernel]
        slots = torch.add(shifted % self._block_size, blocks, alpha=self._block_size)
        own = slots[:, :, -1].contiguous() if is_live is None else torch.where(is_live, slots[:, :, -1], -1)
        taps = {
            spec.name: slots[group].reshape(-1) for group, spec in enumerate(self._groups) if spec.kind == "short_conv"
        }
        return dict(zip(self._names, own.unbind(0), strict=True)), taps

    def _plan_segments(self, starts: np.ndarray, counts: np.ndarray, max_seq_lens: np.ndarray) -> list[_SegmentPlan]:
        plans = []
        shared = np.flatnonzero(counts <= _MAX_SHARED_ROWS)
        if len(shared):
            plans.append(self._plan_shared(shared, starts, counts, max_seq_lens))
        for request in np.flatnonzero(counts > _MAX_SHARED_ROWS):
            for offset in range(0, int(counts[request]), _MAX_SEGMENT_ROWS):
                num_rows = min(_MAX_SEGMENT_ROWS, int(counts[request]) - offset)
                first_row = int(starts[request]) + offset
                plans.append(
                    _SegmentPlan(
                        slice(int(request), int(request) + 1),
                        1,
                        num_rows,
                        slice(first_row, first_row + num_rows),
                        self._offsets(offset, offset + num_rows)[None],
                        # Later pieces of the chunk lie after this one.
                        int(max_seq_lens[request]) - (int(counts[request]) - offset - num_rows),
                    )
                )
        return plans

    def _plan_shared(
        self, requests: np.ndarray, starts: np.ndarray, counts: np.ndarray, max_seq_lens: np.ndarray
    ) -> _SegmentPlan:
        num_rows = int(counts[requests].max())
        offsets = np.minimum(np.arange(num_rows), counts[requests, None] - 1)
        rows = starts[requests, None] + offsets
        requests_on_device, flat_rows, row_offsets = to_device([requests, rows.reshape(-1), offsets], self._device)
        return _SegmentPlan(
            requests_on_device,
            len(requests),
            num_rows,
            flat_rows,
            row_offsets,
            int(max_seq_lens[requests].max()),
        )

    def _keys(self, tables: Tensor, layout: RowLayout, plan: _SegmentPlan) -> dict[str, SegmentKeys]:
        first_position = layout.first_position[plan.requests]
        # [num_reqs, Q]
        positions = first_position[:, None] + plan.row_offsets
        keys = {}
        for group, spec in enumerate(self._groups):
            if spec.kind == "short_conv":
                continue
            extent = self._extents[spec.name]
            table = tables[group, plan.requests]
            num_blocks = -(-plan.max_seq_len // self._block_size)
            if spec.window is not None:
                # Blocks that the windows of Q consecutive rows can touch, wherever they begin.
                num_window_blocks = (spec.window + plan.num_rows - 3) // self._block_size + 2
                if num_window_blocks < num_blocks:
                    keys[spec.name] = self._window_keys(table, positions, spec.window, num_window_blocks, extent)
                    continue
            keys[spec.name] = self._all_keys(table, positions, plan.max_seq_len, extent)
        return keys

    def _all_keys(self, table: Tensor, positions: Tensor, max_seq_len: int, extent: int) -> SegmentKeys:
        """The first `max_seq_len` keys of each request; on a GPU whole blocks, whose shapes change less often."""
        # table: [num_reqs, num_columns]; positions: [num_reqs, Q]
        size = self._block_size
        num_blocks = -(-max_seq_len // size)
        num_keys = max_seq_len if self._device.type == "cpu" else num_blocks * size
        slots = torch.add(self._offsets(0, size), table[:, 1 : 1 + num_blocks, None], alpha=size)
        # 1 + distance, as position - (key - 1)
        columns = (positions[:, None, None, :, None] - self._offsets(-1, num_keys - 1)).clamp_(0, extent + 1)
        return SegmentKeys(slots.flatten(1)[:, :num_keys].reshape(-1), columns)

    def _window_keys(self, table: Tensor, positions: Tensor, window: int, num_blocks: int, extent: int) -> SegmentKeys:
        """The `num_blocks` blocks of each request from where its first row's window begins."""
        size = self._block_size
        # [num_reqs, 1]
        first_block = (positions[:, :1] - (window - 1)).clamp_(min=0) // size
        # Past the end of the table any block will do: its keys are after every row.
        table_columns = (first_block + self._offsets(1, 1 + num_blocks)).clamp_(max=table.shape[1] - 1)
        slots = torch.add(self._offsets(0, size), table.gather(1, table_columns)[:, :, None], alpha=size)
        from_first_key = torch.sub(positions + 1, first_block, alpha=size)
        columns = (from_first_key[:, :, None] - self._offsets(0, num_blocks * size)).clamp_(0, extent + 1)
        return SegmentKeys(slots.view(-1), columns[:, None, None])
