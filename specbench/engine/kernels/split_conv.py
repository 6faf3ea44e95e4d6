"""The short convolution of channels that ranks share, with what comes before and behind it, in one launch or two.

Belongs here: the sum over ranks of the channels that a rank convolves; the convolution, its result handed to all ranks,
the addition and the norm. Does not belong here: the exchange (all_reduce.py), the convolution itself (short_conv.py).

A row's convolution reads the sums of the rows before it, which other programs make: two launches. Where each request
has one row, its older inputs are in the cache, and it is one.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.all_reduce import bits_of, num_programs, num_warps, place_of, receive, send
from specbench.engine.kernels.inboxes import EMPTY, Inboxes
from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.short_conv import CachedConv, convolve, offset_in_request
from specbench.engine.kernels.step_rows import StepRows


def sum_own_channels(x: Tensor, inboxes: Inboxes) -> Tensor:
    """x [T, channels] -> [T, channels / size]: of the sum over ranks those that are this rank's."""
    num_rows, channels = x.shape
    assert x.is_contiguous() and inboxes.takes(num_rows, channels, x.element_size())
    share = channels // inboxes.size
    own = x.new_empty(num_rows, share)
    block = triton.next_power_of_2(share)
    _sum_own_channels[num_programs(num_rows)](
        x,
        own,
        inboxes.addresses,
        inboxes.own,
        inboxes.counts,
        inboxes.is_aborted,
        num_rows,
        SHARE=share,
        CAPACITY=inboxes.own.shape[3],
        BLOCK=block,
        RANK=inboxes.rank,
        SIZE=inboxes.size,
        EMPTY=EMPTY[x.element_size()],
        **launch_options(x.device),
        num_warps=num_warps(block),
    )
    return own


def split_conv_add_norm(
    x: Tensor,
    residual: Tensor,
    conv: CachedConv,
    rows: StepRows,
    norm_weight: Tensor | None,
    eps: float,
    inboxes: Inboxes,
) -> tuple[Tensor, Tensor]:
    """x [T, channels / size] of each rank, residual [T, channels] -> residual + convolution of all ranks' x, and the
    norm of that (itself without a weight), [T, channels].

    Stores this rank's x in its cache. Where each request has one row, x may have all channels, and its sum over ranks
    is convolved.
    """
    num_rows, channels = residual.shape
    share = channels // inboxes.size
    is_summed = x.shape[1] != share
    assert not is_summed or can_sum(rows, num_rows)
    summed = torch.empty_like(residual)
    normed = summed if norm_weight is None else torch.empty_like(residual)
    assert x.is_contiguous() and residual.is_contiguous() and conv.is_contiguous
    assert inboxes.takes(num_rows, channels, x.element_size())
    block = triton.next_power_of_2(channels)
    _split_conv_add_norm[num_programs(num_rows)](
        x,
        residual,
        conv.taps,
        conv.cache,
        conv.slot_mapping,
        conv.tap_slots,
        rows.query_start_loc,
        x if norm_weight is None else norm_weight,
        summed,
        normed,
        inboxes.addresses,
        inboxes.own,
        inboxes.counts,
        inboxes.is_aborted,
        len(conv.cache) - 1,
        rows.num_reqs,
        rows.max_rows,
        num_rows,
        eps,
        SHARE=share,
        CHANNELS=channels,
        CAPACITY=inboxes.own.shape[3],
        SHARE_BLOCK=triton.next_power_of_2(share),
        BLOCK=block,
        KERNEL=len(conv.taps),
        RANK=inboxes.rank,
        SIZE=inboxes.size,
        EMPTY=EMPTY[x.element_size()],
        HAS_NORM=norm_weight is not None,
        IS_UNIFORM=rows.is_uniform(num_rows),
        IS_SUMMED=is_summed,
        **launch_options(x.device),
        num_warps=num_warps(block),
    )
    return summed, normed


def can_sum(rows: StepRows, num_rows: int) -> bool:
    """Whether `split_conv_add_norm` takes what is not summed yet."""
    return rows.max_rows == 1 and rows.is_uniform(num_rows)


