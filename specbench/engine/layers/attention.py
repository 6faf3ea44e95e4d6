"""Grouped-query attention over a paged cache: rotary, or with short convolutions and a relative bias.

Belongs here: a layer's parts in their order, on a CPU and on a GPU. Does not belong here: scores and softmax
(attention_backends/), where rows and keys lie (metadata.py), which tensors are a layer's (models/).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.engine.layers.attention_backends.backend import AttentionPass, LayerAttention
from specbench.engine.layers.linear import Linear
from specbench.engine.layers.metadata import AttentionMetadata
from specbench.engine.layers.norm import RMSNorm
from specbench.engine.layers.rotary import Rotation
from specbench.engine.layers.short_conv import ShortConv


class RelativeAttention:
    """One attention layer. Query, relative, key and value projections are one matrix, in this order."""

    def __init__(
        self,
        layer: LayerAttention,
        *,
        # [heads * (d + d_rel) + 2 * kv_heads * d, hidden]
        input_projection: Linear,
        # [hidden, heads * d]
        output_projection: Linear,
        # over the channels of all keys, then all values
        kv_conv: ShortConv,
        # weight [heads + kv_heads, d]
        head_norm: RMSNorm,
        # Cache group of the convolution's inputs
        conv_group: str,
    ) -> None:
        self._layer = layer
        self._input_projection = input_projection
        self._output_projection = output_projection
        self._kv_conv = kv_conv
        self._head_norm = head_norm
        self._conv_group = conv_group
        self._query_width = layer.num_heads * layer.head_dim
        self._kv_width = layer.num_kv_heads * layer.head_dim

    def __call__(
        self,
        x: Tensor,
        metadata: AttentionMetadata,
        attention: AttentionPass,
        kv_cache: Tensor,
        conv_cache: Tensor,
        log_scale: Tensor | None,
    ) -> Tensor:
        # x: [T, hidden]; kv_cache: [slots + 1, 2, kv_heads, d]; conv_cache: [slots + 1, 2 * kv_heads * d]
        # log_scale: [T, 1, 1] fp32, a factor of every score of a row
        num_tokens = x.shape[0]
        projected = self._input_projection(x)
        inputs = self._inputs_on_gpu if x.is_cuda else self._inputs
        query = inputs(projected, metadata, kv_cache, conv_cache)
        relative_columns = projected[:, self._query_width : projected.shape[1] - 2 * self._kv_width]
        relative = relative_columns.view(num_tokens, self._layer.num_heads, -1)
        attended = attention.attend(self._layer, query, kv_cache, relative, log_scale)
        return self._output_projection(attended)

    def _inputs(self, projected: Tensor, metadata: AttentionMetadata, kv_cache: Tensor, conv_cache: Tensor) -> Tensor:
        """Queries [T, heads, d]; stores keys, values and what they were convolved from."""
        num_tokens = len(projected)
        kv_start = projected.shape[1] - 2 * self._kv_width
        kv = self._kv_conv(
            projected[:, kv_start:],
            conv_cache,
            metadata.slot_mapping[self._conv_group],
            metadata.tap_slots[self._conv_group],
        )
        heads = torch.cat((projected[:, : self._query_width], kv[:, : self._kv_width]), 1)
        heads = self._head_norm(heads.view(num_tokens, -1, self._layer.head_dim))
        values = kv[:, self._kv_width :].view(num_tokens, self._layer.num_kv_heads, self._layer.head_dim)
        stored = torch.stack((heads[:, self._layer.num_heads :], values), 1)
        kv_cache.index_put_((metadata.slot_mapping[self._layer.kv_group],), stored)
        return heads[:, : self._layer.num_heads]

    def _inputs_on_gpu(
        self, projected: Tensor, metadata: AttentionMetadata, kv_cache: Tensor, conv_cache: Tensor
    ) -> Tensor:
        from specbench.engine.kernels.attention_inputs import HeadNorm, HeadShape, attention_inputs
        from specbench.engine.kernels.short_conv import CachedConv

        group = self._conv_group
        conv = CachedConv(self._kv_conv.taps, conv_cache, metadata.slot_mapping[group], metadata.tap_slots[group])
        return attention_inputs(
            projected,
            HeadShape(self._layer.num_heads, self._layer.num_kv_heads, self._layer.head_dim),
            kv_cache,
            metadata.slot_mapping[self._layer.kv_group],
            HeadNorm(self._head_norm.weight, self._head_norm.eps),
            conv=conv,
            rows=metadata.paged.step_rows,
        )


class RotaryAttention:
    """One attention layer. Query, key and value projections are one matrix, in this order.

    Query heads lie as the attention backend wants them: as in a checkpoint, or by their place in the group that shares
    a key head and then by key head, so that a group's heads are rows of their key head as they stand (see `by_group`).
    """

    def __init__(
        self,
        layer: LayerAttention,
        *,
        # [(heads + 2 * kv_heads) * d, hidden]
        input_projection: Linear,
        # [hidden, heads * d]
        output_projection: Linear,
        # weight [heads + kv_heads, d]
        head_norm: RMSNorm | None,
    ) -> None:
        self._layer = layer
        self._input_projection = input_projection
        self._output_projection = output_projection
        self._head_norm = head_norm
        self.linears = (input_projection, output_projection)

    def __call__(
        self,
        x: Tensor,
        metadata: AttentionMetadata,
        attention: AttentionPass,
        rotation: Rotation,
        kv_cache: Tensor,
    ) -> Tensor:
        # x: [T, hidden]; kv_cache: [slots + 1, 2, kv_heads, d] -> [T, hidden], or its partial sums (see Linear)
        inputs = self._inputs_on_gpu if x.is_cuda else self._inputs
        query = inputs(x, rotation, kv_cache, metadata.slot_mapping[self._layer.kv_group])
        return self._output_projection.partial_sums(attention.attend(self._layer, query, kv_cache))

    def _inputs(self, x: Tensor, rotation: Rotation, kv_cache: Tensor, slot_mapping: Tensor) -> Tensor:
        """Queries [T, heads, d]; stores keys and values."""
        num_tokens, projected = len(x), self._input_projection(x)
        heads = projected.view(num_tokens, -1, self._layer.head_dim)
        turned = heads[:, : self._layer.num_heads + self._layer.num_kv_heads]
        if self._head_norm is not None:
            turned.copy_(self._head_norm(turned))
        rotation.apply_(turned)
        stored = heads[:, self._layer.num_heads :].view(num_tokens, 2, self._layer.num_kv_heads, self._layer.head_dim)
        kv_cache.index_put_((slot_mapping,), stored)
        return heads[:, : self._layer.num_heads]

    def _inputs_on_gpu(self, x: Tensor, rotation: Rotation, kv_cache: Tensor, slot_mapping: Tensor) -> Tensor:
        from specbench.engine.kernels.attention_inputs import HeadNorm, HeadShape, Turn, attention_inputs

        norm = self._head_norm
        return attention_inputs(
            self._input_projection.partial_sums(x),
            HeadShape(self._layer.num_heads, self._layer.num_kv_heads, self._layer.head_dim),
            kv_cache,
            slot_mapping,
            None if norm is None else HeadNorm(norm.weight, norm.eps),
            Turn(rotation.cos, rotation.signed_sin),
        )


def by_group(heads: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Rows of query heads in a checkpoint's order, by key head and then by place in its group -> in RotaryAttention's.

    [heads * d, ...] -> the same shape.
    """
    by_key_head = heads.unflatten(0, (num_kv_heads, -1, head_dim))
    return by_key_head.transpose(0, 1).reshape(heads.shape)
