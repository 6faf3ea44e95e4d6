"""Biases by distance on a GPU, before attention: by key, so that a tile of scores reads its biases as they lie.

Belongs here: what distances add to scores. Does not belong here: attention itself (paged_attention.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.step_rows import PagedBatch


@dataclass(frozen=True, slots=True)
class RelativeTerm:
    """What distances add to scores."""

    # [T, heads, d_rel]
    rows: Tensor
    # [extent, d_rel], by distance
    profiles: Tensor


def bias_by_key(relative: RelativeTerm, batch: PagedBatch, tile_keys: int) -> Tensor:
    """[T, heads, width]: made first, and by key, so that a tile of scores reads its biases as they lie. Column 0 of a
    row belongs to the first key of the tile in which its profiles begin (`first_biased`)."""
    num_rows, num_heads, d_rel = relative.rows.shape
    extent = len(relative.profiles)
    width = triton.cdiv(extent + tile_keys - 1, tile_keys) * tile_keys
    by_key = relative.rows.new_empty(num_rows, num_heads, width)
    assert relative.rows.stride(1) == d_rel and relative.rows.stride(2) == 1 and relative.profiles.is_contiguous()
    num_reqs = len(batch.first_position)
    _bias_tile[(num_rows, triton.cdiv(width, 128))](
        relative.rows,
        relative.profiles,
        by_key,
        batch.query_start_loc,
        batch.first_position,
        num_reqs,
        batch.max_rows,
        relative.rows.stride(0),
        HEADS=num_heads,
        BLOCK_HEADS=dot_width(num_heads),
        D_REL=d_rel,
        BLOCK_REL=dot_width(d_rel),
        EXTENT=extent,
        WIDTH=width,
        TILE_KEYS=tile_keys,
        BLOCK_N=128,
        IS_UNIFORM=num_rows == num_reqs * batch.max_rows,
        PRECISION="ieee" if by_key.dtype == torch.float32 else "tf32",
        **launch_options(by_key.device),
        num_warps=4,
    )
    return by_key


def dot_width(width: int) -> int:
    """The least width that a matrix instruction takes."""
    return max(16, triton.next_power_of_2(width))


@triton.jit
def first_biased(position, EXTENT: tl.constexpr, TILE_KEYS: tl.constexpr):
    """First key of the tile in which the profiles of a row begin."""
    return tl.maximum(position - EXTENT + 1, 0) // TILE_KEYS * TILE_KEYS


@triton.jit
def _request_of_row(query_start_loc, num_reqs, row):
    low = 0
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(query_start_loc + middle) > row
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    return low


@triton.jit(
    do_not_specialize=("num_reqs", "max_rows"),
    do_not_specialize_on_alignment=("query_start_loc", "first_position"),
)
def _bias_tile(
    rows,
    profiles,
    by_key,
    query_start_loc,
    first_position,
    num_reqs,
    max_rows,
    row_stride,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    D_REL: tl.constexpr,
    BLOCK_REL: tl.constexpr,
    EXTENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """All heads of one row, some keys; zeros where the profiles do not reach."""
    token = tl.program_id(0)
    request = token // max_rows
    if not IS_UNIFORM:
        request = _request_of_row(query_start_loc, num_reqs, token)
    position = tl.load(first_position + request).to(tl.int32) + token - tl.load(query_start_loc + request)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    distance = position - first_biased(position, EXTENT, TILE_KEYS) - column
    head = tl.arange(0, BLOCK_HEADS)
    c = tl.arange(0, BLOCK_REL)
    is_head, is_near, is_part = head < HEADS, (distance >= 0) & (distance < EXTENT), c < D_REL
    own = rows + token.to(tl.int64) * row_stride
    r = tl.load(own + head[:, None] * D_REL + c[None, :], mask=is_head[:, None] & is_part[None, :], other=0.0)
    p = tl.load(profiles + distance[:, None] * D_REL + c[None, :], mask=is_near[:, None] & is_part[None, :], other=0.0)
    biases = tl.where(is_near[None, :], tl.dot(r, tl.trans(p), input_precision=PRECISION), 0.0)
    place = by_key + (token.to(tl.int64) * HEADS + head)[:, None] * WIDTH + column[None, :]
    tl.store(place, biases.to(by_key.dtype.element_ty), mask=is_head[:, None] & (column < WIDTH)[None, :])
    # At the end: it runs beside the kernel that makes attention's inputs (see overlap.py).
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
