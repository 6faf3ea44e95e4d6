"""Which ids min_p, top_k and top_p leave to each row, as a threshold on its logits: a few passes over the vocabulary,
whatever the law, and no sorting.

Belongs here: finding the thresholds; sampling/filters.py is the reference. Does not belong here: cutting at them, which
kernels do as they read (tempered_sampling.py, drawn_verification.py).

top_k and top_p both ask for the largest threshold at which something reaches an aim: the number of ids, or their
probability. One search serves both:

1. A sample of each row says where the threshold should be, and eight pivots are laid around it.
2. A pass measures what lies above each pivot; the threshold is then between two of them.
3. Where few ids lie between them, a pass collects those. Else the sample's ids between them, together with what is
   known of the rest by now, say where eight more pivots should be, the pass measures these,
4. and a third pass collects. Rows that are done leave at once.
5. One program a row halves the collected ids until one value is left, or all ids of a row whose ids refused to be few.

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
#: A sample is taken from this many places of a row.
_NUM_PLACES: tl.constexpr = tl.constexpr(32)
#: Points of its range at which a sample is looked at.
_NUM_POINTS: tl.constexpr = tl.constexpr(16)
#: More halvings than 32-bit numbers can take.
_MAX_STEPS: tl.constexpr = tl.constexpr(40)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What one program works on, in ids. Powers of two."""

    chunk: int = 4096
    sample: int = 2048
    #: Ids of a row that are collected at most.
    collected: int = 8192


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters of each row. None: no row of the batch asks for it."""

    # [R] fp32; rows at 0 are greedy, and nothing is cut from them
    temperature: Tensor
    # [R] fp32; 0 is off
    min_p: Tensor | None
    # [R] int64; 0 is off
    top_k: Tensor | None
    # [R] fp32; 1 is off
    top_p: Tensor | None


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of each row: the ids whose logit over temperature is no less than the threshold."""

    # [R] fp32
    threshold: Tensor
    # [R] fp32: logarithm of the sum of their exponentials, of rows at a temperature. None: it was not asked for
    total: Tensor | None


def kept(logits: Tensor, filters: Filters, *, needs_total: bool = False, sizes: Sizes | None = None) -> Kept:
    """logits [R, vocab] fp32, before temperature.

    min_p first, then top_k, then top_p of what those leave; ids equal to the last one kept are kept. Nothing is
    written to the logits, and nothing depends on the host but which filters there are.
    """
    sizes = sizes or Sizes()
    passes = [aim for aim in (filters.top_k, filters.top_p) if aim is not None]
    floor = None if filters.min_p is None else _floors(logits, filters, sizes)
    result = None if floor is None else Kept(floor, None)
    for aim in passes:
        is_last = aim is passes[-1]
        result = _search(logits, filters, floor, aim, is_last and needs_total, sizes)
        floor = result.threshold
    assert result is not None, "a batch that asks for no filter has no use for this"
    return result


def _floors(logits: Tensor, filters: Filters, sizes: Sizes) -> Tensor:
    """The thresholds of min_p, [R]."""
    assert filters.min_p is not None
    num_rows, num_ids = logits.shape
    num_chunks = triton.cdiv(num_ids, sizes.chunk)
    largest = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    floor = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    options = launch_options(logits.device)
    _largest_of_chunk[(num_rows, num_chunks)](
        logits, filters.temperature, filters.min_p, largest, logits.stride(0), num_chunks,
        NUM_IDS=num_ids, BLOCK=sizes.chunk, **options, num_warps=8,
    )  # fmt: skip
    _floor_of_row[(num_rows,)](
        filters.temperature, filters.min_p, largest, floor,
        NUM_CHUNKS=num_chunks, BLOCK=triton.next_power_of_2(num_chunks), **options,
        num_warps=1,
    )  # fmt: skip
    return floor


