"""Where the passes of filters.py look: pivots of a row, from a sample of its ids and from what was measured.

Belongs here: the kernels before each pass, one program a row. Nothing here decides what is kept; a bad guess costs a
pass.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

from specbench.engine.kernels.filter_rows import (
    BY_MASS,
    IS_COLLECTED,
    LARGEST,
    LOOK_AGAIN,
    MEASURE_WIDTH,
    NOTHING,
    NUM_PIVOTS,
    SEVERAL,
    STATE_LARGEST,
    STATE_TASK,
    STATE_TOTAL,
    STATE_WIDTH,
    TOTAL,
    factor_of,
    is_collected_between,
    is_everything_collected,
    kind_of,
    least_of,
    measured_column,
    measured_tile,
    narrowed,
    tempered,
    weights_of,
)

#: A sample is taken from this many places of a row.
_NUM_PLACES: tl.constexpr = tl.constexpr(32)
#: Its range is parted into this many bins, one a thread.
_NUM_BINS: tl.constexpr = tl.constexpr(256)
#: How many spreads of a sample beside its estimate the pivots on either side are, in the first pass and in the second.
_BESIDE: tl.constexpr = tl.constexpr(2.5)
_LATE_BESIDE: tl.constexpr = tl.constexpr(3.2)
#: Share of a row's ids above the last pivot.
_ELSEWHERE: tl.constexpr = tl.constexpr(0.4)


@triton.jit
def _sample_of(logits, factor, low, high, SAMPLE: tl.constexpr, NUM_IDS: tl.constexpr):
    """Ids of a row in a few places that lie evenly over it, [sample]; -inf for those outside a bracket."""
    index = tl.arange(0, SAMPLE)
    ids = index
    if NUM_IDS > SAMPLE:
        EACH: tl.constexpr = SAMPLE // _NUM_PLACES
        ids = (index // EACH) * (NUM_IDS // _NUM_PLACES) + index % EACH
    x = tempered(logits, ids, ids < NUM_IDS, factor)
    return tl.where((x >= low) & (x < high), x, float("-inf"))


@triton.jit
def _bins_of(x, low, high):
    """Number of a sample's ids in each part of a bracket, [bins], its lower end and the width of a part. The sample's
    own ends are taken for those that are infinite."""
    is_id = x > float("-inf")
    top = tl.where(high < float("inf"), high, tl.max(x, 0))
    bottom = tl.where(low > float("-inf"), low, tl.min(tl.where(is_id, x, float("inf")), 0))
    width = tl.maximum((top - bottom) / _NUM_BINS, 1e-30)
    place = tl.where(is_id, (x - bottom) / width, 0.0)
    place = tl.minimum(tl.maximum(place, 0.0), _NUM_BINS - 1.0).to(tl.int32)
    return tl.histogram(place, _NUM_BINS, mask=is_id).to(tl.float32), bottom, width


@triton.jit
def _values_at(shares, bins, bottom, width):
    """Values above which the bins have given shares of what is in them, [shares]; read off evenly inside of a bin."""
    above = tl.sum(bins, 0) - tl.cumsum(bins, 0) + bins
    is_enough = above[None, :] >= shares[:, None]
    last = tl.maximum(tl.sum(is_enough.to(tl.int32), 1) - 1, 0)
    here = tl.min(tl.where(is_enough, above[None, :], float("inf")), 1)
    there = tl.max(tl.where(is_enough, 0.0, above[None, :]), 1)
    part = tl.minimum(tl.maximum((here - shares) / tl.maximum(here - there, 1e-30), 0.0), 1.0)
    return bottom + width * (last + tl.where(here < float("inf"), part, 0.0))


@triton.jit
def _number_above(value, bins, bottom, width):
    """How many of a sample's ids are above a value."""
    edge = (value - bottom) / width - tl.arange(0, _NUM_BINS)
    return tl.sum(bins * tl.minimum(tl.maximum(1.0 - edge, 0.0), 1.0), 0)