@triton.jit
def _sum_share(
    x, addresses, inbox, is_aborted, place, row, column, is_column,
    SHARE: tl.constexpr, CAPACITY: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """Of one row, the sum over ranks of this rank's channels, rounded to their type."""
    source = x + row * (SIZE * SHARE) + column
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = bits_of(tl.load(source + peer * SHARE, mask=is_column, other=0.0), inbox, EMPTY)
            send(theirs, addresses, inbox, place + RANK * CAPACITY + column, is_column, peer)
    mine = bits_of(tl.load(source + RANK * SHARE, mask=is_column, other=0.0), inbox, EMPTY)
    total = tl.zeros(mine.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += mine.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            received = receive(inbox + place + rank * CAPACITY + column, is_column, is_aborted, EMPTY)
            total += received.to(x.dtype.element_ty, bitcast=True).to(tl.float32)
    return total.to(x.dtype.element_ty)


@triton.jit
def _convolve_one(own, cache, taps, tap_slots, row, channel, is_channel, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """`convolve` of a request's only row."""
    total = own.to(tl.float32) * tl.load(taps + (KERNEL - 1) * CHANNELS + channel, mask=is_channel, other=0.0)
    for age in tl.static_range(1, KERNEL):
        slot = tl.load(tap_slots + row * KERNEL + (KERNEL - 1 - age))
        older = tl.load(cache + slot * CHANNELS + channel, mask=is_channel, other=0.0)
        tap = tl.load(taps + (KERNEL - 1 - age) * CHANNELS + channel, mask=is_channel, other=0.0)
        total += older.to(tl.float32) * tap
    return total


@triton.jit(do_not_specialize=("num_rows",))
def _sum_own_channels(
    x, own, addresses, inbox, counts, is_aborted, num_rows,
    SHARE: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    EMPTY: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_column = column < SHARE
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for one_row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + one_row
        count = tl.load(counts + row)
        place = place_of(row, count, SIZE, CAPACITY)
        total = _sum_share(
            x, addresses, inbox, is_aborted, place, row, column, is_column, SHARE, CAPACITY, RANK, SIZE, EMPTY
        )
        tl.store(counts + row, count + 1)
        tl.store(own + row * SHARE + column, total, mask=is_column)


# Index tensors are parts of others and begin wherever: one compiled kernel takes them all.
@triton.jit(
    do_not_specialize=("scratch_slot", "num_reqs", "max_rows", "num_rows"),
    do_not_specialize_on_alignment=("slot_mapping", "tap_slots", "query_start_loc"),
)
def _split_conv_add_norm(
    x, residual, taps, cache, slot_mapping, tap_slots, query_start_loc, norm_weight, summed, normed,
    addresses, inbox, counts, is_aborted, scratch_slot, num_reqs, max_rows, num_rows, eps,
    SHARE: tl.constexpr,
    CHANNELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SHARE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    EMPTY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    IS_SUMMED: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_column = column < CHANNELS
    channel = tl.arange(0, SHARE_BLOCK)
    is_channel = channel < SHARE
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    factor = tl.zeros([BLOCK], tl.float32)
    if HAS_NORM:
        factor = tl.load(norm_weight + column, mask=is_column, other=0.0).to(tl.float32)
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_wait()
    for one_row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + one_row
        count = tl.load(counts + row)
        if IS_SUMMED:
            place = place_of(row, count, SIZE, CAPACITY)
            own = _sum_share(
                x, addresses, inbox, is_aborted, place, row, channel, is_channel, SHARE, CAPACITY, RANK, SIZE, EMPTY
            )
            count += 1
            total = _convolve_one(own, cache, taps, tap_slots, row, channel, is_channel, SHARE, KERNEL)
        else:
            offset = offset_in_request(query_start_loc, num_reqs, max_rows, row, IS_UNIFORM)
            total, own = convolve(
                x, cache, taps, tap_slots, row, offset, channel, channel, is_channel, SHARE, SHARE, KERNEL
            )
        place = place_of(row, count, SIZE, CAPACITY)
        bits = bits_of(total.to(own.dtype), inbox, EMPTY)
        # To this rank's inbox, too, so that a whole row lies in one.
        for peer in tl.static_range(SIZE):
            send(bits, addresses, inbox, place + RANK * SHARE + channel, is_channel, peer)
        slot = tl.load(slot_mapping + row)
        slot = tl.where(slot < 0, scratch_slot, slot)
        tl.store(cache + slot * SHARE + channel, own, mask=is_channel)
        start = row * CHANNELS
        before = tl.load(residual + start + column, mask=is_column, other=0.0)
        received = receive(inbox + place + column, is_column, is_aborted, EMPTY)
        tl.store(counts + row, count + 1)
        added = received.to(before.dtype, bitcast=True).to(tl.float32) + before.to(tl.float32)
        values = added.to(before.dtype)
        tl.store(summed + start + column, values, mask=is_column)
        if HAS_NORM:
            wide = values.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / CHANNELS + eps)
            tl.store(normed + start + column, (wide * scale * factor).to(before.dtype), mask=is_column)