def _search(
    logits: Tensor,
    filters: Filters,
    floor: Tensor | None,
    aim: Tensor,
    needs_total: bool,
    sizes: Sizes,
) -> Kept:
    """Thresholds at which the ids above `floor` reach an aim, [R]: a number if it is int64, else a share of the
    probability."""
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    num_rows, num_ids = logits.shape
    num_chunks = triton.cdiv(num_ids, sizes.chunk)
    new = torch.empty
    pivots = new(2, num_rows, _NUM_PIVOTS.value, dtype=torch.float32, device=logits.device)
    measured = new(2, num_rows, num_chunks, _WIDTH.value, dtype=torch.float32, device=logits.device)
    collected = new(num_rows, sizes.collected, dtype=torch.float32, device=logits.device)
    threshold = new(num_rows, dtype=torch.float32, device=logits.device)
    total = torch.empty_like(threshold) if needs_total else None
    tensors = (
        logits, logits.stride(0), filters.temperature, aim, aim if floor is None else floor, pivots,
        measured,
    )  # fmt: skip
    options = {
        "NUM_IDS": num_ids,
        "NUM_CHUNKS": num_chunks,
        "CHUNK": sizes.chunk,
        "COLLECTED": sizes.collected,
        "HAS_FLOOR": floor is not None,
        "BY_COUNT": aim.dtype == torch.int64,
        **launch_options(logits.device),
    }
    of_chunks = (num_rows, num_chunks)
    _lay_pivots[(num_rows,)](*tensors, SAMPLE=sizes.sample, **options, num_warps=8)
    _measure[of_chunks](*tensors, NEEDS_TOTAL=needs_total, **options, num_warps=8)
    _lay_more_pivots[(num_rows,)](*tensors, num_rows, SAMPLE=sizes.sample, **options, num_warps=8)
    _narrow[of_chunks](*tensors, collected, num_rows, ROUND=1, **options, num_warps=8)
    _narrow[of_chunks](*tensors, collected, num_rows, ROUND=2, **options, num_warps=8)
    _halve[(num_rows,)](
        *tensors, collected, num_rows, threshold, threshold if total is None else total,
        NEEDS_TOTAL=needs_total, **options, num_warps=16,
    )  # fmt: skip
    return Kept(threshold, total)


# ---- What kernels share


@triton.jit
def _aim_of(temperature, aim, row, BY_COUNT: tl.constexpr):
    """The row's aim, 0 where it has none: a greedy one, or where the filter is off."""
    value = tl.load(aim + row).to(tl.float32)
    if not BY_COUNT:
        value = tl.where(value < 1.0, value, 0.0)
    return tl.where(tl.load(temperature + row) == 0, 0.0, value)


@triton.jit
def _tempered(logits, ids, is_id, divisor, lowest):
    """Logits over temperature; those below `lowest` are out. No -0, whose bits are not in order."""
    x = tl.div_rn(tl.load(logits + ids, mask=is_id, other=float("-inf")), divisor) + 0.0
    return tl.where(x >= lowest, x, float("-inf"))


@triton.jit
def _divisor_of(temperature, row):
    value = tl.load(temperature + row)
    return tl.where(value == 0, 1.0, value)


@triton.jit
def _lowest_of(floor, row, HAS_FLOOR: tl.constexpr):
    lowest = float("-inf")
    if HAS_FLOOR:
        lowest = tl.load(floor + row)
    return lowest


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
def _bracket_of(
    pivots, mass, count, aim, total, low, high, count_low, count_high, mass_low, mass_high, BY_COUNT: tl.constexpr
):
    """A bracket, narrowed by what was measured at pivots, [8] each. `low` reaches the aim and `high` does not."""
    is_reached = mass >= aim * total
    if BY_COUNT:
        is_reached = count >= aim
    new_low = tl.max(tl.where(is_reached, pivots, float("-inf")), 0)
    new_high = tl.min(tl.where(is_reached, float("inf"), pivots), 0)
    count_low = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, count, 0.0), 0), count_low)
    mass_low = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, mass, 0.0), 0), mass_low)
    count_high = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, count, 0.0), 0), count_high)
    mass_high = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, mass, 0.0), 0), mass_high)
    low = tl.maximum(new_low, low)
    high = tl.minimum(new_high, high)
    return low, high, count_low, count_high, mass_low, mass_high


@triton.jit
def _tile(measured, FIRST: tl.constexpr, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr):
    """Addresses of the eight measurements of every chunk of a row that begin at column FIRST, and which exist."""
    chunk = tl.arange(0, ROWS)
    pivot = tl.arange(0, _NUM_PIVOTS)
    return measured + chunk[:, None] * _WIDTH + (pivot + FIRST)[None, :], (chunk < NUM_CHUNKS)[:, None]


