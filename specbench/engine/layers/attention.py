"""Grouped-query attention over a paged cache: rotary, or with short convolutions and a relative bias."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine.kernels.attention import RelativeBias, attend, attend_masked
from specbench.engine.layers.linear import Linear
from specbench.engine.layers.metadata import AttentionMetadata
from specbench.engine.layers.norm import RMSNorm
from specbench.engine.layers.rotary import Rotation
from specbench.engine.layers.short_conv import ShortConv


class RelativeAttention:
    """One attention layer. Query, relative, key and value projections are one matrix, in this order."""

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        # [heads * (d + d_rel) + 2 * kv_heads * d, hidden]
        input_projection: Tensor,
        # [hidden, heads * d]
        output_projection: Tensor,
        # over the channels of all keys, then all values
        kv_conv: ShortConv,
        # weight [heads + kv_heads, d]
        head_norm: RMSNorm,
        bias: RelativeBias,
        # Cache group of the keys and values, and of the convolution's inputs
        kv_group: str,
        conv_group: str,
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._input_projection = input_projection
        self._output_projection = output_projection
        self._kv_conv = kv_conv
        self._head_norm = head_norm
        self._bias = bias
        self._kv_group = kv_group
        self._conv_group = conv_group
        self._query_width = num_heads * head_dim
        self._kv_width = num_kv_heads * head_dim
        # Queries and keys are normed per head, hence 1/d and not 1/sqrt(d).
        self._scale = 1.0 / head_dim

    def __call__(
        self,
        x: Tensor,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
        conv_cache: Tensor,
        log_scale: Tensor | None,
    ) -> Tensor:
        # x: [T, hidden]; kv_cache: [slots + 1, 2, kv_heads, d]; conv_cache: [slots + 1, 2 * kv_heads * d]
        # log_scale: [T, 1, 1] fp32, a factor of every score of a row
        num_tokens = x.shape[0]
        projected = F.linear(x, self._input_projection)
        kv_start = projected.shape[1] - 2 * self._kv_width
        kv = self._kv_conv(
            projected[:, kv_start:],
            conv_cache,
            metadata.slot_mapping[self._conv_group],
            metadata.tap_slots[self._conv_group],
        )
        heads = torch.cat((projected[:, : self._query_width], kv[:, : self._kv_width]), 1)
        heads = self._head_norm(heads.view(num_tokens, -1, self._head_dim))
        query = heads[:, : self._num_heads]
        relative = projected[:, self._query_width : kv_start].view(num_tokens, self._num_heads, -1)
        if log_scale is not None:
            query = (query * log_scale).to(x.dtype)
            relative = (relative * log_scale).to(x.dtype)
        values = kv[:, self._kv_width :].view(num_tokens, self._num_kv_heads, self._head_dim)
        stored = torch.stack((heads[:, self._num_heads :], values), 1)
        kv_cache.index_put_((metadata.slot_mapping[self._kv_group],), stored)
        attended = self._attend(query, relative, kv_cache, metadata)
        return F.linear(attended, self._output_projection)

    def _attend(self, query: Tensor, relative: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        # query: [T, heads, d]; relative: [T, heads, d_rel] -> [T, heads * d]
        def attend_segment(index: int, query: Tensor, relative: Tensor) -> Tensor:
            segment = metadata.segments[index]
            shape = (segment.num_reqs, segment.num_rows, self._num_heads, -1)
            keys = segment.keys[self._kv_group]
            return attend(
                query.view(shape), relative.view(shape), kv_cache, keys.slots, keys.columns, self._bias, self._scale
            )

        return _by_segment(attend_segment, metadata, query, relative).view(len(query), -1)


class RotaryAttention:
    """One attention layer. Query, key and value projections are one matrix, in this order.

    Query heads lie by their place in the group that shares a key head, then by key head, so that a group's heads are
    rows of their key head as they stand (see `by_group`).
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        # [(heads + 2 * kv_heads) * d, hidden]
        input_projection: Linear,
        # [hidden, heads * d]
        output_projection: Linear,
        # weight [heads + kv_heads, d]
        head_norm: RMSNorm | None,
        # Cache group of the keys and values
        kv_group: str,
    ) -> None:
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._input_projection = input_projection
        self._output_projection = output_projection
        self._head_norm = head_norm
        self._kv_group = kv_group
        self._scale = head_dim**-0.5
        self.linears = (input_projection, output_projection)

    def __call__(
        self,
        x: Tensor,
        metadata: AttentionMetadata,
        rotation: Rotation,
        masks: Sequence[Tensor],
        kv_cache: Tensor,
    ) -> Tensor:
        # x: [T, hidden]; masks: one a segment, [B, 1, Q * group, K]; kv_cache: [slots + 1, 2, kv_heads, d]
        num_tokens = len(x)
        heads = self._input_projection(x).view(num_tokens, -1, self._head_dim)
        turned = heads[:, : self._num_heads + self._num_kv_heads]
        if self._head_norm is not None:
            turned.copy_(self._head_norm(turned))
        rotation.apply_(turned)
        stored = heads[:, self._num_heads :].view(num_tokens, 2, self._num_kv_heads, self._head_dim)
        kv_cache.index_put_((metadata.slot_mapping[self._kv_group],), stored)
        attended = self._attend(heads[:, : self._num_heads], metadata, masks, kv_cache)
        return self._output_projection(attended.reshape(num_tokens, -1))

    def _attend(self, query: Tensor, metadata: AttentionMetadata, masks: Sequence[Tensor], kv_cache: Tensor) -> Tensor:
        # query: [T, heads, d] -> [T, heads * d] in any shape
        def attend_segment(index: int, query: Tensor) -> Tensor:
            segment = metadata.segments[index]
            rows = query.reshape(segment.num_reqs, -1, self._num_kv_heads, self._head_dim)
            return attend_masked(rows, kv_cache, segment.keys[self._kv_group].slots, masks[index], self._scale)

        return _by_segment(attend_segment, metadata, query)


def by_group(heads: Tensor, num_kv_heads: int, head_dim: int) -> Tensor:
    """Rows of query heads in a checkpoint's order, by key head and then by place in its group -> in RotaryAttention's.

    [heads * d, ...] -> the same shape.
    """
    by_key_head = heads.unflatten(0, (num_kv_heads, -1, head_dim))
    return by_key_head.transpose(0, 1).reshape(heads.shape)


def _by_segment(
    attend_segment: Callable[..., Tensor], metadata: AttentionMetadata, query: Tensor, *others: Tensor
) -> Tensor:
    """[T, heads, d] and others of its rows -> [T, heads * d] in any shape. `attend_segment` takes a segment's index and
    its rows of each."""
    output = None
    for index, segment in enumerate(metadata.segments):
        if segment.rows is None:
            return attend_segment(index, query, *others)
        if output is None:
            output = torch.empty_like(query)
        attended = attend_segment(index, query[segment.rows], *(other[segment.rows] for other in others))
        output[segment.rows] = attended.reshape(-1, *query.shape[1:])
    assert output is not None
    return output
