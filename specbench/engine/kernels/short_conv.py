"""Short causal convolution on a GPU over a position-addressed cache, with the addition and the norm behind it.

A row's taps that belong to the same step come from the step's own rows: another program writes them to the cache at the
same time. Older ones come from the cache.

Belongs here: one rank's channels, all of them here. Does not belong here: channels that ranks share (split_conv.py),
keys' and values' convolution (attention_inputs.py).
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
from specbench.engine.kernels.step_rows import StepRows

#: Channels of a row that one warp takes: of few rows, and of more than so many.
_WARP_CHANNELS, _WARP_CHANNELS_OF_MANY, _FEW_ROWS = 512, 128, 64


@dataclass(frozen=True, slots=True)
class CachedConv:
    """A convolution, and where the step's rows lie in its cache."""

    # [kernel, channels] fp32, newest last
    taps: Tensor
    # [slots + 1, channels]
    cache: Tensor
    # [T] int64, -1: the last slot
    slot_mapping: Tensor
    # [T * kernel] int64, oldest first
    tap_slots: Tensor

    @property
    def is_contiguous(self) -> bool:
        """Whether a kernel can walk over all of it."""
        return all(part.is_contiguous() for part in (self.taps, self.cache, self.slot_mapping, self.tap_slots))


@dataclass(frozen=True, slots=True)
class PickedRows:
    """One row of each request, which is wanted apart from the others, too. Requests have equally many rows."""

    # [num_reqs] int64, rows of the step; a request without rows that live may name one of another
    rows: Tensor
    # [num_reqs, channels], filled where the row is the request's own
    output: Tensor


