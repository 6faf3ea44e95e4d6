"""Which ids min_p, top_k and top_p leave to each row, as a threshold on its logits: a few passes over the vocabulary,
whatever the law, and no sorting.

Belongs here: finding the thresholds; sampling/filters.py is the reference. Does not belong here: cutting at them, which
kernels do as they read (tempered_sampling.py, drawn_verification.py).

A threshold is the largest value at which something reaches an aim: the number of ids, or their probability.

1. A sample of each row says where it should be, and eight pivots are laid around it.
2. A pass measures what lies above each pivot; the threshold is then in a bracket between two of them.
3. Where the ids of the bracket are few, a pass collects them. Else the sample's ids in it, together with what is known
   of the rest by now, say where eight more pivots should be, the pass measures these,
4. and a third pass collects. Rows that are done leave at once.
5. One program a row narrows the bracket among what was collected until one value is left, or among all ids of a row
   where they refused to be few. A row with several filters has the bracket of all ids above a pivot.

Ids are counted and collected in their order, so the result depends on the row alone, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options

_NUM_PIVOTS: tl.constexpr = tl.constexpr(8)
#: Of each row and chunk: mass and number of ids above each pivot; largest logit, mass of all.
_WIDTH: tl.constexpr = tl.constexpr(32)
_LARGEST: tl.constexpr = tl.constexpr(16)
_TOTAL: tl.constexpr = tl.constexpr(17)
#: Of each row: ends of its bracket, number and mass of the ids at or above these; largest logit, mass of all, what is
#: to be done.
_STATE: tl.constexpr = tl.constexpr(16)
_NOTHING: tl.constexpr = tl.constexpr(0)
_COLLECT: tl.constexpr = tl.constexpr(1)
_MEASURE: tl.constexpr = tl.constexpr(2)
#: What a row asks for: its aim is a share of the probability, a number of ids, or there are several filters.
_BY_MASS: tl.constexpr = tl.constexpr(1)
_BY_COUNT: tl.constexpr = tl.constexpr(2)
_SEVERAL: tl.constexpr = tl.constexpr(3)
#: A sample is taken from this many places of a row.
_NUM_PLACES: tl.constexpr = tl.constexpr(32)
#: Points of its range at which a sample is looked at.
_NUM_POINTS: tl.constexpr = tl.constexpr(16)
#: More steps than a bracket of fp32 numbers needs.
_MAX_STEPS: tl.constexpr = tl.constexpr(128)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one program works on, in ids. Powers of two."""

    chunk: int = 4096
    sample: int = 2048
    #: Ids of a row that are collected at most.
    collected: int = 4096


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters of each row."""

    # [R] fp32; rows at 0 are greedy, and nothing is cut from them
    temperature: Tensor
    # [R] fp32; 0 is off
    min_p: Tensor
    # [R] int64; 0 is off
    top_k: Tensor
    # [R] fp32; 1 is off
    top_p: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of each row: the ids whose logit over temperature is no less than the threshold."""

    # [R] fp32
    threshold: Tensor
    # [R] fp32: logarithm of the sum of their exponentials, of rows at a temperature
    total: Tensor


def kept(logits: Tensor, filters: Filters, sizes: Sizes | None = None) -> Kept:
    """logits [R, vocab] fp32, before temperature.

    min_p first, then top_k, then top_p of what those leave; ids equal to the last one kept are kept. Nothing is
    written to the logits, and nothing depends on the host. A logit over temperature is its product with the rounded
    reciprocal.
    """
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    sizes = sizes or Sizes()
    num_rows, num_ids = logits.shape
    num_chunks = triton.cdiv(num_ids, sizes.chunk)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    measured = new(2, num_rows, num_chunks, _WIDTH.value)
    tensors = (
        logits, logits.stride(0), filters.temperature, filters.min_p, filters.top_k, filters.top_p,
        new(2, num_rows, _NUM_PIVOTS.value), measured, new(num_rows, _STATE.value),
        new(num_rows, num_chunks, dtype=torch.int32), new(num_rows, sizes.collected), num_rows,
    )  # fmt: skip
    options = {
        "NUM_IDS": num_ids,
        "NUM_CHUNKS": num_chunks,
        "CHUNKS": triton.next_power_of_2(num_chunks),
        "CHUNK": sizes.chunk,
        "SAMPLE": sizes.sample,
        "COLLECTED": sizes.collected,
        **launch_options(logits.device),
    }
    of_chunks = (num_rows, num_chunks)
    result = Kept(new(num_rows), new(num_rows))
    _lay_pivots[(num_rows,)](*tensors, **options, num_warps=8)
    _measure[of_chunks](*tensors, **options, num_warps=8)
    _find_bracket[(num_rows,)](*tensors, **options, num_warps=4)
    _narrow[of_chunks](*tensors, **options, num_warps=8)
    _collect_late[of_chunks](*tensors, **options, num_warps=8)
    _finish[(num_rows,)](*tensors, result.threshold, result.total, **options, num_warps=16)
    return result


