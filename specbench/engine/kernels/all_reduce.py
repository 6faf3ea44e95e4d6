"""Sums over ranks on GPUs that map each other's memory, in one launch each, with what follows a sum.

Belongs here: the exchange between kernels that run on several devices at once, sums over rows, the look-up in a split
table. Does not belong here: how memory is mapped (execution/peer_memory.py), when this is used (layers/parallel.py),
other kernels that exchange something (split_sampling.py, split_conv.py).

Every rank has an inbox with places for each row and each other rank, taken in turn. A row's program writes its own part
into all other inboxes, waits until its own inbox has the others', and adds them up in the order of ranks: in fp32,
rounded once, so that all ranks hold the same bits. A place that nothing has arrived at holds a mark that is no number's
(minus zero; what is sent has plus zero instead), so that the values themselves say that they are there, and no flag has
to wait for them. Whoever has read a place puts the mark back.

A kernel may exchange a row twice, and there are twice as many places: a rank that comes to the same place again has
ended a kernel in between, for which it needed the others' parts, which they sent after their kernel before had ended,
marks included. So kernels follow one another without a barrier, in a graph too. Every rank must make the same calls in
the same order. A row's program waits for none but the same row's, and no launch has more programs than a device runs at
once: each has several rows, one after the other.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.few_rows import load_sum, num_sums
from specbench.engine.kernels.inboxes import EMPTY, NUM_PLACES, Inboxes, OwnIds
from specbench.engine.kernels.overlap import launch_options

_NUM_PLACES = tl.constexpr(NUM_PLACES)
#: Of a launch; a device runs at least two a multiprocessor.
_MAX_PROGRAMS = 256


def sum_rows(x: Tensor, inboxes: Inboxes) -> Tensor:
    """The sum over ranks of x [T, width], rounded to its type."""
    summed = torch.empty_like(x)
    _launch(x, None, None, None, summed, summed, 0.0, inboxes)
    return summed


def sum_add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, inboxes: Inboxes) -> tuple[Tensor, Tensor]:
    """residual + the sum over ranks of x, both rounded to the residual's type, and the RMSNorm of that; all [T, width],
    x also fp32 [splits, T, width], whose sum over splits is rounded before it is sent."""
    summed, normed = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, None, residual, weight, summed, normed, eps, inboxes)
    return summed, normed


def look_up(table: Tensor, token_ids: Tensor, own_ids: OwnIds) -> Tensor:
    """Rows of a table of which this rank has some: table [ids, width], token_ids [T] int64 -> [T, width]."""
    rows = torch.empty(len(token_ids), table.shape[1], dtype=table.dtype, device=table.device)
    _launch(table, token_ids.contiguous(), None, None, rows, rows, 0.0, own_ids.inboxes, own_ids.first)
    return rows


def sum_reference(parts: list[Tensor]) -> Tensor:
    """The sum of all ranks' parts, made in one place."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part
    return total.to(parts[0].dtype)


