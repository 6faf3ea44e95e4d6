"""Makes a step's metadata from block tables and first positions.

Belongs here: positions and slots of rows and of their taps, in plain torch or by a kernel. Does not belong here: the
types (metadata.py), keys of plain torch (segments.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.layers import fusion
from specbench.engine.layers.metadata import (
    AttentionMetadata,
    DeviceLayout,
    HostRows,
    PagedRows,
    RowLayout,
    Segment,
    SegmentKeys,
)
from specbench.engine.layers.segments import MAX_SHARED_ROWS, Offsets, SegmentBuilder
from specbench.engine.layers.to_device import to_device


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
        # They start at the farthest that a row looks back.
        self._offsets = Offsets(-max(spec.window or 1 for spec in groups), 4 * block_size, device)
        self._segments = SegmentBuilder(groups, block_size, relative_extents, self._offsets, device)
        # (requests, rows of each) -> their first rows, which graphs go on reading: none is ever dropped
        self._uniform_starts: dict[tuple[int, int], Tensor] = {}

    def build(self, block_tables: Tensor, layout: RowLayout) -> AttentionMetadata:
        """Metadata of one step; `block_tables` is int32 and covers every position laid out."""
        starts = layout.query_start_loc_np
        num_rows = starts[1]
        max_seq_len = max(layout.max_seq_lens_np)
        self._offsets.reach(max_seq_len + starts[-1] + 2 * self._block_size)
        # Segments of many rows are cut, so that their scores fit in memory.
        is_short = num_rows <= MAX_SHARED_ROWS or not self._needs_segments
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
                bias_columns = self._segments.window_columns(spec.name, windows[spec.name], num_rows)
                bias_columns = bias_columns * is_in_sequence[:, None, None, None, first:]
                keys[spec.name] = SegmentKeys(slots[group, :, first:].reshape(-1), bias_columns)
            elif self._needs_segments:
                extent = self._extents[spec.name]
                keys[spec.name] = self._segments.all_keys(tables[group], positions, max_seq_len, extent)
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
            segments=self._segments.build(tables, layout) if self._needs_segments else (),
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
