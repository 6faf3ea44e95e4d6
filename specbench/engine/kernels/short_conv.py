"""Short causal convolution on a GPU over a position-addressed cache, with the addition and the norm behind it.

A row's taps that belong to the same step come from the step's own rows: another program writes them to the cache at the
same time. Older ones come from the cache.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.norm import rms_norm_reference
from specbench.engine.kernels.step_rows import StepRows, offset_in_request


def conv_add_norm(
    x: Tensor,
    residual: Tensor,
    taps: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    tap_slots: Tensor,
    rows: StepRows,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """x, residual [T, channels], taps [kernel, channels] fp32 with the newest last, cache [slots + 1, channels],
    slot_mapping [T] (-1: the last slot), tap_slots [T * kernel] -> residual + convolution, and its norm.

    Stores x in the cache.
    """
    num_rows, channels = x.shape
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    assert x.is_contiguous() and residual.is_contiguous() and cache.is_contiguous() and taps.is_contiguous()
    block = triton.next_power_of_2(channels)
    _conv_add_norm_row[(num_rows,)](
        x,
        residual,
        taps,
        cache,
        slot_mapping,
        tap_slots,
        rows.query_start_loc,
        norm_weight,
        summed,
        normed,
        len(cache) - 1,
        rows.num_reqs,
        rows.max_rows,
        eps,
        CHANNELS=channels,
        BLOCK=block,
        KERNEL=len(taps),
        IS_UNIFORM=rows.is_uniform(num_rows),
        num_warps=min(max(block // 512, 1), 16),
    )
    return summed, normed


def conv_reference(x: Tensor, taps: Tensor, cache: Tensor, slot_mapping: Tensor, tap_slots: Tensor) -> Tensor:
    """The convolution alone: store first, then read every tap from the cache."""
    cache[slot_mapping] = x
    return (cache[tap_slots].view(len(x), len(taps), -1) * taps).sum(1).to(x.dtype)


def conv_add_norm_reference(
    x: Tensor,
    residual: Tensor,
    taps: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    tap_slots: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The same in the arithmetic of its inputs."""
    summed = residual + conv_reference(x, taps, cache, slot_mapping, tap_slots)
    return summed, rms_norm_reference(summed, norm_weight, eps)


@triton.jit
def convolve(
    rows_of_step, cache, taps, tap_slots, row, offset, place, channel, is_channel,
    ROW_STRIDE, CHANNELS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """fp32 sum over the taps of one row, and the row's own input. `place` of a channel in a row of the step may differ
    from its place in the cache."""
    own = tl.load(rows_of_step + row.to(tl.int64) * ROW_STRIDE + place, mask=is_channel, other=0.0)
    total = own.to(tl.float32) * tl.load(taps + (KERNEL - 1) * CHANNELS + channel, mask=is_channel, other=0.0)
    for age in tl.static_range(1, KERNEL):
        is_in_step = offset >= age
        slot = tl.load(tap_slots + row.to(tl.int64) * KERNEL + (KERNEL - 1 - age))
        newer = tl.load(
            rows_of_step + (row - age).to(tl.int64) * ROW_STRIDE + place, mask=is_channel & is_in_step, other=0.0
        )
        older = tl.load(cache + slot * CHANNELS + channel, mask=is_channel & (offset < age), other=0.0)
        tap = tl.load(taps + (KERNEL - 1 - age) * CHANNELS + channel, mask=is_channel, other=0.0)
        total += (newer.to(tl.float32) + older.to(tl.float32)) * tap
    return total, own


@triton.jit(do_not_specialize=("scratch_slot", "num_reqs", "max_rows"))
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
    scratch_slot,
    num_reqs,
    max_rows,
    eps,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
):
    row = tl.program_id(0)
    channel = tl.arange(0, BLOCK)
    is_channel = channel < CHANNELS
    offset = offset_in_request(query_start_loc, num_reqs, max_rows, row, IS_UNIFORM)
    total, own = convolve(
        x, cache, taps, tap_slots, row, offset, channel, channel, is_channel, CHANNELS, CHANNELS, KERNEL
    )
    slot = tl.load(slot_mapping + row)
    slot = tl.where(slot < 0, scratch_slot, slot)
    tl.store(cache + slot * CHANNELS + channel, own, mask=is_channel)
    start = row.to(tl.int64) * CHANNELS
    before = tl.load(residual + start + channel, mask=is_channel, other=0.0)
    added = total.to(before.dtype).to(tl.float32) + before.to(tl.float32)
    values = added.to(before.dtype)
    tl.store(summed + start + channel, values, mask=is_channel)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / CHANNELS + eps)
    factor = tl.load(norm_weight + channel, mask=is_channel, other=0.0).to(tl.float32)
    tl.store(normed + start + channel, (wide * scale * factor).to(before.dtype), mask=is_channel)
