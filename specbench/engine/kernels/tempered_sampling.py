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

from specbench.engine.kernels.noise import exponential, log_floor, random_bits
from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.sampling import NoiseRows

#: Logits that a program looks at at once.
_BLOCK = 4096
#: Threads of a program.
_COLUMNS: tl.constexpr = tl.constexpr(256)
#: From so many rows on, programs have several blocks each.
_MANY_ROWS = 64
#: Ids whose bound is less than this below the best score are scored; a bound is off by a tenth of it at most.
_NEAR: tl.constexpr = tl.constexpr(0.001)


def _chunk_of(num_rows: int) -> int:
    """Logits of one program: few rows are parted into many, to have as many programs as a device runs at once."""
    return _BLOCK if num_rows < _MANY_ROWS else 4 * _BLOCK


def tempered_ids(logits: Tensor, noise: NoiseRows, threshold: Tensor | None = None) -> Tensor:
    """logits [R, vocab] fp32, before temperature -> int64 [R]: argmax of logit / temperature - log(Exp(1) variate), or
    of the logits of a greedy row; ties to the lowest id. A logit over temperature is its product with the rounded
    reciprocal.

    threshold [R] fp32: ids whose logit over temperature is less are out; not of greedy rows.
    """
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    assert threshold is None or threshold.is_contiguous()
    num_rows, num_ids = logits.shape
    chunk = _chunk_of(num_rows)
    num_chunks = triton.cdiv(num_ids, chunk)
    scores = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    places = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    _score_chunk[(num_rows, num_chunks)](
        logits, logits.stride(0), noise.keys, noise.temperature, noise.positions, noise.stream,
        scores if threshold is None else threshold, scores, places, scores, scores, 0,
        NUM_IDS=num_ids, NUM_CHUNKS=num_chunks, CHUNK=chunk, BLOCK=_BLOCK, HAS_THRESHOLD=threshold is not None,
        HAS_LAW=False, IS_FAST=logits.is_cuda, **options, num_warps=8,
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
    num_chunks = triton.cdiv(num_ids, _BLOCK)
    new = torch.empty
    scores, largest, totals = new(3, num_rows, num_chunks, dtype=torch.float32, device=logits.device).unbind(0)
    places = new(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    ids = new(num_rows, dtype=torch.int64, device=logits.device)
    options = launch_options(logits.device)
    shape = {"NUM_IDS": num_ids, "NUM_CHUNKS": num_chunks, "BLOCK": _BLOCK}
    _score_chunk[(num_rows, num_chunks)](
        logits, logits.stride(0), noise.keys, noise.temperature, noise.positions, noise.stream, scores,
        scores, places, largest, totals, 0, **shape, CHUNK=_BLOCK, HAS_THRESHOLD=False, HAS_LAW=True,
        IS_FAST=logits.is_cuda, **options, num_warps=8,
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
def _columns_of(logits, first, zero, NUM_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of logits and their ids, [block / 256, 256]: a thread has a column. As in filters.py, `zero` is 0."""
    ids = (tl.arange(0, BLOCK // _COLUMNS) * _COLUMNS)[:, None] + tl.arange(0, _COLUMNS)[None, :]
    logits += first + zero
    if first + BLOCK <= NUM_IDS:
        x = tl.load(logits + ids)
    else:
        x = tl.load(logits + ids, mask=ids < NUM_IDS - first, other=float("-inf"))
    return x, first + ids


@triton.jit
def _store_largest(
    logits, first, zero, score_at, place_at, NUM_IDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest of a chunk's logits, and its id."""
    tops = tl.full([_COLUMNS], float("-inf"), tl.float32)
    places = tl.full([_COLUMNS], NUM_IDS, tl.int32)
    for start in range(0, CHUNK, BLOCK):
        x, ids = _columns_of(logits, first + start, zero, NUM_IDS, BLOCK)
        top = tl.max(x, 0)
        place = tl.min(tl.where(x == top[None, :], ids, NUM_IDS), 0)
        places = tl.where(top > tops, place, places)
        tops = tl.maximum(top, tops)
    best = tl.max(tops, 0)
    tl.store(score_at, best)
    tl.store(place_at, tl.min(tl.where(tops == best, places, NUM_IDS), 0))


@triton.jit
def _store_drawn(
    logits, first, factor, lowest, key, position, stream, bounds, score_at, place_at,
    NUM_IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best of a chunk's logits over temperature with their noise, from bounds on those of its columns ([256]): the
    columns whose bound is above the best so far are scored, the highest first, hardly ever more than one or two."""
    column = tl.arange(0, _COLUMNS)
    best = float("-inf")
    place = NUM_IDS
    bound = tl.max(bounds, 0)
    while (bound > float("-inf")) & (bound >= best - _NEAR):
        here = tl.min(tl.where(bounds == bound, column, _COLUMNS), 0)
        ids = first + tl.arange(0, CHUNK // _COLUMNS) * _COLUMNS + here
        x = tl.load(logits + ids, mask=ids < NUM_IDS, other=float("-inf")) * factor
        x = tl.where(x >= lowest, x, float("-inf"))
        scores = x - tl.log(exponential(key, position, stream, ids))
        top = tl.max(scores, 0)
        top_place = tl.min(tl.where(scores == top, ids, NUM_IDS), 0)
        is_better = (top > best) | ((top == best) & (top_place < place))
        place = tl.where(is_better, top_place, place)
        best = tl.maximum(top, best)
        bounds = tl.where(column == here, float("-inf"), bounds)
        bound = tl.max(bounds, 0)
    tl.store(score_at, best)
    tl.store(place_at, place)


@triton.jit
def _best_place(scores, places, is_chunk, NUM_IDS: tl.constexpr):
    """Of the best of chunks, the best id (ties: the lowest)."""
    best = tl.max(tl.where(is_chunk, scores, float("-inf")), 0)
    place = tl.min(tl.where(is_chunk & (scores == best), places, NUM_IDS), 0)
    # Logits that are no numbers have no largest: any id that exists will do.
    return tl.where(place >= NUM_IDS, 0, place)


@triton.jit(
    do_not_specialize=("stream", "zero"),
    do_not_specialize_on_alignment=("keys", "temperature", "positions", "threshold", "largest", "totals"),
)
def _score_chunk(
    logits, stride, keys, temperature, positions, stream, threshold, scores, places, largest, totals, zero,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr, HAS_LAW: tl.constexpr, IS_FAST: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row: its best score; where the law is wanted, the sum of exponentials, too."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNK
    of_chunk = row * NUM_CHUNKS + tl.program_id(1)
    own_logits = logits + row * stride
    divisor = tl.load(temperature + row)
    key, position = tl.load(keys + row), tl.load(positions + row)
    lowest = float("-inf")
    if HAS_THRESHOLD:
        lowest = tl.load(threshold + row)
    if divisor == 0:
        _store_largest(own_logits, first, zero, scores + of_chunk, places + of_chunk, NUM_IDS, CHUNK, BLOCK)
        if not HAS_LAW:
            return
    factor = _factor_of(divisor)
    bounds = tl.full([_COLUMNS], float("-inf"), tl.float32)
    # Of each column: its largest logit so far, and the mass relative to that.
    tops = tl.full([_COLUMNS], float("-inf"), tl.float32)
    masses = tl.zeros([_COLUMNS], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        x, ids = _columns_of(own_logits, first + start, zero, NUM_IDS, BLOCK)
        x = x * factor
        if HAS_THRESHOLD:
            x = tl.where(x >= lowest, x, float("-inf"))
        if HAS_LAW:
            new_tops = tl.maximum(tops, tl.max(x, 0))
            masses = masses * _weight(tops, new_tops) + tl.sum(_weight(x, new_tops[None, :]), 0)
            tops = new_tops
        is_any_left = True
        if HAS_THRESHOLD:
            # Most blocks have nothing left where few ids are likely.
            is_any_left = tl.max(tl.max(x, 0), 0) > float("-inf")
        if is_any_left:
            bits = random_bits(key, position, stream, ids)
            bounds = tl.maximum(bounds, tl.max(x - log_floor(bits, IS_FAST), 0))
    if HAS_LAW:
        top = tl.max(tops, 0)
        tl.store(largest + of_chunk, top)
        tl.store(totals + of_chunk, tl.sum(masses * _weight(tops, top), 0))
    if divisor != 0:
        _store_drawn(
            own_logits, first, factor, lowest, key, position, stream, bounds, scores + of_chunk, places + of_chunk,
            NUM_IDS, CHUNK,
        )  # fmt: skip


@triton.jit
def _weight(x, largest):
    """Exponentials relative to the largest; 0 for what is out."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - largest))


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
