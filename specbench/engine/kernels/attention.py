"""Paged attention in plain torch: the reference that a faster kernel must equal.

score(row, key) = query . key * scale + bias(row, key), softmax over the keys that the row sees. The bias is a mask, or
a relative one: relative(row) . bias_table[distance].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Added to the score of a key that a row does not see. Finite, so that a row without any key stays finite too.
MASKED = -1e30


class RelativeBias:
    """The bias by distance as one affine map: column 0 masks, columns 1 .. extent are distances 0 .. extent - 1, and
    the last is everything farther back (masked by a window, else without bias)."""

    def __init__(self, profiles: Tensor, is_masked_beyond: bool) -> None:
        # profiles: [d_rel, extent]
        d_rel, extent = profiles.shape
        #: [extent + 2, d_rel]
        self.weight = profiles.new_zeros(extent + 2, d_rel)
        self.weight[1:-1] = profiles.T
        #: [extent + 2]
        self.offset = profiles.new_zeros(extent + 2)
        self.offset[0] = MASKED
        self.offset[-1] = MASKED if is_masked_beyond else 0.0


class VisibilityMask:
    """What is added to the scores of rows that see every key up to their own, or a window of them."""

    def __init__(self, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        offsets = [MASKED, 0.0] if window is None else [MASKED, *[0.0] * window, MASKED]
        #: By column: of a key after the row, then by distance, and last of anything farther back.
        self._offsets = torch.tensor(offsets, dtype=dtype, device=device)

    def __call__(self, columns: Tensor, group: int) -> Tensor:
        """columns [B, 1, 1, Q, K], as SegmentKeys has them -> [B, 1, group * Q, K], where `group` query heads share a
        key head."""
        num_reqs, _, _, num_rows, num_keys = columns.shape
        mask = self._offsets.take(columns).expand(-1, -1, group, -1, -1)
        return mask.reshape(num_reqs, 1, group * num_rows, num_keys)


def attend_masked(query: Tensor, kv_cache: Tensor, slots: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One block of requests with the same number of rows and of keys, under a mask.

    query [B, Q, heads, d], kv_cache [slots + 1, 2, kv_heads, d], slots [B * K], mask [B, 1, group * Q, K]
    -> [B * Q, heads * d].
    """
    return _attend(_by_key_head(query, kv_cache.shape[2]), kv_cache, slots, mask, scale)


def attend(
    query: Tensor, relative: Tensor, kv_cache: Tensor, slots: Tensor, columns: Tensor, bias: RelativeBias, scale: float
) -> Tensor:
    """One block of requests with the same number of rows and of keys, under a relative bias.

    query [B, Q, heads, d], relative [B, Q, heads, d_rel], kv_cache [slots + 1, 2, kv_heads, d], slots [B * K],
    columns [B, 1, 1, Q, K] -> [B * Q, heads * d].
    """
    num_kv_heads = kv_cache.shape[2]
    grouped = _by_key_head(query, num_kv_heads)
    by_column = F.linear(_by_key_head(relative, num_kv_heads), bias.weight, bias.offset)
    # [B, kv_heads, group, Q, extent + 2] -> [B, kv_heads, group, Q, K]
    scores = by_column.gather(-1, columns.expand(-1, num_kv_heads, by_column.shape[2], -1, -1))
    return _attend(grouped, kv_cache, slots, scores.flatten(2, 3), scale)


def _by_key_head(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Query heads that share a key head, together: [B, Q, heads, d] -> [B, kv_heads, group, Q, d]."""
    num_reqs, num_rows, num_heads, _ = rows.shape
    return rows.view(num_reqs, num_rows, num_kv_heads, num_heads // num_kv_heads, -1).permute(0, 2, 3, 1, 4)


def _attend(grouped: Tensor, kv_cache: Tensor, slots: Tensor, bias: Tensor, scale: float) -> Tensor:
    # grouped: [B, kv_heads, group, Q, d]; bias: [B, kv_heads or 1, group * Q, K], added to the scores
    num_reqs, num_kv_heads, group, num_rows, head_dim = grouped.shape
    # Heads of a group become rows of their key head, which is read once.
    query = grouped.reshape(num_reqs, num_kv_heads, group * num_rows, head_dim)
    keys, values = kv_cache.index_select(0, slots).view(num_reqs, -1, 2, num_kv_heads, head_dim).unbind(2)
    output = F.scaled_dot_product_attention(
        query, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=bias, scale=scale
    )
    output = output.view(num_reqs, num_kv_heads, group, num_rows, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_reqs * num_rows, num_kv_heads * group * head_dim)
