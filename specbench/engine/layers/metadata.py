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
class RowLayout:
    """The rows of a step. Every request has at least one."""

    #: [num_reqs + 1] row counts summed up, dead rows included
    query_start_loc_np: Sequence[int] | np.ndarray
    #: [num_reqs] int64, position of each request's first row
    first_position: Tensor
    #: [num_reqs] int64, rows that count; the rest of a request's rows are dead: they write nothing that is read, and
    #: their outputs are finite garbage. None: all count.
    num_live: Tensor | None
    #: [num_reqs] upper bound of (position of the last row laid out) + 1
    max_seq_lens_np: Sequence[int] | np.ndarray


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
    ) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._extents = relative_extents
        self._device = device
        kernels = {spec.window for spec in groups if spec.kind == "short_conv"}
        assert len(kernels) <= 1
        self._kernel = kernels.pop() or 1 if kernels else 1
        # A tap lies at most one block before position 0.
        assert block_size >= self._kernel - 1
        self._arange = torch.arange(4 * block_size, device=device)

    def build(self, block_tables: Tensor, layout: RowLayout) -> AttentionMetadata:
        """Metadata of one step; `block_tables` is int32 and covers every position laid out."""
        starts = np.asarray(layout.query_start_loc_np)
        max_seq_lens = np.asarray(layout.max_seq_lens_np)
        counts = np.diff(starts)
        max_seq_len = int(max_seq_lens.max())
        self._grow_arange(max_seq_len + int(counts.max()))
        if (counts == counts[0]).all():
            shifted, slots = self._uniform_slots(block_tables, layout, int(counts[0]))
        else:
            shifted, slots = self._ragged_slots(block_tables, layout, counts)
        num_tokens = int(starts[-1])
        # slots: [num_groups, num_tokens, kernel]
        slot_mapping = self._slot_mapping(slots, layout, counts)
        return AttentionMetadata(
            num_tokens=num_tokens,
            max_seq_len=max_seq_len,
            positions=shifted - self._block_size,
            slot_mapping=dict(zip((spec.name for spec in self._groups), slot_mapping.unbind(0), strict=True)),
            tap_slots={
                spec.name: slots[group].reshape(-1)
                for group, spec in enumerate(self._groups)
                if spec.kind == "short_conv"
            },
            segments=tuple(
                Segment(plan.num_reqs, plan.num_rows, plan.rows, self._keys(block_tables, layout, plan))
                for plan in self._plan_segments(starts, counts, max_seq_lens)
            ),
        )

    def _grow_arange(self, max_positions: int) -> None:
        needed = max_positions + 2 * self._block_size
        if needed > len(self._arange):
            self._arange = torch.arange(2 * needed, device=self._device)

    def _range(self, start: int, end: int) -> Tensor:
        return self._arange[start:end]

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _uniform_slots(self, tables: Tensor, layout: RowLayout, num_rows: int) -> tuple[Tensor, Tensor]:
        """All requests have `num_rows` rows, whose taps overlap: each slot is looked up once.

        Returns positions shifted up by one block [num_tokens], slots of all taps [num_groups, num_tokens, kernel].
        """
        reach = self._kernel - 1
        # [num_reqs, reach + num_rows]; shifting by a block makes column = position // block_size
        shifted = layout.first_position[:, None] + self._range(
            self._block_size - reach, self._block_size + num_rows
        )
        columns = (shifted // self._block_size).expand(len(self._groups), -1, -1)
        slots = torch.add(shifted % self._block_size, tables.gather(2, columns), alpha=self._block_size)
        taps = slots.unfold(2, self._kernel, 1)
        return shifted[:, reach:].reshape(-1), taps.reshape(len(self._groups), -1, self._kernel)

    def _ragged_slots(self, tables: Tensor, layout: RowLayout, counts: np.ndarray) -> tuple[Tensor, Tensor]:
        """As `_uniform_slots`, each row by itself."""
        reach = self._kernel - 1
        requests = self._to_device(np.repeat(np.arange(len(counts)), counts))
        offsets = np.concatenate([np.arange(count) for count in counts])[:, None]
        tap_offsets = self._to_device(offsets + np.arange(self._block_size - reach, self._block_size + 1))
        # [num_tokens, kernel]
        shifted = layout.first_position[requests][:, None] + tap_offsets
        blocks = tables[:, requests[:, None], shifted // self._block_size]
        return shifted[:, reach], torch.add(shifted % self._block_size, blocks, alpha=self._block_size)

    def _slot_mapping(self, slots: Tensor, layout: RowLayout, counts: np.ndarray) -> Tensor:
        # [num_groups, num_tokens, kernel] -> [num_groups, num_tokens]
        own = slots[:, :, -1]
        if layout.num_live is None:
            return own.contiguous()
        if (counts == counts[0]).all():
            is_live = self._range(0, int(counts[0])) < layout.num_live[:, None]
        else:
            offsets = self._to_device(np.concatenate([np.arange(count) for count in counts]))
            requests = self._to_device(np.repeat(np.arange(len(counts)), counts))
            is_live = offsets < layout.num_live[requests]
        return torch.where(is_live.view(-1), own, -1)

    def _plan_segments(
        self, starts: np.ndarray, counts: np.ndarray, max_seq_lens: np.ndarray
    ) -> list[_SegmentPlan]:
        num_rows = int(counts[0])
        limit = _MAX_SEGMENT_ROWS if len(counts) == 1 else _MAX_SHARED_ROWS
        if num_rows <= limit and (counts == num_rows).all():
            return [
                _SegmentPlan(
                    slice(None), len(counts), num_rows, None, self._range(0, num_rows)[None], int(max_seq_lens.max())
                )
            ]
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
                        self._range(offset, offset + num_rows)[None],
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
        return _SegmentPlan(
            self._to_device(requests),
            len(requests),
            num_rows,
            self._to_device(rows.reshape(-1)),
            self._to_device(offsets),
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
            keys[spec.name] = self._all_keys(table, positions, num_blocks, extent)
        return keys

    def _all_keys(self, table: Tensor, positions: Tensor, num_blocks: int, extent: int) -> SegmentKeys:
        """The first `num_blocks` blocks of each request."""
        # table: [num_reqs, num_columns]; positions: [num_reqs, Q]
        size = self._block_size
        slots = torch.add(self._range(0, size), table[:, 1 : 1 + num_blocks, None], alpha=size)
        # 1 + distance, as (position + 1) - key
        columns = ((positions + 1)[:, :, None] - self._range(0, num_blocks * size)).clamp_(0, extent + 1)
        return SegmentKeys(slots.view(-1), columns[:, None, None])

    def _window_keys(
        self, table: Tensor, positions: Tensor, window: int, num_blocks: int, extent: int
    ) -> SegmentKeys:
        """The `num_blocks` blocks of each request from where its first row's window begins."""
        size = self._block_size
        # [num_reqs, 1]
        first_block = (positions[:, :1] - (window - 1)).clamp_(min=0) // size
        # Past the end of the table any block will do: its keys are after every row.
        table_columns = (first_block + self._range(1, 1 + num_blocks)).clamp_(max=table.shape[1] - 1)
        slots = torch.add(self._range(0, size), table.gather(1, table_columns)[:, :, None], alpha=size)
        from_first_key = torch.sub(positions + 1, first_block, alpha=size)
        columns = (from_first_key[:, :, None] - self._range(0, num_blocks * size)).clamp_(0, extent + 1)
        return SegmentKeys(slots.view(-1), columns[:, None, None])