@triton.jit
def _column(measured, COLUMN: tl.constexpr, other, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr):
    """One measurement of every chunk of a row."""
    chunk = tl.arange(0, ROWS)
    return tl.load(measured + chunk * _WIDTH + COLUMN, mask=chunk < NUM_CHUNKS, other=other)


@triton.jit
def _first_bracket(pivots, measured, aim, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BY_COUNT: tl.constexpr):
    """What the first pass says of a row: its largest logit, the mass of all relative to it, and the bracket. `measured`
    and `pivots` are the row's."""
    ROWS: tl.constexpr = triton.next_power_of_2(NUM_CHUNKS)
    largest_of = _column(measured, _LARGEST, float("-inf"), NUM_CHUNKS, ROWS)
    largest = tl.max(largest_of, 0)
    factor = tl.where(largest_of == float("-inf"), 0.0, tl.exp(largest_of - largest))
    total = tl.sum(_column(measured, _TOTAL, 0.0, NUM_CHUNKS, ROWS) * factor, 0)
    address, is_there = _tile(measured, 0, NUM_CHUNKS, ROWS)
    mass = tl.sum(tl.load(address, mask=is_there, other=0.0) * factor[:, None], 0)
    address, is_there = _tile(measured, _NUM_PIVOTS, NUM_CHUNKS, ROWS)
    count = tl.sum(tl.load(address, mask=is_there, other=0.0), 0)
    at = tl.load(pivots + tl.arange(0, _NUM_PIVOTS))
    bracket = _bracket_of(
        at, mass, count, aim, total, float("-inf"), float("inf"), NUM_IDS * 1.0, 0.0, total, 0.0, BY_COUNT
    )
    return largest, total, bracket


@triton.jit
def _second_bracket(pivots, measured, aim, total, bracket, NUM_CHUNKS: tl.constexpr, BY_COUNT: tl.constexpr):
    """The bracket behind the second pass, where it measured."""
    ROWS: tl.constexpr = triton.next_power_of_2(NUM_CHUNKS)
    address, is_there = _tile(measured, 0, NUM_CHUNKS, ROWS)
    mass = tl.sum(tl.load(address, mask=is_there, other=0.0), 0)
    address, is_there = _tile(measured, _NUM_PIVOTS, NUM_CHUNKS, ROWS)
    count = tl.sum(tl.load(address, mask=is_there, other=0.0), 0)
    at = tl.load(pivots + tl.arange(0, _NUM_PIVOTS))
    low, high, count_low, count_high, mass_low, mass_high = bracket
    return _bracket_of(at, mass, count, aim, total, low, high, count_low, count_high, mass_low, mass_high, BY_COUNT)


@triton.jit
def _counts_at(pivots, measured, at, NUM_CHUNKS: tl.constexpr, ROWS: tl.constexpr):
    """Number of ids at or above a value in every chunk of a row; -1 where it was none of the pivots."""
    pivot = tl.load(pivots + tl.arange(0, _NUM_PIVOTS))
    address, is_there = _tile(measured, _NUM_PIVOTS, NUM_CHUNKS, ROWS)
    counts = tl.load(address, mask=is_there, other=0.0)
    return tl.max(tl.where((pivot == at)[None, :], counts, -1.0), 1)