@triton.jit
def _around(share, by_mass, beside, bins, bottom, width, ids_each, room, least_part, most_parts):
    """Values on either side of where a sample has a share of its mass, or of its ids, above, `beside` spreads away, and
    the one between them.

    They are moved, to have between them as many ids as there is room for, each of the sample standing for `ids_each`:
    to `most_parts` of their distance at most. Where that would be less than `least_part` of it, nothing is to be
    collected between them, and the upper one comes first.
    """
    middle = tl.where(by_mass, (tl.arange(0, _NUM_BINS) + 0.5 - _NUM_BINS) * width, 0.0)
    each = tl.exp(middle)
    weights = bins * each
    total = tl.sum(weights, 0)
    aim = share * total
    pivot = tl.arange(0, NUM_PIVOTS)
    between = tl.max(_values_at(aim + 0.0 * pivot, weights, bottom, width), 0)
    # What those above and those below are off by, each drawn or not; near an end of the range hardly any are drawn.
    is_above = bottom + (tl.arange(0, _NUM_BINS) + 0.5) * width >= between
    off = tl.where(is_above, 1.0 - share, share)
    a_few = 2.0 * total / tl.maximum(tl.sum(bins, 0), 1.0)
    spread = beside * (tl.sqrt(tl.sum(weights * each * off * off, 0)) + a_few)
    values = _values_at(aim + tl.where(pivot == 0, spread, -spread), weights, bottom, width)
    lower, upper = tl.min(values, 0), tl.max(values, 0)
    number = _number_above(lower, bins, bottom, width) - _number_above(upper, bins, bottom, width)
    part = tl.minimum(room / tl.maximum(number * ids_each, 1.0), most_parts)
    is_worth_it = part >= least_part
    moved = between + (lower - between) * part
    # Nothing of the bracket is left out below, if that was not meant.
    moved = tl.where((part >= 1.0) & (lower <= bottom), tl.minimum(moved, bottom), moved)
    first = tl.where(is_worth_it, moved, upper)
    second = tl.where(is_worth_it, between + (upper - between) * part, lower)
    return first, second, between


