"""Attention in plain torch: keys are gathered, scores are written out. The reference, and what a CPU runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specbench.engine.kernels.attention import VisibilityMask, attend, attend_masked
from specbench.engine.layers.attention_backends.backend import LayerAttention
from specbench.engine.layers.metadata import AttentionMetadata


class TorchAttention:
    """The backend."""

    needs_segments = True
    heads_by_group = True
    is_capturable = False

    def __init__(self) -> None:
        # (window, dtype, device) -> what is added to scores
        self._visibility: dict[tuple[int | None, torch.dtype, torch.device], VisibilityMask] = {}

    def replay_plans(self, max_seq_len: int) -> None:
        return None

    def start(self, metadata: AttentionMetadata) -> TorchPass:
        return TorchPass(metadata, self._mask_of)

    def _mask_of(self, window: int | None, dtype: torch.dtype, device: torch.device) -> VisibilityMask:
        key = (window, dtype, device)
        if key not in self._visibility:
            self._visibility[key] = VisibilityMask(window, dtype, device)
        return self._visibility[key]


class TorchPass:
    """One forward pass: the masks of a cache group are made once for all its layers."""

    def __init__(
        self,
        metadata: AttentionMetadata,
        visibility: Callable[[int | None, torch.dtype, torch.device], VisibilityMask],
    ) -> None:
        self._metadata = metadata
        self._visibility = visibility
        # (cache group, heads a key head) -> one mask a segment, [B, 1, Q * group, K]
        self._masks: dict[tuple[str, int], Sequence[Tensor]] = {}

    def attend(
        self,
        layer: LayerAttention,
        query: Tensor,
        kv_cache: Tensor,
        relative: Tensor | None = None,
        log_scale: Tensor | None = None,
    ) -> Tensor:
        if log_scale is not None:
            query = (query * log_scale).to(query.dtype)
            relative = None if relative is None else (relative * log_scale).to(query.dtype)
        if layer.bias is None:
            attended = self._attend_masked(layer, query, kv_cache)
        else:
            assert relative is not None
            attended = self._attend_relative(layer, query, relative, kv_cache)
        return attended.reshape(len(query), -1)

    def _attend_masked(self, layer: LayerAttention, query: Tensor, kv_cache: Tensor) -> Tensor:
        masks = self._group_masks(layer, query)

        def attend_segment(index: int, query: Tensor) -> Tensor:
            segment = self._metadata.segments[index]
            rows = query.reshape(segment.num_reqs, -1, layer.num_kv_heads, layer.head_dim)
            return attend_masked(rows, kv_cache, segment.keys[layer.kv_group].slots, masks[index], layer.scale)

        return self._by_segment(attend_segment, query)

    def _attend_relative(self, layer: LayerAttention, query: Tensor, relative: Tensor, kv_cache: Tensor) -> Tensor:
        bias = layer.bias
        assert bias is not None

        def attend_segment(index: int, query: Tensor, relative: Tensor) -> Tensor:
            segment = self._metadata.segments[index]
            shape = (segment.num_reqs, segment.num_rows, layer.num_heads, -1)
            keys = segment.keys[layer.kv_group]
            return attend(
                query.view(shape), relative.view(shape), kv_cache, keys.slots, keys.columns, bias, layer.scale
            )

        return self._by_segment(attend_segment, query, relative)

    def _group_masks(self, layer: LayerAttention, query: Tensor) -> Sequence[Tensor]:
        group = layer.num_heads // layer.num_kv_heads
        key = (layer.kv_group, group)
        if key not in self._masks:
            visibility = self._visibility(layer.window, query.dtype, query.device)
            segments = self._metadata.segments
            self._masks[key] = [visibility(segment.keys[layer.kv_group].columns, group) for segment in segments]
        return self._masks[key]

    def _by_segment(self, attend_segment: Callable[..., Tensor], query: Tensor, *others: Tensor) -> Tensor:
        """[T, heads, d] and others of its rows -> [T, heads * d] in any shape. `attend_segment` takes a segment's index
        and its rows of each."""
        output = None
        for index, segment in enumerate(self._metadata.segments):
            if segment.rows is None:
                return attend_segment(index, query, *others)
            if output is None:
                output = torch.empty_like(query)
            attended = attend_segment(index, query[segment.rows], *(other[segment.rows] for other in others))
            output[segment.rows] = attended.reshape(-1, *query.shape[1:])
        assert output is not None
        return output