@triton.jit
def _place_of(counts_low, counts_high, chunk, NUM_IDS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """How many ids of the bracket lie in the chunks before. Counts as of `_counts_at`: -1 is an end of all numbers."""
    other = tl.arange(0, ROWS)
    num_ids = tl.minimum(NUM_IDS - other * CHUNK, CHUNK).to(tl.float32)
    inside = tl.where(counts_low < 0, num_ids, counts_low) - tl.maximum(counts_high, 0.0)
    return tl.sum(tl.where(other < chunk, inside, 0.0), 0).to(tl.int32)


@triton.jit
def _collect(x, low, high, place, collected, COLLECTED: tl.constexpr):
    """Write a chunk's ids of the bracket behind those of the chunks before it."""
    is_inside = (x >= low) & (x < high)
    number = is_inside.to(tl.int32)
    if tl.sum(number, 0) > 0:
        at = place + tl.cumsum(number, 0) - 1
        tl.store(collected + at, x, mask=is_inside & (at < COLLECTED))


# ---- min_p


@triton.jit(do_not_specialize_on_alignment=("temperature", "min_p", "largest"))
def _largest_of_chunk(
    logits, temperature, min_p, largest, stride, num_chunks,
    NUM_IDS: tl.constexpr, BLOCK: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if tl.load(min_p + row) == 0:
        return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = _tempered(logits + row * stride, ids, ids < NUM_IDS, _divisor_of(temperature, row), float("-inf"))
    tl.store(largest + row * num_chunks + chunk, tl.max(x, 0))


@triton.jit(do_not_specialize_on_alignment=("temperature", "min_p", "largest", "floor"))
def _floor_of_row(
    temperature, min_p, largest, floor,
    NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    share = tl.load(min_p + row)
    if tl.load(temperature + row) == 0:
        share = 0.0
    chunk = tl.arange(0, BLOCK)
    least = float("-inf")
    if share > 0:
        of_chunk = tl.load(largest + row * NUM_CHUNKS + chunk, mask=chunk < NUM_CHUNKS, other=float("-inf"))
        least = tl.max(of_chunk, 0) + tl.log(share)
    tl.store(floor + row, least)


# ---- The search, in the order of its launches


@triton.jit(do_not_specialize_on_alignment=("temperature", "aim", "floor", "pivots", "measured"))
def _lay_pivots(
    logits, stride, temperature, aim, floor, pivots, measured,
    SAMPLE: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    COLLECTED: tl.constexpr, HAS_FLOOR: tl.constexpr, BY_COUNT: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row. Seven pivots where a sample has the aim, give or take its spread, and one above which the
    row's ids should be few enough to be collected."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    wanted = _aim_of(temperature, aim, row, BY_COUNT)
    if wanted == 0:
        return
    x = _sample_of(logits + row * stride, temperature, floor, row, SAMPLE, NUM_IDS, HAS_FLOOR)
    top = tl.max(x, 0)
    bottom = tl.min(tl.where(x == float("-inf"), float("inf"), x), 0)
    weights = _weights(x, top)
    total = tl.sum(weights, 0)
    size = tl.sum((x > float("-inf")).to(tl.float32), 0)
    if BY_COUNT:
        share = tl.minimum(wanted / NUM_IDS, 1.0)
        spread = tl.sqrt(share / size) + 2.0 / size
    else:
        share = wanted
        spread = tl.sqrt(share * (1.0 - share) * tl.sum(weights * weights, 0)) / total + 0.001
    pivot = tl.arange(0, _NUM_PIVOTS)
    shares = share + _beside() * spread
    few = tl.full([_NUM_PIVOTS], COLLECTED * 0.5 / NUM_IDS, tl.float32)
    at_few = _value_at(x, weights, few, bottom, top, total, size, True)
    at = _values_at(x, weights, shares, bottom, top, total, size, BY_COUNT)
    at = tl.where(pivot > 0, at, at_few)
    # A sample in which every id is out says nothing: a pivot above all numbers.
    tl.store(pivots + row * _NUM_PIVOTS + pivot, tl.where(at == at, at, float("inf")))


@triton.jit
def _sample_of(logits, temperature, floor, row, SAMPLE: tl.constexpr, NUM_IDS: tl.constexpr, HAS_FLOOR: tl.constexpr):
    """Ids of a row in a few places that lie evenly over it."""
    index = tl.arange(0, SAMPLE)
    ids = index
    if NUM_IDS > SAMPLE:
        EACH: tl.constexpr = SAMPLE // _NUM_PLACES
        ids = (index // EACH) * (NUM_IDS // _NUM_PLACES) + index % EACH
    return _tempered(logits, ids, ids < NUM_IDS, _divisor_of(temperature, row), _lowest_of(floor, row, HAS_FLOOR))


@triton.jit
def _beside():
    """How many spreads beside its estimate the aim is looked for: [8]."""
    pivot = tl.arange(0, _NUM_PIVOTS)
    lower = tl.where(pivot == 0, -3.2, tl.where(pivot == 1, -1.6, tl.where(pivot == 2, -0.8, -0.25)))
    upper = tl.where(pivot == 4, 0.25, tl.where(pivot == 5, 0.8, tl.where(pivot == 6, 1.6, 3.2)))
    return tl.where(pivot < 4, lower, upper)


@triton.jit
def _values_at(x, weights, shares, bottom, top, total, size, BY_COUNT: tl.constexpr):
    """As `_value_at`, twice: the points are as far apart as the range is wide."""
    first = _value_at(x, weights, shares, bottom, top, total, size, BY_COUNT)
    low = tl.maximum(tl.min(first, 0) - (top - bottom) / _NUM_POINTS, bottom)
    high = tl.minimum(tl.max(first, 0) + (top - bottom) / _NUM_POINTS, top)
    return _value_at(x, weights, shares, low, high, total, size, BY_COUNT)


@triton.jit
def _value_at(x, weights, shares, bottom, top, total, size, BY_COUNT: tl.constexpr):
    """Values above which a sample has given shares ([8]) of its mass, or of its number: read off between points of its
    range from `bottom` to `top`."""
    point = tl.arange(0, _NUM_POINTS)
    width = (top - bottom) / _NUM_POINTS
    at = bottom + width * point
    is_above = x[None, :] >= at[:, None]
    if BY_COUNT:
        above = tl.sum(tl.where(is_above, 1.0, 0.0), 1) / size
    else:
        above = tl.sum(tl.where(is_above, weights[None, :], 0.0), 1) / total
    # [8, points]: the last point above which there is enough
    is_enough = above[None, :] >= shares[:, None]
    last = tl.maximum(tl.sum(is_enough.to(tl.int32), 1) - 1, 0)
    here = tl.sum(tl.where(point[None, :] == last[:, None], above[None, :], 0.0), 1)
    there = tl.sum(tl.where(point[None, :] == last[:, None] + 1, above[None, :], 0.0), 1)
    part = tl.minimum(tl.maximum((here - shares) / tl.maximum(here - there, 1e-9), 0.0), 1.0)
    return bottom + width * (last + part)


@triton.jit(do_not_specialize_on_alignment=("temperature", "aim", "floor", "pivots", "measured"))
def _measure(
    logits, stride, temperature, aim, floor, pivots, measured,
    NEEDS_TOTAL: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    COLLECTED: tl.constexpr, HAS_FLOOR: tl.constexpr, BY_COUNT: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row: what lies above the row's pivots."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wanted = _aim_of(temperature, aim, row, BY_COUNT)
    if NEEDS_TOTAL:
        if tl.load(temperature + row) == 0:
            return
    elif wanted == 0:
        return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _tempered(
        logits + row * stride, ids, ids < NUM_IDS, _divisor_of(temperature, row), _lowest_of(floor, row, HAS_FLOOR)
    )
    largest = tl.max(x, 0)
    weights = _weights(x, largest)
    of_chunk = measured + (row * NUM_CHUNKS + chunk) * _WIDTH
    tl.store(of_chunk + _LARGEST, largest)
    tl.store(of_chunk + _TOTAL, tl.sum(weights, 0))
    if wanted == 0:
        return
    pivot = tl.arange(0, _NUM_PIVOTS)
    mass, count = _above(x, weights, tl.load(pivots + row * _NUM_PIVOTS + pivot))
    tl.store(of_chunk + pivot, mass)
    tl.store(of_chunk + _NUM_PIVOTS + pivot, count)


@triton.jit(
    do_not_specialize=("num_rows",),
    do_not_specialize_on_alignment=("temperature", "aim", "floor", "pivots", "measured"),
)
def _lay_more_pivots(
    logits, stride, temperature, aim, floor, pivots, measured, num_rows,
    SAMPLE: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    COLLECTED: tl.constexpr, HAS_FLOOR: tl.constexpr, BY_COUNT: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row whose ids between two pivots are many. What lies above them is known exactly by now, so that
    a few ids with much of the mass, which a sample misses, mislead the first pivots and not these."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    wanted = _aim_of(temperature, aim, row, BY_COUNT)
    if wanted == 0:
        return
    own_measured = measured + row * (NUM_CHUNKS * _WIDTH)
    _, total, bracket = _first_bracket(
        pivots + row * _NUM_PIVOTS, own_measured, wanted, NUM_IDS, NUM_CHUNKS, BY_COUNT
    )
    low, high, count_low, count_high, mass_low, mass_high = bracket
    if count_low - count_high <= COLLECTED:
        return
    x = _sample_of(logits + row * stride, temperature, floor, row, SAMPLE, NUM_IDS, HAS_FLOOR)
    x = tl.where((x >= low) & (x < high), x, float("-inf"))
    top = tl.max(x, 0)
    bottom = tl.min(tl.where(x == float("-inf"), float("inf"), x), 0)
    weights = _weights(x, top)
    mass = tl.sum(weights, 0)
    size = tl.sum((x > float("-inf")).to(tl.float32), 0)
    if BY_COUNT:
        share = (wanted - count_high) / (count_low - count_high)
        spread = tl.sqrt(share * (1.0 - share) / size) + 1.0 / size
    else:
        share = (wanted * total - mass_high) / (mass_low - mass_high)
        spread = tl.sqrt(share * (1.0 - share) * tl.sum(weights * weights, 0)) / mass + 1.0 / size
    at = _values_at(x, weights, share + _beside() * spread, bottom, top, mass, size, BY_COUNT)
    at = tl.where(at == at, at, float("inf"))
    tl.store(pivots + (num_rows.to(tl.int64) + row) * _NUM_PIVOTS + tl.arange(0, _NUM_PIVOTS), at)


@triton.jit(
    do_not_specialize=("num_rows",),
    do_not_specialize_on_alignment=("temperature", "aim", "floor", "pivots", "measured"),
)
def _narrow(
    logits, stride, temperature, aim, floor, pivots, measured, collected, num_rows,
    ROUND: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    COLLECTED: tl.constexpr, HAS_FLOOR: tl.constexpr, BY_COUNT: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row: collect the ids of the bracket where they are few; in the first round, measure at
    pivots inside of it where they are many."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    wanted = _aim_of(temperature, aim, row, BY_COUNT)
    if wanted == 0:
        return
    ROWS: tl.constexpr = triton.next_power_of_2(NUM_CHUNKS)
    own_pivots = pivots + row * _NUM_PIVOTS
    own_measured = measured + row * (NUM_CHUNKS * _WIDTH)
    largest, total, bracket = _first_bracket(own_pivots, own_measured, wanted, NUM_IDS, NUM_CHUNKS, BY_COUNT)
    low, high, count_low, count_high, _, _ = bracket
    is_few = count_low - count_high <= COLLECTED
    if ROUND == 2:
        if is_few:
            return
        second_pivots = own_pivots + num_rows.to(tl.int64) * _NUM_PIVOTS
        second_measured = own_measured + num_rows.to(tl.int64) * (NUM_CHUNKS * _WIDTH)
        low, high, count_low, count_high, _, _ = _second_bracket(
            second_pivots, second_measured, wanted, total, bracket, NUM_CHUNKS, BY_COUNT
        )
        if count_low - count_high > COLLECTED:
            return
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _tempered(
        logits + row * stride, ids, ids < NUM_IDS, _divisor_of(temperature, row), _lowest_of(floor, row, HAS_FLOOR)
    )
    if ROUND == 2:
        counts_low = tl.maximum(
            _counts_at(own_pivots, own_measured, low, NUM_CHUNKS, ROWS),
            _counts_at(second_pivots, second_measured, low, NUM_CHUNKS, ROWS),
        )
        counts_high = tl.maximum(
            _counts_at(own_pivots, own_measured, high, NUM_CHUNKS, ROWS),
            _counts_at(second_pivots, second_measured, high, NUM_CHUNKS, ROWS),
        )
        place = _place_of(counts_low, counts_high, chunk, NUM_IDS, CHUNK, ROWS)
        _collect(x, low, high, place, collected + row * COLLECTED, COLLECTED)
    elif is_few:
        counts_low = _counts_at(own_pivots, own_measured, low, NUM_CHUNKS, ROWS)
        counts_high = _counts_at(own_pivots, own_measured, high, NUM_CHUNKS, ROWS)
        place = _place_of(counts_low, counts_high, chunk, NUM_IDS, CHUNK, ROWS)
        _collect(x, low, high, place, collected + row * COLLECTED, COLLECTED)
    else:
        pivot = tl.arange(0, _NUM_PIVOTS)
        at = tl.load(own_pivots + num_rows.to(tl.int64) * _NUM_PIVOTS + pivot)
        mass, count = _above(x, _weights(x, largest), at)
        of_chunk = own_measured + (num_rows.to(tl.int64) * NUM_CHUNKS + chunk) * _WIDTH
        tl.store(of_chunk + pivot, mass)
        tl.store(of_chunk + _NUM_PIVOTS + pivot, count)


@triton.jit
def _key(x):
    """int64 in the order of fp32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _of_key(key):
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _split(values, size, divisor, lowest, largest, low, high, at, BLOCK: tl.constexpr):
    """Of the ids from `low` to below `high`: mass and number of those at or above a value, the least of those, and the
    largest below it."""
    mass = 0.0
    count = 0.0
    next_above = float("inf")
    next_below = float("-inf")
    for start in range(0, size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = _tempered(values, ids, ids < size, divisor, lowest)
        is_inside = (x >= low) & (x < high) & (ids < size)
        is_above = is_inside & (x >= at)
        mass += tl.sum(tl.where(is_above, _weights(x, largest), 0.0), 0)
        count += tl.sum(is_above.to(tl.float32), 0)
        next_above = tl.minimum(next_above, tl.min(tl.where(is_above, x, float("inf")), 0))
        next_below = tl.maximum(next_below, tl.max(tl.where(is_inside & (x < at), x, float("-inf")), 0))
    return mass, count, next_above, next_below


@triton.jit(
    do_not_specialize=("num_rows",),
    do_not_specialize_on_alignment=("temperature", "aim", "floor", "pivots", "measured", "threshold", "total"),
)
def _halve(
    logits, stride, temperature, aim, floor, pivots, measured, collected, num_rows, threshold, log_total,
    NEEDS_TOTAL: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
    COLLECTED: tl.constexpr, HAS_FLOOR: tl.constexpr, BY_COUNT: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row: the largest value that reaches the aim, among what was collected, or among all ids."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    wanted = _aim_of(temperature, aim, row, BY_COUNT)
    lowest = _lowest_of(floor, row, HAS_FLOOR)
    own_pivots = pivots + row * _NUM_PIVOTS
    own_measured = measured + row * (NUM_CHUNKS * _WIDTH)
    if wanted == 0:
        tl.store(threshold + row, lowest)
        if NEEDS_TOTAL:
            ROWS: tl.constexpr = triton.next_power_of_2(NUM_CHUNKS)
            of_chunk = _column(own_measured, _LARGEST, float("-inf"), NUM_CHUNKS, ROWS)
            most = tl.max(of_chunk, 0)
            factor = tl.where(of_chunk == float("-inf"), 0.0, tl.exp(of_chunk - most))
            all_of_it = tl.sum(_column(own_measured, _TOTAL, 0.0, NUM_CHUNKS, ROWS) * factor, 0)
            # Of a greedy row nobody asks.
            tl.store(log_total + row, most + tl.log(all_of_it))
        return
    largest, total, bracket = _first_bracket(own_pivots, own_measured, wanted, NUM_IDS, NUM_CHUNKS, BY_COUNT)
    low, high, count_low, count_high, _, mass_high = bracket
    if count_low - count_high > COLLECTED:
        low, high, count_low, count_high, _, mass_high = _second_bracket(
            own_pivots + num_rows.to(tl.int64) * _NUM_PIVOTS,
            own_measured + num_rows.to(tl.int64) * (NUM_CHUNKS * _WIDTH),
            wanted, total, bracket, NUM_CHUNKS, BY_COUNT,
        )  # fmt: skip
    is_collected = count_low - count_high <= COLLECTED
    divisor = _divisor_of(temperature, row)
    size = NUM_IDS
    values = logits + row * stride
    if is_collected:
        divisor = 1.0
        size = (count_low - count_high).to(tl.int32)
        values = collected + row * COLLECTED
    # What is kept is at least the least id of the bracket; `top` is its largest id that may still be too much.
    mass, count, least_kept, _ = _split(values, size, divisor, lowest, largest, low, high, low, COLLECTED)
    _, _, _, top = _split(values, size, divisor, lowest, largest, low, high, high, COLLECTED)
    kept_mass = mass
    step = 0
    while (least_kept < top) & (step < _MAX_STEPS):
        at = _of_key((_key(least_kept) + _key(top) + 1) // 2)
        mass, count, next_above, next_below = _split(
            values, size, divisor, lowest, largest, low, high, at, COLLECTED
        )  # fmt: skip
        is_reached = mass_high + mass >= wanted * total
        if BY_COUNT:
            is_reached = count_high + count >= wanted
        least_kept = tl.where(is_reached, next_above, least_kept)
        kept_mass = tl.where(is_reached, mass, kept_mass)
        top = tl.where(is_reached, top, next_below)
        step += 1
    tl.store(threshold + row, tl.maximum(least_kept, lowest))
    if NEEDS_TOTAL:
        tl.store(log_total + row, largest + tl.log(mass_high + kept_mass))
