"""Sampling on GPUs that share a vocabulary: each rank's best id of a row becomes one number, and the largest wins.

Belongs here: that number, and its exchange. Does not belong here: the best of one rank's logits (sampling.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.all_reduce import num_programs, place_of, receive, send
from specbench.engine.kernels.inboxes import EMPTY, Inboxes
from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.sampling import ChunkBests

#: The bits of a key that hold the id.
_ID_MASK = 0x7FFFFFFF


def best_keys(bests: ChunkBests, first_id: int, num_ids: int) -> Tensor:
    """The best of the parts of each row, of this rank's `num_ids` ids from `first_id` on -> int64 [R], whose maximum
    over ranks stands for the best id of all (ties: the lowest)."""
    return _launch(bests, first_id, num_ids, None)


def ids_of_keys(keys: Tensor) -> Tensor:
    """What keys stand for: int64 [R] -> [R]."""
    return _ID_MASK - (keys & _ID_MASK)


def best_ids_over_ranks(bests: ChunkBests, first_id: int, num_ids: int, inboxes: Inboxes) -> Tensor:
    """The best id of each row, int64 [R]. inboxes: of one int64 a row."""
    return _launch(bests, first_id, num_ids, inboxes)


def _launch(bests: ChunkBests, first_id: int, num_ids: int, inboxes: Inboxes | None) -> Tensor:
    num_rows, num_chunks = bests.values.shape
    results = torch.empty(num_rows, dtype=torch.int64, device=bests.values.device)
    assert inboxes is None or inboxes.takes(num_rows, 1, results.element_size())
    _best_of_rows[num_programs(num_rows)](
        bests.values,
        bests.places,
        results,
        first_id,
        num_rows,
        results if inboxes is None else inboxes.addresses,
        results if inboxes is None else inboxes.own,
        results if inboxes is None else inboxes.counts,
        results if inboxes is None else inboxes.is_aborted,
        NUM_IDS=num_ids,
        NUM_CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        ID_MASK=_ID_MASK,
        RANK=0 if inboxes is None else inboxes.rank,
        SIZE=1 if inboxes is None else inboxes.size,
        EMPTY=EMPTY[results.element_size()],
        **launch_options(results.device),
        # Several warps would look at the one number that comes at different times.
        num_warps=1,
    )
    return results


@triton.jit(do_not_specialize=("first_id", "num_rows"))
def _best_of_rows(
    values,
    places,
    results,
    first_id,
    num_rows,
    addresses,
    inbox,
    counts,
    is_aborted,
    NUM_IDS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ID_MASK: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    EMPTY: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.arange(0, BLOCK)
    is_chunk = chunk < NUM_CHUNKS
    for one_row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + one_row
        value = tl.load(values + row * NUM_CHUNKS + chunk, mask=is_chunk, other=float("-inf"))
        place = tl.load(places + row * NUM_CHUNKS + chunk, mask=is_chunk, other=2147483647)
        top = tl.max(value, 0)
        best = tl.min(tl.where(value == top, place, 2147483647), 0)
        # Logits that are no numbers have no largest: any id that exists will do.
        is_number = best < NUM_IDS
        result = _key(tl.where(is_number, top, float("-inf")), tl.where(is_number, best, 0) + first_id, ID_MASK)
        if SIZE > 1:
            largest = _largest_of_ranks(result, addresses, inbox, counts, is_aborted, row, RANK, SIZE, EMPTY)
            result = ID_MASK - (largest & ID_MASK)
        tl.store(results + row, result)


@triton.jit
def _key(value, token_id, ID_MASK: tl.constexpr):
    """An int64 that orders pairs of fp32 and id: the larger value first, of equal ones the lower id."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # minus zero is zero
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) | (ID_MASK - token_id).to(tl.int64)


@triton.jit
def _largest_of_ranks(
    key, addresses, inbox, counts, is_aborted, row, RANK: tl.constexpr, SIZE: tl.constexpr, EMPTY: tl.constexpr
):
    """The largest of all ranks' keys of a row."""
    count = tl.load(counts + row)
    place = place_of(row, count, SIZE, 1)
    one = tl.arange(0, 1)
    is_one = one < 1
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            send(tl.full([1], 0, tl.int64) + key, addresses, inbox, place + RANK + one, is_one, peer)
    for rank in tl.static_range(SIZE):
        if rank != RANK:
            received = receive(inbox + place + rank + one, is_one, is_aborted, EMPTY)
            key = tl.maximum(key, tl.max(received, 0))
    tl.store(counts + row, count + 1)
    return key
