"""Paged attention with a relative bias, in plain torch: the reference that a faster kernel must equal.

score(row, key) = query . key * scale + relative(row) . bias_table[distance], softmax over the keys that the row sees.
"""

from __future__ import annotations

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


def attend(
    query: Tensor, relative: Tensor, kv_cache: Tensor, slots: Tensor, columns: Tensor, bias: RelativeBias, scale: float
) -> Tensor:
    """One block of requests with the same number of rows and of keys.

    query [B, Q, heads, d], relative [B, Q, heads, d_rel], kv_cache [slots + 1, 2, kv_heads, d], slots [B * K],
    columns [B, 1, 1, Q, K] -> [B * Q, heads * d].
    """
    num_reqs, num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    group = num_heads // num_kv_heads
    # Query heads that share a key head become rows of it: [B, kv_heads, group * Q, d]
    grouped = query.view(num_reqs, num_rows, num_kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
    grouped = grouped.reshape(num_reqs, num_kv_heads, group * num_rows, head_dim)
    relative = relative.view(num_reqs, num_rows, num_kv_heads, group, -1).permute(0, 2, 3, 1, 4)
    by_column = F.linear(relative, bias.weight, bias.offset)  # [B, kv_heads, group, Q, extent + 2]
    scores = by_column.gather(-1, columns.expand(-1, num_kv_heads, group, -1, -1)).view(
        num_reqs, num_kv_heads, group * num_rows, -1
    )
    keys, values = kv_cache.index_select(0, slots).view(num_reqs, -1, 2, num_kv_heads, head_dim).unbind(2)
    output = F.scaled_dot_product_attention(
        grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=scores, scale=scale
    )
    output = output.view(num_reqs, num_kv_heads, group, num_rows, head_dim).permute(0, 3, 1, 2, 4)
    return output.reshape(num_reqs * num_rows, num_heads * head_dim)
