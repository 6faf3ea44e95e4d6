"""Sampling on a GPU: a token from each row's logits, its noise made where it is used.

The arithmetic of the noise is that of sampling/noise.py, bit by bit up to the logarithms.

Belongs here: argmax, plain or with noise, of rows without filters. Does not belong here: temperatures, thresholds and
drawn drafts (tempered_sampling.py, drawn_verification.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.noise import exponential
from specbench.engine.kernels.overlap import launch_options

#: Logits of one program.
_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class NoiseRows:
    """What the noise of each row depends on; rows at temperature 0 have none."""

    # [R] int64
    keys: Tensor
    # [R] int64
    positions: Tensor
    # [R] fp32
    temperature: Tensor
    #: Of all rows.
    stream: int


def best_ids(logits: Tensor, noise: NoiseRows | None = None) -> Tensor:
    """logits [R, vocab] fp32 -> int64 [R]: the argmax of each row (ties: lowest id), of logit - log(Exp(1) variate)
    where the row has a temperature."""
    return ids_of_bests(best_of_chunks(logits, noise), logits.shape[1])


def ids_of_bests(bests: ChunkBests, num_ids: int) -> Tensor:
    """The second half: int64 [R]."""
    num_rows, num_chunks = bests.values.shape
    ids = torch.empty(num_rows, dtype=torch.int64, device=bests.values.device)
    _best_of_row[(num_rows,)](
        bests.values,
        bests.places,
        ids,
        NUM_IDS=num_ids,
        NUM_CHUNKS=num_chunks,
        BLOCK=triton.next_power_of_2(num_chunks),
        **launch_options(ids.device),
        num_warps=bests_warps(num_chunks),
    )
    return ids


def bests_warps(num_chunks: int) -> int:
    """Of a kernel that does no more than look through them."""
    return 1 if num_chunks <= 128 else 4


@dataclass(frozen=True, slots=True)
class ChunkBests:
    """The best of each part of each row."""

    # [R, chunks] fp32
    values: Tensor
    # [R, chunks] int32, ids; no id where no logit of the part is a number
    places: Tensor


def best_of_chunks(logits: Tensor, noise: NoiseRows | None = None, first_id: int = 0) -> ChunkBests:
    """The first half of `best_ids`. first_id: what the first column is, for noise; places count from 0 anyway."""
    num_rows, num_ids = logits.shape
    num_chunks = triton.cdiv(num_ids, _CHUNK)
    values = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    assert logits.stride(1) == 1
    _best_of_chunk[(num_rows, num_chunks)](
        logits,
        logits if noise is None else noise.keys,
        logits if noise is None else noise.positions,
        logits if noise is None else noise.temperature,
        values,
        places,
        0 if noise is None else noise.stream,
        logits.stride(0),
        num_chunks,
        first_id,
        NUM_IDS=num_ids,
        BLOCK=_CHUNK,
        HAS_NOISE=noise is not None,
        **launch_options(logits.device),
        num_warps=8,
    )
    return ChunkBests(values, places)


@triton.jit(
    do_not_specialize=("stream", "num_chunks", "first_id"),
    do_not_specialize_on_alignment=("keys", "positions", "temperature"),
)
def _best_of_chunk(
    logits,
    keys,
    positions,
    temperature,
    values,
    places,
    stream,
    stride,
    num_chunks,
    first_id,
    NUM_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * stride + ids, mask=ids < NUM_IDS, other=float("-inf"))
    if HAS_NOISE:  # noqa: SIM102
        if tl.load(temperature + row) != 0:
            variate = exponential(tl.load(keys + row), tl.load(positions + row), stream, ids + first_id)
            scores = scores - tl.log(variate)
    best = tl.max(scores, 0)
    place = tl.min(tl.where(scores == best, ids, NUM_IDS), 0)
    tl.store(values + row * num_chunks + chunk, best)
    tl.store(places + row * num_chunks + chunk, place)


@triton.jit
def best_of_bests(values, places, row, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """The best id of one row, int64."""
    chunk = tl.arange(0, BLOCK)
    is_chunk = chunk < NUM_CHUNKS
    value = tl.load(values + row * NUM_CHUNKS + chunk, mask=is_chunk, other=float("-inf"))
    place = tl.load(places + row * NUM_CHUNKS + chunk, mask=is_chunk, other=2147483647)
    best = tl.min(tl.where(value == tl.max(value, 0), place, 2147483647), 0)
    # Logits that are no numbers have no largest: any id that exists will do.
    return tl.where(best >= NUM_IDS, 0, best).to(tl.int64)


@triton.jit
def _best_of_row(
    values,
    places,
    ids,
    NUM_IDS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    tl.store(ids + row, best_of_bests(values, places, row, NUM_IDS, NUM_CHUNKS, BLOCK))