def conv_add_norm(
    x: Tensor,
    residual: Tensor,
    conv: CachedConv,
    rows: StepRows,
    norm_weight: Tensor | None,
    eps: float,
    picked: PickedRows | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T, channels], or fp32 [splits, T, channels], residual [T, channels] -> residual + convolution of x, and the
    norm of that (itself without a weight), of which rows are picked.

    Stores x in the cache.
    """
    num_rows, channels = residual.shape
    assert picked is None or (rows.is_uniform(num_rows) and picked.output.is_contiguous())
    summed = torch.empty_like(residual)
    normed = summed if norm_weight is None else torch.empty_like(residual)
    assert x.is_contiguous() and residual.is_contiguous() and conv.is_contiguous
    block = triton.next_power_of_2(channels)
    _conv_add_norm_row[(num_rows,)](
        x,
        residual,
        conv.taps,
        conv.cache,
        conv.slot_mapping,
        conv.tap_slots,
        rows.query_start_loc,
        residual if norm_weight is None else norm_weight,
        summed,
        normed,
        conv.slot_mapping if picked is None else picked.rows,
        summed if picked is None else picked.output,
        len(conv.cache) - 1,
        rows.num_reqs,
        rows.max_rows,
        num_rows * channels,
        eps,
        CHANNELS=channels,
        BLOCK=block,
        KERNEL=len(conv.taps),
        SPLITS=num_sums(x),
        HAS_NORM=norm_weight is not None,
        HAS_PICKED=picked is not None,
        IS_UNIFORM=rows.is_uniform(num_rows),
        **launch_options(x.device),
        num_warps=min(max(block // (_WARP_CHANNELS if num_rows <= _FEW_ROWS else _WARP_CHANNELS_OF_MANY), 1), 16),
    )
    return summed, normed


def conv_reference(x: Tensor, conv: CachedConv) -> Tensor:
    """The convolution alone: store first, then read every tap from the cache."""
    conv.cache[conv.slot_mapping] = x
    return (conv.cache[conv.tap_slots].view(len(x), len(conv.taps), -1) * conv.taps).sum(1).to(x.dtype)


def conv_add_norm_reference(
    x: Tensor, residual: Tensor, conv: CachedConv, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """The same in the arithmetic of its inputs."""
    summed = residual + conv_reference(x, conv)
    return summed, summed if norm_weight is None else rms_norm_reference(summed, norm_weight, eps)


@triton.jit
def offset_in_request(query_start_loc, num_reqs, max_rows, row, IS_UNIFORM: tl.constexpr):
    """Rows of the same request before this one in the step."""
    if IS_UNIFORM:
        offset = row % max_rows
    else:
        low = 0
        high = num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            is_after = tl.load(query_start_loc + middle) > row
            high = tl.where(is_after, middle, high)
            low = tl.where(is_after, low, middle)
        offset = row - tl.load(query_start_loc + low)
    return offset


@triton.jit
def convolve(
    rows_of_step, cache, taps, tap_slots, row, offset, place, channel, is_channel,
    ROW_STRIDE, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, split_stride=0, SPLITS: tl.constexpr = 1,
):  # fmt: skip
    """fp32 sum over the taps of one row, and the row's own input. `place` of a channel in a row of the step may differ
    from its place in the cache. Rows of the step may be partial sums."""
    of_row = rows_of_step + row.to(tl.int64) * ROW_STRIDE + place
    own = load_sum(of_row, is_channel, split_stride, SPLITS).to(cache.dtype.element_ty)
    total = own.to(tl.float32) * tl.load(taps + (KERNEL - 1) * CHANNELS + channel, mask=is_channel, other=0.0)
    for age in tl.static_range(1, KERNEL):
        is_in_step = offset >= age
        slot = tl.load(tap_slots + row.to(tl.int64) * KERNEL + (KERNEL - 1 - age))
        newer = load_sum(of_row - age * ROW_STRIDE, is_channel & is_in_step, split_stride, SPLITS)
        newer = newer.to(cache.dtype.element_ty)
        older = tl.load(cache + slot * CHANNELS + channel, mask=is_channel & (offset < age), other=0.0)
        tap = tl.load(taps + (KERNEL - 1 - age) * CHANNELS + channel, mask=is_channel, other=0.0)
        total += (newer.to(tl.float32) + older.to(tl.float32)) * tap
    return total, own


# Index tensors are parts of others and begin wherever: one compiled kernel takes them all.
@triton.jit(
    do_not_specialize=("scratch_slot", "num_reqs", "max_rows"),
    do_not_specialize_on_alignment=("slot_mapping", "tap_slots", "query_start_loc", "picked_rows"),
)
def _conv_add_norm_row(
    x,
    residual,
    taps,
    cache,
    slot_mapping,
    tap_slots,
    query_start_loc,
    norm_weight,
    summed,
    normed,
    picked_rows,
    picked,
    scratch_slot,
    num_reqs,
    max_rows,
    split_stride,
    eps,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_PICKED: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    offset = offset_in_request(query_start_loc, num_reqs, max_rows, row, IS_UNIFORM)
    total, own = convolve(
        x, cache, taps, tap_slots, row, offset, channel, channel, is_channel, CHANNELS, CHANNELS, KERNEL,
        split_stride, SPLITS,
    )  # fmt: skip
    slot = tl.load(slot_mapping + row)
    slot = tl.where(slot < 0, scratch_slot, slot)
    tl.store(cache + slot * CHANNELS + channel, own, mask=is_channel)
    start = row.to(tl.int64) * CHANNELS
    before = tl.load(residual + start + channel, mask=is_channel, other=0.0)
    added = total.to(before.dtype).to(tl.float32) + before.to(tl.float32)
    values = added.to(before.dtype)
    tl.store(summed + start + channel, values, mask=is_channel)
    if HAS_NORM:
        wide = values.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / CHANNELS + eps)
        factor = tl.load(norm_weight + channel, mask=is_channel, other=0.0).to(tl.float32)
        values = (wide * scale * factor).to(before.dtype)
        tl.store(normed + start + channel, values, mask=is_channel)
    if HAS_PICKED:
        request = row // max_rows
        is_picked = tl.load(picked_rows + request) == row
        tl.store(picked + request.to(tl.int64) * CHANNELS + channel, values, mask=is_channel & is_picked)