def sum_add_norm_reference(parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The same of all ranks' parts, in one place."""
    summed = residual + sum_reference(parts)
    wide = summed.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return summed, normed.to(residual.dtype)


def _launch(
    x: Tensor,
    token_ids: Tensor | None,
    residual: Tensor | None,
    weight: Tensor | None,
    summed: Tensor,
    normed: Tensor,
    eps: float,
    inboxes: Inboxes,
    first_id: int = 0,
) -> None:
    num_rows, width = summed.shape
    assert inboxes.takes(num_rows, width, summed.element_size())
    assert x.is_contiguous() and (residual is None or residual.is_contiguous())
    block = triton.next_power_of_2(width)
    _sum_rows[num_programs(num_rows)](
        x,
        x if token_ids is None else token_ids,
        x if residual is None else residual,
        x if weight is None else weight,
        summed,
        normed,
        inboxes.addresses,
        inboxes.own,
        inboxes.counts,
        inboxes.is_aborted,
        first_id,
        len(x),
        num_rows,
        summed.numel(),
        eps,
        WIDTH=width,
        CAPACITY=inboxes.own.shape[3],
        BLOCK=block,
        RANK=inboxes.rank,
        SIZE=inboxes.size,
        EMPTY=EMPTY[summed.element_size()],
        SPLITS=num_sums(x),
        LOOKS_UP=token_ids is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=weight is not None,
        **launch_options(x.device),
        num_warps=num_warps(block),
    )


def num_programs(num_rows: int) -> tuple[int]:
    """Of a launch over so many rows."""
    return (min(num_rows, _MAX_PROGRAMS),)


def num_warps(block: int) -> int:
    """Of a program with `block` values."""
    return min(max(block // 512, 1), 16)


@triton.jit
def place_of(row, count, SIZE: tl.constexpr, CAPACITY: tl.constexpr):
    """Where a row's next exchange is, from an inbox's start."""
    return (row * _NUM_PLACES + count % _NUM_PLACES) * (SIZE * CAPACITY)


@triton.jit
def bits_of(values, inbox, EMPTY: tl.constexpr):
    """What is sent of numbers: their bits, of which none is the mark."""
    bits = values.to(inbox.dtype.element_ty, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits).to(inbox.dtype.element_ty)


@triton.jit
def send(bits, addresses, inbox, place, is_sent, peer):
    """Write to `place` of another rank's inbox. inbox: any pointer of its type."""
    theirs = tl.load(addresses + peer).to(tl.pointer_type(inbox.dtype.element_ty))
    tl.store(tl.multiple_of(theirs, 16) + place, bits, mask=is_sent)


@triton.jit
def _num_awaited(bits, is_aborted, EMPTY: tl.constexpr):
    """Numbers that have not come, none once nobody is waited for: the same for all threads, whatever each has read."""
    is_waiting = tl.load(is_aborted, volatile=True) == 0
    return tl.sum(((bits == EMPTY) & is_waiting).to(tl.int32), 0)


@triton.jit
def receive(source, is_expected, is_aborted, EMPTY: tl.constexpr):
    """What was sent to a place of this rank's inbox, as soon as all of it is there; the place is marked empty again."""
    bits = tl.load(source, mask=is_expected, other=0, volatile=True)
    while _num_awaited(bits, is_aborted, EMPTY) > 0:
        bits = tl.load(source, mask=is_expected, other=0, volatile=True)
    tl.store(source, tl.full(bits.shape, EMPTY, bits.dtype), mask=is_expected)
    return bits


@triton.jit
def sum_over_ranks(
    own, addresses, inbox, counts, is_aborted, row, column, is_column,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr,
):  # fmt: skip
    """The sum of all ranks' values of one row, fp32: every rank's program of this row calls it at the same time."""
    count = tl.load(counts + row)
    bits = bits_of(own, inbox, EMPTY)
    place = place_of(row, count, SIZE, CAPACITY)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            send(bits, addresses, inbox, place + RANK * CAPACITY + column, is_column, peer)
    total = tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            total += bits.to(own.dtype, bitcast=True).to(tl.float32)
        else:
            received = receive(inbox + place + rank * CAPACITY + column, is_column, is_aborted, EMPTY)
            total += received.to(own.dtype, bitcast=True).to(tl.float32)
    tl.store(counts + row, count + 1)
    return total


@triton.jit(do_not_specialize=("first_id", "num_ids", "num_rows"), do_not_specialize_on_alignment=("token_ids",))
def _sum_rows(
    x, token_ids, residual, weight, summed, normed, addresses, inbox, counts, is_aborted,
    first_id, num_ids, num_rows, split_stride, eps,
    WIDTH: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    EMPTY: tl.constexpr,
    SPLITS: tl.constexpr,
    LOOKS_UP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    factor = tl.zeros([BLOCK], tl.float32)
    if HAS_NORM:
        factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_wait()
    for one_row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + one_row
        start = row * WIDTH
        source_row = row
        is_here = is_column
        if LOOKS_UP:
            source_row = tl.load(token_ids + row) - first_id
            is_here = is_column & (source_row >= 0) & (source_row < num_ids)
        own = load_sum(x + source_row * WIDTH + column, is_here, split_stride, SPLITS).to(summed.dtype.element_ty)
        # What does not come from others is asked for before they are waited for.
        before = tl.zeros([BLOCK], own.dtype)
        if HAS_RESIDUAL:
            before = tl.load(residual + start + column, mask=is_column, other=0.0)
        total = sum_over_ranks(
            own, addresses, inbox, counts, is_aborted, row, column, is_column, CAPACITY, RANK, SIZE, EMPTY
        )
        values = total.to(own.dtype)
        if HAS_RESIDUAL:
            values = (before.to(tl.float32) + values.to(tl.float32)).to(own.dtype)
        tl.store(summed + start + column, values, mask=is_column)
        if HAS_NORM:
            wide = values.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
            tl.store(normed + start + column, (wide * scale * factor).to(own.dtype), mask=is_column)