# ---- What kernels share


@triton.jit
def _kind_of(temperature, min_p, top_k, top_p, row):
    """What a row asks for; 0 where it asks for nothing or is greedy."""
    has_k = tl.load(top_k + row) > 0
    has_p = tl.load(top_p + row) < 1.0
    kind = tl.where(has_k, tl.where(has_p, _SEVERAL, _BY_COUNT), tl.where(has_p, _BY_MASS, 0))
    kind = tl.where(tl.load(min_p + row) > 0, _SEVERAL, kind)
    return tl.where(tl.load(temperature + row) == 0, 0, kind)


@triton.jit
def _factor_of(temperature, row):
    value = tl.load(temperature + row)
    return tl.div_rn(1.0, tl.where(value == 0, 1.0, value))


@triton.jit
def _tempered(logits, ids, is_id, factor):
    """Logits over temperature. No -0, whose bits are not in order."""
    return tl.load(logits + ids, mask=is_id, other=float("-inf")) * factor + 0.0


@triton.jit
def _weights(x, largest):
    """Exponentials relative to the largest; 0 for what is out."""
    return tl.where(x == float("-inf"), 0.0, tl.exp(x - largest))


@triton.jit
def _above(x, weights, pivots):
    """Mass and number of ids at or above each pivot, [8] each."""
    is_above = x[None, :] >= pivots[:, None]
    return tl.sum(tl.where(is_above, weights[None, :], 0.0), 1), tl.sum(tl.where(is_above, 1.0, 0.0), 1)


@triton.jit
def _is_reached(pivots, mass, count, kind, min_p, top_k, top_p, row, largest, total):
    """Whether the threshold is known to be at a pivot or above it: [8]."""
    wanted = tl.load(top_k + row).to(tl.float32)
    is_enough = count >= tl.where(wanted > 0, wanted, float("inf"))
    is_low = pivots <= _least_of(min_p, row, largest)
    is_heavy = mass >= tl.load(top_p + row) * total
    return tl.where(kind == _BY_MASS, is_heavy, is_enough | is_low)


@triton.jit
def _least_of(min_p, row, largest):
    """What min_p leaves at least."""
    share = tl.load(min_p + row)
    return tl.where(share > 0, largest + tl.log(tl.where(share > 0, share, 1.0)), float("-inf"))


@triton.jit
def _narrowed(pivots, mass, count, is_reached, kind, low, high, count_low, count_high, mass_low, mass_high):
    """A bracket, narrowed by what was measured at pivots, [8] each."""
    new_low = tl.max(tl.where(is_reached, pivots, float("-inf")), 0)
    new_high = tl.min(tl.where(is_reached, float("inf"), pivots), 0)
    # Of several filters the others may move the threshold up.
    new_high = tl.where(kind == _SEVERAL, float("inf"), new_high)
    count_low = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, count, 0.0), 0), count_low)
    mass_low = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, mass, 0.0), 0), mass_low)
    count_high = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, count, 0.0), 0), count_high)
    mass_high = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, mass, 0.0), 0), mass_high)
    return tl.maximum(new_low, low), tl.minimum(new_high, high), count_low, count_high, mass_low, mass_high


