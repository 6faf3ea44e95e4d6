"""Attention by FlashInfer's paged prefill (its fa2 kernel), for decoding and verification as well: decoding on matrix
units is the same kernel.

A plan is made on the host from lengths that only the device knows, so every pass waits for the device: steps do not
overlap (a pipeline depth of 1 is allowed and gains nothing), and no graph can hold them. It is here for comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.engine.layers.attention_backends.backend import LayerAttention
from specbench.engine.layers.metadata import AttentionMetadata, PagedRows
from specbench.engine.layers.to_device import to_device

_WORKSPACE_BYTES = 128 << 20

#: What layers must agree in to share a plan: cache group, heads, key heads, head's size.
_PlanKey = tuple[str, int, int, int]


class FlashInferAttention:
    """The backend."""

    needs_segments = False
    heads_by_group = False
    is_capturable = False

    def __init__(self) -> None:
        self._workspace: Tensor | None = None
        self._wrappers: dict[_PlanKey, Any] = {}

    def start(self, metadata: AttentionMetadata) -> FlashInferPass:
        return FlashInferPass(metadata.paged, self._wrapper)

    def _wrapper(self, key: _PlanKey, device: torch.device) -> Any:
        if key not in self._wrappers:
            import flashinfer

            if self._workspace is None:
                self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            # Left to itself it takes fa3 on Hopper, which is two to four times as slow for rows of verification.
            self._wrappers[key] = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2")
        return self._wrappers[key]


@dataclass(frozen=True, slots=True)
class HostRows:
    """The live rows of a step, as the host needs them to plan."""

    # [num_reqs] int64 each: first row, live rows, position of the first
    start_np: np.ndarray
    live_np: np.ndarray
    first_position_np: np.ndarray

    @classmethod
    def of(cls, paged: PagedRows) -> HostRows:
        """Waits for the device, once."""
        starts = paged.query_start_loc.long()
        counts = starts.diff()
        live = counts if paged.num_live is None else torch.minimum(paged.num_live, counts)
        start, num_live, first = torch.stack([starts[:-1], live.clamp_min(0), paged.first_position]).cpu().numpy()
        return cls(start, num_live, first)

    @property
    def row_indices_np(self) -> np.ndarray:
        """[live rows] int64: which rows of the step live."""
        offsets = np.arange(self.live_np.sum()) - np.repeat(np.cumsum(self.live_np) - self.live_np, self.live_np)
        return np.repeat(self.start_np, self.live_np) + offsets


class FlashInferPass:
    """One forward pass: one plan for all layers that agree in what it depends on."""

    def __init__(self, paged: PagedRows, wrapper: Callable[[_PlanKey, torch.device], Any]) -> None:
        self._paged = paged
        self._wrapper = wrapper
        self._rows = HostRows.of(paged)
        self._planned: dict[_PlanKey, Any] = {}
        self._live_rows: Tensor | None = None
        if paged.num_live is not None:
            (self._live_rows,) = to_device([self._rows.row_indices_np], paged.first_position.device)

    def attend(
        self,
        layer: LayerAttention,
        query: Tensor,
        kv_cache: Tensor,
        relative: Tensor | None = None,
        log_scale: Tensor | None = None,
    ) -> Tensor:
        assert layer.bias is None and relative is None and log_scale is None, "choose.py refuses such models"
        key = (layer.kv_group, layer.num_heads, layer.num_kv_heads, layer.head_dim)
        if key not in self._planned:
            self._planned[key] = self._plan(key, layer, query.dtype)
        # Without the scratch row: [blocks, block_size, 2, kv_heads, d]
        pages = kv_cache[:-1].unflatten(0, (-1, self._paged.block_size))
        cache = (pages[:, :, 0], pages[:, :, 1])
        if self._live_rows is None:
            return self._planned[key].run(query.contiguous(), cache).flatten(1)
        output = query.new_zeros(query.shape)
        if len(self._live_rows):
            output[self._live_rows] = self._planned[key].run(query[self._live_rows], cache)
        return output.flatten(1)

    def _plan(self, key: _PlanKey, layer: LayerAttention, dtype: torch.dtype) -> Any:
        table = self._paged.block_tables[layer.kv_group]
        wrapper = self._wrapper(key, table.device)
        size, is_live = self._paged.block_size, self._rows.live_np > 0
        live = self._rows.live_np[is_live]
        num_keys = self._rows.first_position_np[is_live] + live
        num_pages = -(-num_keys // size)
        table_np = table.cpu().numpy()[is_live, 1:]
        pages = [row[:count] for row, count in zip(table_np, num_pages, strict=True)]
        wrapper.plan(
            _int32(np.concatenate([[0], np.cumsum(live)])),
            _int32(np.concatenate([[0], np.cumsum(num_pages)])),
            _int32(np.concatenate(pages) if pages else np.zeros(0)),
            _int32(num_keys - (num_pages - 1) * size),
            layer.num_heads,
            layer.num_kv_heads,
            layer.head_dim,
            size,
            causal=True,
            sm_scale=layer.scale,
            window_left=-1 if layer.window is None else layer.window - 1,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return wrapper


def _int32(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32))
