"""A token from each row's logits at its temperature, in one read of them: scaled, cut, scored and compared where they
are, and nothing is written back.

Belongs here: the draw from a row that stands alone, the target's (sampling/sampler.py is the reference) or a drafter's
(sampling/drafting.py), whose law is kept. Does not belong here: draws that depend on what was accepted
(drawn_verification.py), greedy rows alone (sampling.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.noise import exponential, rough_exponential_of, rough_log, uniform
from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.sampling import NoiseRows

#: Logits of one program.
_CHUNK = 4096
#: Ids whose rough scores are closer than this are scored exactly; a rough one is within a tenth of it.
_NEAR: tl.constexpr = tl.constexpr(0.001)


def tempered_ids(logits: Tensor, noise: NoiseRows, threshold: Tensor | None = None) -> Tensor:
    """logits [R, vocab] fp32, before temperature -> int64 [R]: argmax of logit / temperature - log(Exp(1) variate), or
    of the logits of a greedy row; ties to the lowest id. A logit over temperature is its product with the rounded
    reciprocal.

    threshold [R] fp32: ids whose logit over temperature is less are out; not of greedy rows.
    """
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    assert threshold is None or threshold.is_contiguous()
    num_rows, num_ids = logits.shape
    num_chunks = triton.cdiv(num_ids, _CHUNK)
    scores = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    _score_chunk[(num_rows, num_chunks)](
        logits, logits.stride(0), noise.keys, noise.temperature, noise.positions, noise.stream,
        scores if threshold is None else threshold, scores, places,
        NUM_IDS=num_ids, NUM_CHUNKS=num_chunks, BLOCK=_CHUNK, HAS_THRESHOLD=threshold is not None,
        IS_FAST=logits.is_cuda, **options, num_warps=8,
    )  # fmt: skip
    _best_of_chunks[(num_rows,)](
        scores, places, ids,
        NUM_IDS=num_ids, NUM_CHUNKS=num_chunks, BLOCK=triton.next_power_of_2(num_chunks), **options, num_warps=1,
    )  # fmt: skip
    return ids


def draw_drafts(logits: Tensor, noise: NoiseRows, probabilities: Tensor, law_rows: Tensor, index: int) -> Tensor:
    """Draft `index` of every request, int64 [R], and the law that it is drawn from: the softmax of logits [R, vocab]
    fp32 over temperature (the logits' own of a greedy request), into probabilities [any, k, vocab] fp32 at
    [law_rows, index].

    law_rows: [R] int64, no two the same but for rows that nobody reads.
    """
    assert logits.stride(1) == 1 and logits.dtype == torch.float32 and probabilities.is_contiguous()
    num_rows, num_ids = logits.shape
    assert num_ids == probabilities.shape[2]
    num_chunks = triton.cdiv(num_ids, _CHUNK)
    new = torch.empty
    scores, largest, totals = new(3, num_rows, num_chunks, dtype=torch.float32, device=logits.device).unbind(0)
    places = new(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    ids = new(num_rows, dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    shape = {"NUM_IDS": num_ids, "NUM_CHUNKS": num_chunks, "BLOCK": _CHUNK}
    _score_and_sum_chunk[(num_rows, num_chunks)](
        logits, logits.stride(0), noise.keys, noise.temperature, noise.positions, noise.stream,
        scores, places, largest, totals, **shape, IS_FAST=logits.is_cuda, **options, num_warps=8,
    )  # fmt: skip
    _write_law[(num_rows, num_chunks)](
        logits, logits.stride(0), noise.temperature, scores, places, largest, totals, law_rows, index,
        probabilities, probabilities.shape[1], ids, ROWS=triton.next_power_of_2(num_chunks), **shape, **options,
        num_warps=8,
    )  # fmt: skip
    return ids


@triton.jit
def _factor_of(divisor):
    """What logits are multiplied by instead of divided."""
    return tl.div_rn(1.0, tl.where(divisor == 0, 1.0, divisor))


@triton.jit
def _store_drawn(
    logits, x, ids, factor, key, position, stream, score_at, place_at, NUM_IDS: tl.constexpr, IS_FAST: tl.constexpr
):
    """The best of a chunk's logits over temperature with their noise. Scores of all ids are made roughly, and exactly
    one by one of those near the best: hardly ever more than one."""
    u = uniform(key, position, stream, ids)
    rough = x - rough_log(rough_exponential_of(u, IS_FAST), IS_FAST)
    best = tl.max(rough, 0)
    least = tl.where(best > float("-inf"), best - _NEAR, float("inf"))
    place = tl.min(tl.where(rough >= least, ids, NUM_IDS), 0)
    best = float("-inf")
    best_place = NUM_IDS
    while place < NUM_IDS:
        score = tl.load(logits + place) * factor - tl.log(exponential(key, position, stream, place))
        best_place = tl.where(score > best, place, best_place)
        best = tl.maximum(score, best)
        place = tl.min(tl.where((rough >= least) & (ids > place), ids, NUM_IDS), 0)
    tl.store(score_at, best)
    tl.store(place_at, best_place)


@triton.jit
def _store_best(scores, ids, score_at, place_at, NUM_IDS: tl.constexpr):
    best = tl.max(scores, 0)
    tl.store(score_at, best)
    tl.store(place_at, tl.min(tl.where(scores == best, ids, NUM_IDS), 0))


@triton.jit
def _best_place(scores, places, is_chunk, NUM_IDS: tl.constexpr):
    """Of the best of chunks, the best id (ties: the lowest)."""
    best = tl.max(tl.where(is_chunk, scores, float("-inf")), 0)
    place = tl.min(tl.where(is_chunk & (scores == best), places, NUM_IDS), 0)
    # Logits that are no numbers have no largest: any id that exists will do.
    return tl.where(place >= NUM_IDS, 0, place)


@triton.jit(
    do_not_specialize=("stream",),
    do_not_specialize_on_alignment=("keys", "temperature", "positions", "threshold"),
)
def _score_chunk(
    logits, stride, keys, temperature, positions, stream, threshold, scores, places,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    IS_FAST: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < NUM_IDS, other=float("-inf"))
    divisor = tl.load(temperature + row)
    of_chunk = row * NUM_CHUNKS + chunk
    if divisor == 0:
        _store_best(x, ids, scores + of_chunk, places + of_chunk, NUM_IDS)
        return
    factor = _factor_of(divisor)
    x = x * factor
    if HAS_THRESHOLD:
        x = tl.where(x >= tl.load(threshold + row), x, float("-inf"))
    key, position = tl.load(keys + row), tl.load(positions + row)
    _store_drawn(
        logits + row * stride, x, ids, factor, key, position, stream, scores + of_chunk, places + of_chunk,
        NUM_IDS, IS_FAST,
    )  # fmt: skip


@triton.jit
def _best_of_chunks(
    scores, places, ids,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    is_chunk = chunk < NUM_CHUNKS
    score = tl.load(scores + row * NUM_CHUNKS + chunk, mask=is_chunk, other=float("-inf"))
    place = tl.load(places + row * NUM_CHUNKS + chunk, mask=is_chunk, other=NUM_IDS)
    tl.store(ids + row, _best_place(score, place, is_chunk, NUM_IDS).to(tl.int64))


@triton.jit(
    do_not_specialize=("stream",),
    do_not_specialize_on_alignment=("keys", "temperature", "positions", "scores", "largest", "totals"),
)
def _score_and_sum_chunk(
    logits, stride, keys, temperature, positions, stream, scores, places, largest, totals,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, IS_FAST: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < NUM_IDS, other=float("-inf"))
    divisor = tl.load(temperature + row)
    factor = _factor_of(divisor)
    x = x * factor
    top = tl.max(x, 0)
    of_chunk = row * NUM_CHUNKS + chunk
    tl.store(largest + of_chunk, top)
    tl.store(totals + of_chunk, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0))
    if divisor == 0:
        _store_best(x, ids, scores + of_chunk, places + of_chunk, NUM_IDS)
        return
    key, position = tl.load(keys + row), tl.load(positions + row)
    _store_drawn(
        logits + row * stride, x, ids, factor, key, position, stream, scores + of_chunk, places + of_chunk,
        NUM_IDS, IS_FAST,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("index", "num_laws"),
    do_not_specialize_on_alignment=("temperature", "scores", "largest", "totals", "law_rows"),
)
def _write_law(
    logits, stride, temperature, scores, places, largest, totals, law_rows, index, probabilities, num_laws, ids_at,
    ROWS: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    other = tl.arange(0, ROWS)
    is_chunk = other < NUM_CHUNKS
    of_row = row * NUM_CHUNKS
    tops = tl.load(largest + of_row + other, mask=is_chunk, other=float("-inf"))
    top = tl.max(tops, 0)
    sums = tl.load(totals + of_row + other, mask=is_chunk, other=0.0)
    total = tl.sum(tl.where(tops == float("-inf"), 0.0, sums * tl.exp(tops - top)), 0)
    if chunk == 0:
        score = tl.load(scores + of_row + other, mask=is_chunk, other=float("-inf"))
        place = tl.load(places + of_row + other, mask=is_chunk, other=NUM_IDS)
        tl.store(ids_at + row, _best_place(score, place, is_chunk, NUM_IDS).to(tl.int64))
    divisor = tl.load(temperature + row)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < NUM_IDS, other=float("-inf"))
    x = x * _factor_of(divisor)
    law = probabilities + (tl.load(law_rows + row) * num_laws + index) * NUM_IDS
    tl.store(law + ids, tl.exp(x - top) / total, mask=ids < NUM_IDS)