@triton.jit
def _tile(measured, FIRST: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """The eight measurements of every chunk of a row that begin at column FIRST, [chunks, 8]."""
    chunk = tl.arange(0, CHUNKS)
    pivot = tl.arange(0, _NUM_PIVOTS)
    address = measured + chunk[:, None] * _WIDTH + (pivot + FIRST)[None, :]
    return tl.load(address, mask=(chunk < NUM_CHUNKS)[:, None], other=0.0)


@triton.jit
def _column(measured, COLUMN: tl.constexpr, other, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """One measurement of every chunk of a row."""
    chunk = tl.arange(0, CHUNKS)
    return tl.load(measured + chunk * _WIDTH + COLUMN, mask=chunk < NUM_CHUNKS, other=other)


@triton.jit
def _total_of(measured, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """A row's largest logit, what masses of its chunks are worth relative to it, and the mass of all."""
    of_chunk = _column(measured, _LARGEST, float("-inf"), NUM_CHUNKS, CHUNKS)
    largest = tl.max(of_chunk, 0)
    factor = tl.where(of_chunk == float("-inf"), 0.0, tl.exp(of_chunk - largest))
    return largest, factor, tl.sum(_column(measured, _TOTAL, 0.0, NUM_CHUNKS, CHUNKS) * factor, 0)


@triton.jit
def _late_bracket(
    pivots, measured, state, kind, min_p, top_k, top_p, row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr
):
    """The bracket behind the second pass, where it measured. The first three are the row's, in the second pass."""
    count = tl.sum(_tile(measured, _NUM_PIVOTS, NUM_CHUNKS, CHUNKS), 0)
    mass = tl.sum(_tile(measured, 0, NUM_CHUNKS, CHUNKS), 0)
    at = tl.load(pivots + tl.arange(0, _NUM_PIVOTS))
    largest, total = tl.load(state + 6), tl.load(state + 7)
    is_reached = _is_reached(at, mass, count, kind, min_p, top_k, top_p, row, largest, total)
    return _narrowed(
        at, mass, count, is_reached, kind, tl.load(state), tl.load(state + 1), tl.load(state + 2), tl.load(state + 3),
        tl.load(state + 4), tl.load(state + 5),
    )  # fmt: skip


@triton.jit
def _counts_at(pivots, measured, at, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Number of ids at or above a value in every chunk of a row; -1 where it was none of the pivots."""
    is_this = tl.load(pivots + tl.arange(0, _NUM_PIVOTS)) == at
    return tl.max(tl.where(is_this[None, :], _tile(measured, _NUM_PIVOTS, NUM_CHUNKS, CHUNKS), -1.0), 1)


@triton.jit
def _inside_of(counts_low, counts_high, NUM_IDS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """How many ids of the bracket lie in each chunk. Counts as of `_counts_at`: -1 is an end of all numbers."""
    chunk = tl.arange(0, CHUNKS)
    num_ids = tl.maximum(tl.minimum(NUM_IDS - chunk * CHUNK, CHUNK), 0).to(tl.float32)
    return (tl.where(counts_low < 0, num_ids, counts_low) - tl.maximum(counts_high, 0.0)).to(tl.int32)


@triton.jit
def _collect(x, low, high, place, collected, COLLECTED: tl.constexpr):
    """Write a chunk's ids of the bracket behind those of the chunks before it."""
    is_inside = (x >= low) & (x < high)
    number = is_inside.to(tl.int32)
    if tl.sum(number, 0) > 0:
        at = place + tl.cumsum(number, 0) - 1
        tl.store(collected + at, x, mask=is_inside & (at < COLLECTED))


@triton.jit
def _sample_of(logits, factor, SAMPLE: tl.constexpr, NUM_IDS: tl.constexpr):
    """Ids of a row in a few places that lie evenly over it."""
    index = tl.arange(0, SAMPLE)
    ids = index
    if NUM_IDS > SAMPLE:
        EACH: tl.constexpr = SAMPLE // _NUM_PLACES
        ids = (index // EACH) * (NUM_IDS // _NUM_PLACES) + index % EACH
    return _tempered(logits, ids, ids < NUM_IDS, factor)


@triton.jit
def _values_at(x, weights, shares, bottom, top):
    """Values above which a sample has given shares ([8]) of its weights: read off between points of its range from
    `bottom` to `top`, and between points of what is left of that."""
    for _ in tl.static_range(2):
        point = tl.arange(0, _NUM_POINTS)
        width = (top - bottom) / _NUM_POINTS
        at = bottom + width * point
        above = tl.sum(tl.where(x[None, :] >= at[:, None], weights[None, :], 0.0), 1)
        # [8, points]: the last point above which there is enough
        is_enough = above[None, :] >= shares[:, None]
        last = tl.maximum(tl.sum(is_enough.to(tl.int32), 1) - 1, 0)
        here = tl.sum(tl.where(point[None, :] == last[:, None], above[None, :], 0.0), 1)
        there = tl.sum(tl.where(point[None, :] == last[:, None] + 1, above[None, :], 0.0), 1)
        part = tl.minimum(tl.maximum((here - shares) / tl.maximum(here - there, 1e-30), 0.0), 1.0)
        values = bottom + width * (last + part)
        bottom = tl.maximum(tl.min(values, 0) - width, bottom)
        top = tl.minimum(tl.max(values, 0) + width, top)
    return values


@triton.jit
def _beside():
    """How many spreads beside its estimate the aim is looked for: [8]."""
    pivot = tl.arange(0, _NUM_PIVOTS)
    lower = tl.where(pivot == 0, -3.2, tl.where(pivot == 1, -1.6, tl.where(pivot == 2, -0.8, -0.25)))
    upper = tl.where(pivot == 4, 0.25, tl.where(pivot == 5, 0.8, tl.where(pivot == 6, 1.6, 3.2)))
    return tl.where(pivot < 4, lower, upper)


# ---- The search, in the order of its launches


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def _lay_pivots(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, places, collected, num_rows,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row. One pivot above which the row's ids should be few enough to be collected, and seven where a
    sample has the aim, give or take its spread."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = _kind_of(temperature, min_p, top_k, top_p, row)
    if kind == 0:
        return
    x = _sample_of(logits + row * stride, _factor_of(temperature, row), SAMPLE, NUM_IDS)
    top = tl.max(x, 0)
    bottom = tl.min(tl.where(x == float("-inf"), float("inf"), x), 0)
    is_id = tl.where(x > float("-inf"), 1.0, 0.0)
    size = tl.sum(is_id, 0)
    few = COLLECTED * 0.5 / NUM_IDS
    wanted = tl.load(top_k + row).to(tl.float32)
    # Where there is no number, as many as can be collected are as good as any.
    share = tl.where(wanted > 0, tl.minimum(wanted / NUM_IDS, 1.0), few)
    spread = tl.sqrt(share / size) + 2.0 / size
    pivot = tl.arange(0, _NUM_PIVOTS)
    at = _values_at(x, is_id, tl.where(pivot == 0, few, share + _beside() * spread) * size, bottom, top)
    if kind == _BY_MASS:
        weights = _weights(x, top)
        share = tl.load(top_p + row)
        total = tl.sum(weights, 0)
        spread = tl.sqrt(share * (1.0 - share) * tl.sum(weights * weights, 0)) + 0.001 * total
        at = tl.where(pivot == 0, at, _values_at(x, weights, share * total + _beside() * spread, bottom, top))
    # A sample in which every id is out says nothing: a pivot above all numbers.
    tl.store(pivots + row * _NUM_PIVOTS + pivot, tl.where(at == at, at, float("inf")))


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def _measure(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, places, collected, num_rows,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row: what lies above the row's pivots."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if tl.load(temperature + row) == 0:
        return
    kind = _kind_of(temperature, min_p, top_k, top_p, row)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _tempered(logits + row * stride, ids, ids < NUM_IDS, _factor_of(temperature, row))
    largest = tl.max(x, 0)
    weights = _weights(x, largest)
    of_chunk = measured + (row * NUM_CHUNKS + chunk) * _WIDTH
    tl.store(of_chunk + _LARGEST, largest)
    tl.store(of_chunk + _TOTAL, tl.sum(weights, 0))
    if kind != 0:
        pivot = tl.arange(0, _NUM_PIVOTS)
        mass, count = _above(x, weights, tl.load(pivots + row * _NUM_PIVOTS + pivot))
        tl.store(of_chunk + pivot, mass)
        tl.store(of_chunk + _NUM_PIVOTS + pivot, count)


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def _find_bracket(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, places, collected, num_rows,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: its bracket; where its ids are few, the place of each chunk's among those collected; else
    eight more pivots. What lies above the bracket is known exactly by now, so that a few ids with much of the mass,
    which a sample misses, mislead the first pivots and not these."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = _kind_of(temperature, min_p, top_k, top_p, row)
    own_state = state + row * _STATE
    own_pivots = pivots + row * _NUM_PIVOTS
    own_measured = measured + row * (NUM_CHUNKS * _WIDTH)
    tl.store(own_state + 8, _NOTHING * 1.0)
    if tl.load(temperature + row) == 0:
        return
    largest, factor, total = _total_of(own_measured, NUM_CHUNKS, CHUNKS)
    tl.store(own_state + 6, largest)
    tl.store(own_state + 7, total)
    if kind == 0:
        return
    pivot = tl.arange(0, _NUM_PIVOTS)
    at = tl.load(own_pivots + pivot)
    mass = tl.sum(_tile(own_measured, 0, NUM_CHUNKS, CHUNKS) * factor[:, None], 0)
    count = tl.sum(_tile(own_measured, _NUM_PIVOTS, NUM_CHUNKS, CHUNKS), 0)
    is_reached = _is_reached(at, mass, count, kind, min_p, top_k, top_p, row, largest, total)
    low, high, count_low, count_high, mass_low, mass_high = _narrowed(
        at, mass, count, is_reached, kind, float("-inf"), float("inf"), NUM_IDS * 1.0, 0.0, total, 0.0
    )
    tl.store(own_state, low)
    tl.store(own_state + 1, high)
    tl.store(own_state + 2, count_low)
    tl.store(own_state + 3, count_high)
    tl.store(own_state + 4, mass_low)
    tl.store(own_state + 5, mass_high)
    if count_low - count_high <= COLLECTED:
        tl.store(own_state + 8, _COLLECT * 1.0)
        counts_low = _counts_at(own_pivots, own_measured, low, NUM_CHUNKS, CHUNKS)
        counts_high = _counts_at(own_pivots, own_measured, high, NUM_CHUNKS, CHUNKS)
        inside = _inside_of(counts_low, counts_high, NUM_IDS, CHUNK, CHUNKS)
        chunk = tl.arange(0, CHUNKS)
        tl.store(places + row * NUM_CHUNKS + chunk, tl.cumsum(inside, 0) - inside, mask=chunk < NUM_CHUNKS)
        return
    tl.store(own_state + 8, _MEASURE * 1.0)
    x = _sample_of(logits + row * stride, _factor_of(temperature, row), SAMPLE, NUM_IDS)
    x = tl.where((x >= low) & (x < high), x, float("-inf"))
    top = tl.max(x, 0)
    bottom = tl.min(tl.where(x == float("-inf"), float("inf"), x), 0)
    is_id = tl.where(x > float("-inf"), 1.0, 0.0)
    size = tl.sum(is_id, 0)
    weights = tl.where(kind == _BY_MASS, _weights(x, top), is_id)
    sampled = tl.sum(weights, 0)
    wanted = tl.load(top_k + row).to(tl.float32)
    share = tl.where(wanted > 0, (wanted - count_high) / (count_low - count_high), 0.5 * COLLECTED / count_low)
    if kind == _BY_MASS:
        share = (tl.load(top_p + row) * total - mass_high) / (mass_low - mass_high)
    spread = tl.sqrt(share * (1.0 - share) * tl.sum(weights * weights, 0)) + sampled / size
    at = _values_at(x, weights, share * sampled + _beside() * spread, bottom, top)
    if tl.load(min_p + row) > 0:
        # What it leaves is known by now.
        at = tl.where(pivot == 0, _least_of(min_p, row, largest), at)
    at = tl.where(at == at, at, float("inf"))
    tl.store(own_pivots + num_rows.to(tl.int64) * _NUM_PIVOTS + pivot, at)


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def _narrow(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, places, collected, num_rows,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row: collect the ids of the bracket where they are few, or measure inside of it."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    own_state = state + row * _STATE
    task = tl.load(own_state + 8)
    if task == _NOTHING:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _tempered(logits + row * stride, ids, ids < NUM_IDS, _factor_of(temperature, row))
    if task == _COLLECT:
        place = tl.load(places + row * NUM_CHUNKS + chunk)
        _collect(x, tl.load(own_state), tl.load(own_state + 1), place, collected + row * COLLECTED, COLLECTED)
    else:
        pivot = tl.arange(0, _NUM_PIVOTS)
        late = num_rows.to(tl.int64) + row
        mass, count = _above(x, _weights(x, tl.load(own_state + 6)), tl.load(pivots + late * _NUM_PIVOTS + pivot))
        of_chunk = measured + (late * NUM_CHUNKS + chunk) * _WIDTH
        tl.store(of_chunk + pivot, mass)
        tl.store(of_chunk + _NUM_PIVOTS + pivot, count)


@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def _collect_late(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, places, collected, num_rows,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """The same of rows in which the second pass measured."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    own_state = state + row * _STATE
    if tl.load(own_state + 8) != _MEASURE:
        return
    kind = _kind_of(temperature, min_p, top_k, top_p, row)
    late = num_rows.to(tl.int64) + row
    own_pivots, late_pivots = pivots + row * _NUM_PIVOTS, pivots + late * _NUM_PIVOTS
    own_measured = measured + row * (NUM_CHUNKS * _WIDTH)
    late_measured = measured + late * (NUM_CHUNKS * _WIDTH)
    low, high, count_low, count_high, _, _ = _late_bracket(
        late_pivots, late_measured, own_state, kind, min_p, top_k, top_p, row, NUM_CHUNKS, CHUNKS
    )
    if count_low - count_high > COLLECTED:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _tempered(logits + row * stride, ids, ids < NUM_IDS, _factor_of(temperature, row))
    counts_low = tl.maximum(
        _counts_at(own_pivots, own_measured, low, NUM_CHUNKS, CHUNKS),
        _counts_at(late_pivots, late_measured, low, NUM_CHUNKS, CHUNKS),
    )
    counts_high = tl.maximum(
        _counts_at(own_pivots, own_measured, high, NUM_CHUNKS, CHUNKS),
        _counts_at(late_pivots, late_measured, high, NUM_CHUNKS, CHUNKS),
    )
    inside = _inside_of(counts_low, counts_high, NUM_IDS, CHUNK, CHUNKS)
    place = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, inside, 0), 0)
    _collect(x, low, high, place, collected + row * COLLECTED, COLLECTED)


@triton.jit
def _range_inside(values, size, factor, low, high, BLOCK: tl.constexpr):
    """The least and the largest of the ids from `low` to below `high`."""
    least = float("inf")
    most = float("-inf")
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _tempered(values, ids, ids < size, factor)
        is_inside = (x >= low) & (x < high) & (x > float("-inf"))
        least = tl.minimum(least, tl.min(tl.where(is_inside, x, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(is_inside, x, float("-inf")), 0))
    return least, most


@triton.jit
def _above_inside(values, size, factor, largest, high, pivots, BLOCK: tl.constexpr):
    """Mass and number of the ids below `high` at or above each pivot, [8]."""
    mass = tl.zeros([_NUM_PIVOTS], tl.float32)
    count = tl.zeros([_NUM_PIVOTS], tl.float32)
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _tempered(values, ids, ids < size, factor)
        x = tl.where((x < high) & (ids < size), x, float("-inf"))
        more_mass, more_count = _above(x, _weights(x, largest), pivots)
        mass += more_mass
        count += more_count
    return mass, count


@triton.jit
def _largest_reaching(
    values, size, factor, largest, low, high, mass_low, mass_high, count_high, aim, is_by_count, BLOCK: tl.constexpr
):
    """The largest of the ids from `low` to below `high` at which the aim is reached, and the mass at or above it. The
    least of them reaches it; `mass_low` is the mass from there on."""
    least, most = _range_inside(values, size, factor, low, high, BLOCK)
    top = high
    step = 0
    while (least < most) & (step < _MAX_STEPS):
        pivot = tl.arange(0, _NUM_PIVOTS)
        part = (pivot + 1) / (_NUM_PIVOTS * 1.0)
        at = tl.maximum(tl.minimum(least * (1.0 - part) + most * part, most), least)
        at = tl.where(pivot == _NUM_PIVOTS - 1, most, at)
        mass, count = _above_inside(values, size, factor, largest, high, at, BLOCK)
        mass += mass_high
        is_reached = tl.where(is_by_count, count + count_high, mass) >= aim
        new_low = tl.max(tl.where(is_reached, at, least), 0)
        mass_low = tl.min(tl.where(is_reached, mass, mass_low), 0)
        top = tl.min(tl.where(is_reached, top, at), 0)
        least, most = _range_inside(values, size, factor, new_low, top, BLOCK)
        step += 1
    return least, mass_low


@triton.jit(
    do_not_specialize=("num_rows",),
    do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p", "threshold", "log_total"),
)
def _finish(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, places, collected, num_rows,
    threshold, log_total, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, SAMPLE: tl.constexpr, COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: the largest value that reaches the aim, among what was collected, or among all ids."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = _kind_of(temperature, min_p, top_k, top_p, row)
    own_state = state + row * _STATE
    largest, total = tl.load(own_state + 6), tl.load(own_state + 7)
    if kind == 0:
        # Of a greedy row nobody asks for the total.
        tl.store(threshold + row, float("-inf"))
        tl.store(log_total + row, largest + tl.log(total))
        return
    low, high = tl.load(own_state), tl.load(own_state + 1)
    count_low, count_high = tl.load(own_state + 2), tl.load(own_state + 3)
    mass_low, mass_high = tl.load(own_state + 4), tl.load(own_state + 5)
    if tl.load(own_state + 8) == _MEASURE:
        late = num_rows.to(tl.int64) + row
        low, high, count_low, count_high, mass_low, mass_high = _late_bracket(
            pivots + late * _NUM_PIVOTS, measured + late * (NUM_CHUNKS * _WIDTH), own_state, kind, min_p, top_k, top_p,
            row, NUM_CHUNKS, CHUNKS,
        )  # fmt: skip
    factor = _factor_of(temperature, row)
    size = NUM_IDS
    values = logits + row * stride
    if count_low - count_high <= COLLECTED:
        factor = 1.0
        size = (count_low - count_high).to(tl.int32)
        values = collected + row * COLLECTED
    wanted = tl.load(top_k + row).to(tl.float32)
    share = tl.load(top_p + row)
    if kind == _SEVERAL:
        low = tl.maximum(low, _least_of(min_p, row, largest))
        every = tl.full([_NUM_PIVOTS], 0.0, tl.float32) + low
        mass, count = _above_inside(values, size, factor, largest, high, every, COLLECTED)
        mass_low = tl.max(mass, 0)
        if (wanted > 0) & (tl.max(count, 0) > wanted):
            low, mass_low = _largest_reaching(
                values, size, factor, largest, low, high, mass_low, 0.0, 0.0, wanted, True, COLLECTED
            )
    aim = tl.where(kind == _BY_COUNT, wanted, share * tl.where(kind == _BY_MASS, total, mass_low))
    if (kind != _SEVERAL) | (share < 1.0):
        low, mass_low = _largest_reaching(
            values, size, factor, largest, low, high, mass_low, mass_high, count_high, aim, kind == _BY_COUNT, COLLECTED
        )
    tl.store(threshold + row, low)
    tl.store(log_total + row, largest + tl.log(mass_low))
