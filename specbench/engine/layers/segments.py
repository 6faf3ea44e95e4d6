"""The keys of a step's rows as plain torch takes them: segments of requests with as many rows each.

Belongs here: how rows are cut into segments, and which slots and distances a segment has. Does not belong here: the
rows' own slots (metadata_builder.py), kernels, which walk block tables and need no segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.layers.metadata import RowLayout, Segment, SegmentKeys
from specbench.engine.layers.to_device import to_device

#: Requests with at most this many rows share one padded segment.
MAX_SHARED_ROWS = 16
#: Longer chunks are cut into segments of this many rows, which bounds the scores that exist at a time.
_MAX_SEGMENT_ROWS = 128


class Offsets:
    """Ranges of whole numbers on the device, cut from one tensor."""

    def __init__(self, first: int, last: int, device: torch.device) -> None:
        self._first = first
        self._device = device
        self._numbers = torch.arange(first, last, device=device)
        # Shorter ones that it replaced: a graph may go on reading them.
        self._outgrown: list[Tensor] = []

    def __call__(self, start: int, end: int) -> Tensor:
        """start .. end - 1, without making a tensor."""
        return self._numbers[start - self._first : end - self._first]

    def reach(self, last: int) -> None:
        """Have numbers below `last`."""
        if last > len(self._numbers) + self._first:
            self._outgrown.append(self._numbers)
            self._numbers = torch.arange(self._first, 2 * last, device=self._device)


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


class SegmentBuilder:
    """Segments over one owner's cache groups. Block tables are those of AttentionMetadataBuilder."""

    def __init__(
        self,
        groups: Sequence[CacheGroupSpec],
        block_size: int,
        relative_extents: Mapping[str, int],
        offsets: Offsets,
        device: torch.device,
    ) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._extents = relative_extents
        self._offsets = offsets
        self._device = device
        # (group, rows of a request) -> bias columns
        self._columns_of_window: dict[tuple[str, int], Tensor] = {}

    def build(self, tables: Tensor, layout: RowLayout) -> tuple[Segment, ...]:
        """Of any mix of row counts: short ones share a padded segment, each longer chunk has its own."""
        starts = np.asarray(layout.query_start_loc_np)
        plans = self._plan_segments(starts, np.diff(starts), np.asarray(layout.max_seq_lens_np))
        return tuple(
            Segment(plan.num_reqs, plan.num_rows, plan.rows, self._keys(tables, layout, plan)) for plan in plans
        )

    def window_columns(self, group: str, window: int, num_rows: int) -> Tensor:
        """[1, 1, 1, Q, window - 1 + Q] bias columns of Q consecutive rows over the keys from the first one's window
        on: the same wherever the rows are, as long as the keys exist."""
        if (group, num_rows) not in self._columns_of_window:
            rows = torch.arange(window, window + num_rows, device=self._device)
            columns = (rows[:, None] - torch.arange(window - 1 + num_rows, device=self._device)).clamp_(
                0, self._extents[group] + 1
            )
            self._columns_of_window[group, num_rows] = columns[None, None, None]
        return self._columns_of_window[group, num_rows]

    def _plan_segments(self, starts: np.ndarray, counts: np.ndarray, max_seq_lens: np.ndarray) -> list[_SegmentPlan]:
        plans = []
        shared = np.flatnonzero(counts <= MAX_SHARED_ROWS)
        if len(shared):
            plans.append(self._plan_shared(shared, starts, counts, max_seq_lens))
        for request in np.flatnonzero(counts > MAX_SHARED_ROWS):
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
            keys[spec.name] = self.all_keys(table, positions, plan.max_seq_len, extent)
        return keys

    def all_keys(self, table: Tensor, positions: Tensor, max_seq_len: int, extent: int) -> SegmentKeys:
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
