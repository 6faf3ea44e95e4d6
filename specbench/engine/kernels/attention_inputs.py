"""From a projection's output to attention's inputs on a GPU, in one launch: short convolution of keys and values, norm
of each query and key head, rotation, and keys and values stored in the cache.

Belongs here: what lies between the two products of an attention layer, but for attention. Does not belong here:
attention (paged_attention.py), norms and convolutions of whole rows (norm.py, short_conv.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.few_rows import load_sum, num_sums
from specbench.engine.kernels.norm import rms_norm_reference
from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.short_conv import CachedConv, conv_reference, convolve, offset_in_request
from specbench.engine.kernels.step_rows import StepRows

#: Heads of one program.
_BLOCK_HEADS = 4


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a projection's output: queries first, keys and values last, whatever lies between left alone."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm of each query and key head."""

    # [heads + kv_heads, d]
    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Where rows are turned to: pairs (i, i + d / 2) of every query and key head."""

    # [T, 1, d]
    cos: Tensor
    # [T, 1, d], negative in its first half
    signed_sin: Tensor


def attention_inputs(
    projected: Tensor,
    shape: HeadShape,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm: HeadNorm | None = None,
    turn: Turn | None = None,
    conv: CachedConv | None = None,
    rows: StepRows | None = None,
) -> Tensor:
    """projected [T, width], or fp32 [splits, T, width] where nothing is convolved, kv_cache [slots + 1, 2, kv_heads,
    d], slot_mapping [T] (-1: the last slot), conv of the channels of all keys and then all values, and the rows of the
    step for it -> queries [T, heads, d].

    Stores keys and values, and what the convolution will want of these rows later.
    """
    num_rows, width = projected.shape[-2:]
    query = kv_cache.new_empty(num_rows, shape.num_heads, shape.head_dim)
    num_all = shape.num_heads + 2 * shape.num_kv_heads
    block_heads = min(_BLOCK_HEADS, triton.next_power_of_2(num_all))
    block_d = triton.next_power_of_2(shape.head_dim)
    assert projected.is_contiguous() and kv_cache.is_contiguous() and slot_mapping.is_contiguous()
    assert conv is None or conv.is_contiguous
    assert turn is None or conv is None, "what a head is paired with would have to be convolved, too"
    assert (conv is None) == (rows is None)
    assert conv is None or num_sums(projected) == 1
    none = projected
    _attention_inputs[(num_rows, triton.cdiv(num_all, block_heads))](
        projected,
        query,
        kv_cache,
        slot_mapping,
        none if norm is None else norm.weight,
        none if turn is None else turn.cos,
        none if turn is None else turn.signed_sin,
        none if conv is None else conv.taps,
        none if conv is None else conv.cache,
        slot_mapping if conv is None else conv.slot_mapping,
        slot_mapping if conv is None else conv.tap_slots,
        slot_mapping if rows is None else rows.query_start_loc,
        len(kv_cache) - 1,
        0 if conv is None else len(conv.cache) - 1,
        0 if rows is None else rows.num_reqs,
        1 if rows is None else rows.max_rows,
        0.0 if norm is None else norm.eps,
        num_rows * width,
        WIDTH=width,
        HEADS=shape.num_heads,
        KV_HEADS=shape.num_kv_heads,
        HEAD_DIM=shape.head_dim,
        BLOCK_HEADS=block_heads,
        BLOCK_D=block_d,
        HAS_NORM=norm is not None,
        HAS_TURN=turn is not None,
        SPLITS=num_sums(projected),
        KERNEL=0 if conv is None else len(conv.taps),
        IS_UNIFORM=rows is None or rows.is_uniform(num_rows),
        **launch_options(projected.device),
        num_warps=min(max(block_heads * block_d // 256, 1), 4),
    )
    return query


def attention_inputs_reference(
    projected: Tensor,
    shape: HeadShape,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    norm: HeadNorm | None = None,
    turn: Turn | None = None,
    conv: CachedConv | None = None,
) -> Tensor:
    """The same in the arithmetic of its inputs."""
    num_rows, d = len(projected), shape.head_dim
    query_width, kv_width = shape.num_heads * d, 2 * shape.num_kv_heads * d
    kv = projected[:, -kv_width:]
    if conv is not None:
        kv = conv_reference(kv, conv)
    heads = torch.cat((projected[:, :query_width], kv), 1).view(num_rows, -1, d)
    turned, values = heads[:, : -shape.num_kv_heads], heads[:, -shape.num_kv_heads :]
    if norm is not None:
        turned = rms_norm_reference(turned, norm.weight, norm.eps)
    if turn is not None:
        turned = turned * turn.cos + turned.roll(d // 2, -1) * turn.signed_sin
    kv_cache[slot_mapping] = torch.stack((turned[:, shape.num_heads :], values), 1)
    return turned[:, : shape.num_heads]


# Index tensors are parts of others and begin wherever: one compiled kernel takes them all.
@triton.jit(
    do_not_specialize=("scratch_slot", "conv_scratch_slot", "num_reqs", "max_rows"),
    do_not_specialize_on_alignment=("slot_mapping", "conv_slot_mapping", "tap_slots", "query_start_loc"),
)
def _attention_inputs(
    projected,
    query,
    kv_cache,
    slot_mapping,
    norm_weight,
    cos,
    signed_sin,
    taps,
    conv_cache,
    conv_slot_mapping,
    tap_slots,
    query_start_loc,
    scratch_slot,
    conv_scratch_slot,
    num_reqs,
    max_rows,
    eps,
    split_stride,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_TURN: tl.constexpr,
    SPLITS: tl.constexpr,
    KERNEL: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """One row, some of its heads: queries, keys, values, in this order."""
    if MAY_OVERLAP:
        # In this order: attention reads lengths and block tables before it waits (see overlap.py).
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    KV_WIDTH: tl.constexpr = 2 * KV_HEADS * HEAD_DIM
    row = tl.program_id(0)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    is_query = head < HEADS
    is_turned = head < HEADS + KV_HEADS
    is_in = (head < HEADS + 2 * KV_HEADS) & (d < HEAD_DIM)
    source = projected + row.to(tl.int64) * WIDTH
    # Keys and values end the row.
    of_kv = head * HEAD_DIM - HEADS * HEAD_DIM
    start = tl.where(is_query, head * HEAD_DIM, of_kv + (WIDTH - KV_WIDTH))
    other_d = (d + HEAD_DIM // 2) % HEAD_DIM
    values = load_sum(source + start + d, is_in, split_stride, SPLITS).to(query.dtype.element_ty).to(tl.float32)
    swapped = values
    if HAS_TURN:
        swapped = load_sum(source + start + other_d, is_in & is_turned, split_stride, SPLITS)
        swapped = swapped.to(query.dtype.element_ty).to(tl.float32)
    if KERNEL > 0:
        offset = offset_in_request(query_start_loc, num_reqs, max_rows, row, IS_UNIFORM)
        is_kv = is_in & (head >= HEADS)
        convolved, own = convolve(
            projected, conv_cache, taps, tap_slots, row, offset, start + d, of_kv + d, is_kv, WIDTH, KV_WIDTH, KERNEL
        )
        values = tl.where(is_query, values, convolved.to(projected.dtype.element_ty).to(tl.float32))
        conv_slot = tl.load(conv_slot_mapping + row)
        conv_slot = tl.where(conv_slot < 0, conv_scratch_slot, conv_slot)
        tl.store(conv_cache + conv_slot * KV_WIDTH + of_kv + d, own, mask=is_kv)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + eps)[:, None]
        weight_row = norm_weight + head * HEAD_DIM
        factor = tl.load(weight_row + d, mask=is_in & is_turned, other=1.0).to(tl.float32)
        values = tl.where(is_turned, values * scale * factor, values)
        if HAS_TURN:
            other_factor = tl.load(weight_row + other_d, mask=is_in & is_turned, other=1.0).to(tl.float32)
            swapped = swapped * scale * other_factor
    if HAS_TURN:
        angle = row.to(tl.int64) * HEAD_DIM + d
        c = tl.load(cos + angle, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        s = tl.load(signed_sin + angle, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
        values = tl.where(is_turned, values * c + swapped * s, values)
    stored = values.to(query.dtype.element_ty)
    tl.store(query + row.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + d, stored, mask=is_in & is_query)
    slot = tl.load(slot_mapping + row)
    slot = tl.where(slot < 0, scratch_slot, slot)
    tl.store(kv_cache + slot * KV_WIDTH + of_kv + d, stored, mask=is_in & (head >= HEADS))
