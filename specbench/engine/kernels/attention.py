"""Paged attention in plain torch: the reference that a faster kernel must equal.

score(row, key) = query . key * scale + bias(row, key), softmax over the keys that the row sees. The bias is a mask, or
a relative one: relative(row) . bias_table[distance].

Belongs here: the arithmetic, over any layout. Does not belong here: what a step's rows see (layers/metadata.py), the
kernel (paged_attention.py).
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

    @property
    def profiles(self) -> Tensor:
        """[extent, d_rel], by distance."""
        return self.weight[1:-1]


class VisibilityMask:
    """What is added to the scores of rows that see every key up to their own, or a window of them."""

    def __init__(self, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        offsets = [MASKED, 0.0] if window is None else [MASKED, *[0.0] * window, MASKED]
        #: By column: of a key after the row, then by distance, and last of anything farther back.
        self._offsets = torch.tensor(offsets, dtype=dtype, device=device)

    def __call__(self, columns: Tensor, group: int) -> Tensor:
        """columns [B, 1, 1, Q, K], as SegmentKeys has them -> [B, 1, Q * group, K], where `group` query heads share a
        key head."""
        num_reqs, _, _, num_rows, num_keys = columns.shape
        mask = self._offsets.take(columns).transpose(2, 3).expand(-1, -1, -1, group, -1)
        return mask.reshape(num_reqs, 1, num_rows * group, num_keys)


def attend_masked(query: Tensor, kv_cache: Tensor, slots: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One block of requests with the same number of rows and of keys, under a mask.

    query [B, Q * group, kv_heads, d], kv_cache [slots + 1, 2, kv_heads, d], slots [B * K], mask [B, 1, Q * group, K]
    -> as the query. Heads that share a key head are rows of it, which is read once; nothing is copied on the way.
    """
    keys, values = _gather(kv_cache, slots, len(query))
    return F.scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask, scale=scale).transpose(
        1, 2
    )


def attend(
    query: Tensor, relative: Tensor, kv_cache: Tensor, slots: Tensor, columns: Tensor, bias: RelativeBias, scale: float
) -> Tensor:
    """One block of requests with the same number of rows and of keys, under a relative bias.

    query [B, Q, heads, d], relative [B, Q, heads, d_rel], kv_cache [slots + 1, 2, kv_heads, d], slots [B * K],
    columns [B, 1, 1, Q, K] -> [B * Q, heads * d].
    """
    num_reqs, num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    by_column = F.linear(_by_key_head(relative, num_kv_heads), bias.weight, bias.offset)
    # [B, kv_heads, group, Q, extent + 2] -> [B, kv_heads, group, Q, K]
    scores = by_column.gather(-1, columns.expand(-1, num_kv_heads, by_column.shape[2], -1, -1))
    keys, values = _gather(kv_cache, slots, num_reqs)
    output = F.scaled_dot_product_attention(
        _by_key_head(query, num_kv_heads).flatten(2, 3), keys, values, attn_mask=scores.flatten(2, 3), scale=scale
    )
    output = output.view(num_reqs, num_kv_heads, -1, num_rows, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_reqs * num_rows, num_heads * head_dim)


def _by_key_head(rows: Tensor, num_kv_heads: int) -> Tensor:
    """Query heads that share a key head, together: [B, Q, heads, d] -> [B, kv_heads, group, Q, d]."""
    num_reqs, num_rows, num_heads, _ = rows.shape
    return rows.view(num_reqs, num_rows, num_kv_heads, num_heads // num_kv_heads, -1).permute(0, 2, 3, 1, 4)


def _gather(kv_cache: Tensor, slots: Tensor, num_reqs: int) -> tuple[Tensor, Tensor]:
    """Keys and values at the slots of each request, [B, kv_heads, K, d] each."""
    stored = kv_cache.index_select(0, slots).view(num_reqs, -1, *kv_cache.shape[1:])
    keys, values = stored.unbind(2)
    return keys.transpose(1, 2), values.transpose(1, 2)