@triton.jit(do_not_specialize=("zero",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def lay_pivots(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, collected, zero,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """Before the first pass."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = kind_of(temperature, min_p, top_k, top_p, row)
    if kind == 0:
        return
    x = _sample_of(logits + row * stride, factor_of(temperature, row), float("-inf"), float("inf"), SAMPLE, NUM_IDS)
    bins, bottom, width = _bins_of(x, float("-inf"), float("inf"))
    size = tl.sum(bins, 0)
    pivot = tl.arange(0, NUM_PIVOTS)
    FEW: tl.constexpr = 0.2 * COLLECTED / NUM_IDS
    shares = tl.where(pivot == 0, FEW, _ELSEWHERE)
    at = _values_at(shares * size, bins, bottom, width)
    wanted = tl.load(top_k + row).to(tl.float32)
    share = tl.where(kind == BY_MASS, tl.load(top_p + row), tl.minimum(wanted / NUM_IDS, 1.0))
    first, second, _ = _around(
        share, kind == BY_MASS, _BESIDE, bins, bottom, width, NUM_IDS / tl.maximum(size, 1.0), 0.6 * COLLECTED, 0.4, 1.0
    )
    if kind == SEVERAL:
        # The threshold may be anywhere above what one of them leaves.
        is_less = _number_above(first, bins, bottom, width) * NUM_IDS < 0.9 * COLLECTED * size
        first = tl.where((wanted > 0) & is_less, first, float("inf"))
        second = float("inf")
    at = tl.where(pivot == 1, first, tl.where(pivot == 2, second, at))
    # A sample in which every id is out says nothing: a pivot above all numbers.
    tl.store(pivots + row * NUM_PIVOTS + pivot, tl.where(at == at, tl.where(size > 0, at, float("inf")), float("inf")))


@triton.jit
def _late_pivots(x, low, high, share, by_mass, number, COLLECTED: tl.constexpr):
    """Values on either side of where a share of the mass or of the ids of a bracket is, and the one between them, from
    the sample's ids in it. `number`: how many ids it has."""
    bins, bottom, width = _bins_of(x, low, high)
    each = number / tl.maximum(tl.sum(bins, 0), 1.0)
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    return _around(share, by_mass, _LATE_BESIDE, bins, bottom, width, each, 0.75 * COLLECTED, 0.0, 2.0)


@triton.jit(do_not_specialize=("zero",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def narrow_rows(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, collected, zero,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """Between the passes: the bracket that the first one leaves; pivots of the second where it has to look."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = kind_of(temperature, min_p, top_k, top_p, row)
    own_state, own_pivots = state + row * STATE_WIDTH, pivots + row * NUM_PIVOTS
    own_measured = measured + row * (NUM_CHUNKS * MEASURE_WIDTH)
    tl.store(own_state + STATE_TASK, NOTHING * 1.0)
    if tl.load(temperature + row) == 0:
        return
    largest_of_chunk = measured_column(own_measured, LARGEST, float("-inf"), NUM_CHUNKS, CHUNKS)
    largest = tl.max(largest_of_chunk, 0)
    worth = weights_of(largest_of_chunk, largest)
    total = tl.sum(measured_column(own_measured, TOTAL, 0.0, NUM_CHUNKS, CHUNKS) * worth, 0)
    tl.store(own_state + STATE_LARGEST, largest)
    tl.store(own_state + STATE_TOTAL, total)
    if kind == 0:
        return
    low, high, count_low, count_high, mass_low, mass_high = narrowed(
        tl.load(own_pivots + tl.arange(0, NUM_PIVOTS)),
        tl.sum(measured_tile(own_measured, 0, NUM_CHUNKS, CHUNKS) * worth[:, None], 0),
        tl.sum(measured_tile(own_measured, NUM_PIVOTS, NUM_CHUNKS, CHUNKS), 0),
        kind, min_p, top_k, top_p, row, largest, total,
        float("-inf"), float("inf"), NUM_IDS * 1.0, 0.0, total, 0.0,
    )  # fmt: skip
    tl.store(own_state, low)
    tl.store(own_state + 1, high)
    tl.store(own_state + 2, count_low)
    tl.store(own_state + 3, count_high)
    tl.store(own_state + 4, mass_low)
    tl.store(own_state + 5, mass_high)
    is_collected = is_collected_between(own_pivots, low, high)
    if is_collected & is_everything_collected(own_measured, SEGMENT, COLLECTED, NUM_CHUNKS, CHUNKS):
        tl.store(own_state + STATE_TASK, IS_COLLECTED * 1.0)
        return
    tl.store(own_state + STATE_TASK, LOOK_AGAIN * 1.0)
    x = _sample_of(logits + row * stride, factor_of(temperature, row), low, high, SAMPLE, NUM_IDS)
    share = (tl.load(top_k + row).to(tl.float32) - count_high) / (count_low - count_high)
    if kind == BY_MASS:
        share = (tl.load(top_p + row) * total - mass_high) / (mass_low - mass_high)
    lower, upper, between = _late_pivots(x, low, high, share, kind == BY_MASS, count_low - count_high, COLLECTED)
    if count_low - count_high <= 0.9 * COLLECTED:
        lower, upper = low, high
    if kind == SEVERAL:
        # What min_p leaves is known by now.
        lower = tl.maximum(tl.where(tl.load(top_k + row) > 0, lower, low), least_of(min_p, row, largest))
        upper = float("inf")
    pivot = tl.arange(0, NUM_PIVOTS)
    at = tl.where(pivot == 1, lower, tl.where(pivot == 2, upper, tl.where(pivot == 3, between, float("inf"))))
    tl.store(own_pivots + pivot, tl.where(at == at, at, float("inf")))
