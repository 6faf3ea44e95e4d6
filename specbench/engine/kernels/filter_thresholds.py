"""Thresholds of filters.py: the largest value of a row's bracket at which its aim is reached.

Belongs here: the kernels behind the passes. What was collected of a row is moved together; then one program a row
narrows its bracket until one value is left, among that, or among all ids of a row where that has not the whole bracket.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

from specbench.engine.kernels.filter_rows import (
    BY_COUNT,
    BY_MASS,
    LOOK_AGAIN,
    MEASURE_WIDTH,
    NOTHING,
    NUM_PIVOTS,
    NUMBER,
    SEVERAL,
    STATE_LARGEST,
    STATE_TASK,
    STATE_TOTAL,
    STATE_WIDTH,
    above_in_columns,
    columns_of,
    factor_of,
    is_collected_between,
    is_everything_collected,
    kind_of,
    least_of,
    measured_column,
    measured_tile,
    narrowed,
    weights_of,
)

#: Threads of a program that looks for a threshold, and ids that it looks at at once.
_COLUMNS: tl.constexpr = tl.constexpr(256)
_BLOCK: tl.constexpr = tl.constexpr(2048)
#: Values that are moved at once.
_MOVED: tl.constexpr = tl.constexpr(512)
#: More steps than a bracket of fp32 numbers needs.
_MAX_STEPS: tl.constexpr = tl.constexpr(128)
_NUM_STEP_PIVOTS: tl.constexpr = tl.constexpr(8)


@triton.jit(do_not_specialize=("zero",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def join_segments(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, collected, zero, joined,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row: its segment, behind those of the chunks before it."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if tl.load(state + row * STATE_WIDTH + STATE_TASK) == NOTHING:
        return
    own_measured = measured + row * (NUM_CHUNKS * MEASURE_WIDTH)
    if not is_everything_collected(own_measured, SEGMENT, COLLECTED, NUM_CHUNKS, CHUNKS):
        return
    this = tl.program_id(1)
    chunk = tl.arange(0, CHUNKS)
    number = measured_column(own_measured, NUMBER, 0.0, NUM_CHUNKS, CHUNKS).to(tl.int32)
    place = tl.sum(tl.where(chunk < this, number, 0), 0)
    size = tl.sum(tl.where(chunk == this, number, 0), 0)
    segment = collected + (row * NUM_CHUNKS + this) * SEGMENT
    for start in range(0, size, _MOVED):
        index = start + tl.arange(0, _MOVED)
        value = tl.load(segment + index, mask=index < size)
        tl.store(joined + row * COLLECTED + place + index, value, mask=index < size)


# ---- Looking through values: those of a row that were collected, or all of them


@triton.jit
def _range_inside(values, size, factor, low, high, zero):
    """The least and the largest of the values from `low` to below `high`."""
    least = tl.full([_COLUMNS], float("inf"), tl.float32)
    most = tl.full([_COLUMNS], float("-inf"), tl.float32)
    for start in range(0, size, _BLOCK):
        x = columns_of(values, start, factor, zero, size, _BLOCK, _COLUMNS)
        is_inside = (x >= low) & (x < high) & (x > float("-inf"))
        least = tl.minimum(least, tl.min(tl.where(is_inside, x, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(is_inside, x, float("-inf")), 0))
    return tl.min(least, 0), tl.max(most, 0)


@triton.jit
def _above_inside(values, size, factor, largest, high, pivots, zero):
    """Mass and number of the values below `high` at or above each pivot, [8]."""
    mass = tl.zeros([_NUM_STEP_PIVOTS, _COLUMNS], tl.float32)
    count = tl.zeros([_NUM_STEP_PIVOTS, _COLUMNS], tl.float32)
    for start in range(0, size, _BLOCK):
        x = columns_of(values, start, factor, zero, size, _BLOCK, _COLUMNS)
        x = tl.where(x < high, x, float("-inf"))
        more_mass, more_count = above_in_columns(x, weights_of(x, largest), pivots)
        mass += more_mass
        count += more_count
    return tl.sum(mass, 1), tl.sum(count, 1)


@triton.jit
def _next_pivots(least, most, reach_low, reach_high, aim, number):
    """Half of them part a bracket evenly. The others are where the aim should be were ids spread evenly in it, give or
    take what chance makes of that.

    They are compared with values in one place and kept in another. Were it left to the compiler which products it
    fuses with which sums, the two might not be the same.
    """
    pivot = tl.arange(0, _NUM_STEP_PIVOTS)
    zeros = tl.zeros([_NUM_STEP_PIVOTS], tl.float32)
    beside = tl.where(pivot == 4, -2.0, tl.where(pivot == 5, -0.7, tl.where(pivot == 6, 0.7, 2.0)))
    part = tl.minimum(tl.maximum((reach_low - aim) / (reach_low - reach_high), 0.0), 1.0)
    number = tl.maximum(number, 1.0)
    spread = tl.sqrt(part * (1.0 - part) / number) + 0.5 / number
    parts = tl.where(pivot < 4, (pivot + 1) * 0.25, tl.fma(beside, zeros + spread, zeros + part))
    parts = tl.minimum(tl.maximum(parts, 0.0), 1.0)
    half = most * 0.5 - least * 0.5
    at = tl.fma(parts * 2.0, zeros + half, zeros + least)
    at = tl.maximum(tl.minimum(at, most), least)
    return tl.where((pivot == 3) | (at != at), most, at)


@triton.jit
def _largest_reaching(
    values, size, factor, largest, low, high, count_low, count_high, mass_low, mass_high, aim, is_by_count, zero
):
    """The largest of the values from `low` to below `high` at which the aim is reached, and the mass at or above it;
    `low` where there are none. Counts and masses are of the ids at or above both ends.

    The least of them reaches the aim whatever its mass says, which is added up in another order than the one by which
    `low` does.
    """
    first = low
    least, most = _range_inside(values, size, factor, low, high, zero)
    above_mass, above_count = mass_high, count_high
    top = high
    step = 0
    while (least < most) & (step < _MAX_STEPS):
        reach_low = tl.where(is_by_count, count_low, mass_low)
        reach_high = tl.where(is_by_count, count_high, mass_high)
        at = _next_pivots(least, most, reach_low, reach_high, aim, count_low - count_high)
        mass, count = _above_inside(values, size, factor, largest, high, at, zero)
        mass += above_mass
        count += above_count
        is_reached = (tl.where(is_by_count, count, mass) >= aim) | (at <= least)
        low = tl.maximum(low, tl.max(tl.where(is_reached, at, float("-inf")), 0))
        top = tl.minimum(top, tl.min(tl.where(is_reached, float("inf"), at), 0))
        count_low = tl.minimum(count_low, tl.min(tl.where(is_reached, count, float("inf")), 0))
        mass_low = tl.minimum(mass_low, tl.min(tl.where(is_reached, mass, float("inf")), 0))
        count_high = tl.maximum(count_high, tl.max(tl.where(is_reached, 0.0, count), 0))
        mass_high = tl.maximum(mass_high, tl.max(tl.where(is_reached, 0.0, mass), 0))
        least, most = _range_inside(values, size, factor, low, top, zero)
        step += 1
    return tl.where(least < float("inf"), least, first), mass_low


@triton.jit(
    do_not_specialize=("zero",),
    do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p", "threshold", "log_total"),
)
def find_thresholds(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, collected, zero, joined, threshold,
    log_total,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    kind = kind_of(temperature, min_p, top_k, top_p, row)
    own_state, own_pivots = state + row * STATE_WIDTH, pivots + row * NUM_PIVOTS
    own_measured = measured + row * (NUM_CHUNKS * MEASURE_WIDTH)
    largest, total = tl.load(own_state + STATE_LARGEST), tl.load(own_state + STATE_TOTAL)
    if kind == 0:
        # Of a greedy row nobody asks for the total.
        tl.store(threshold + row, float("-inf"))
        tl.store(log_total + row, largest + tl.log(total))
        return
    low, high = tl.load(own_state), tl.load(own_state + 1)
    count_low, count_high = tl.load(own_state + 2), tl.load(own_state + 3)
    mass_low, mass_high = tl.load(own_state + 4), tl.load(own_state + 5)
    if tl.load(own_state + STATE_TASK) == LOOK_AGAIN:
        low, high, count_low, count_high, mass_low, mass_high = narrowed(
            tl.load(own_pivots + tl.arange(0, NUM_PIVOTS)),
            tl.sum(measured_tile(own_measured, 0, NUM_CHUNKS, CHUNKS), 0),
            tl.sum(measured_tile(own_measured, NUM_PIVOTS, NUM_CHUNKS, CHUNKS), 0),
            kind, min_p, top_k, top_p, row, largest, total,
            low, high, count_low, count_high, mass_low, mass_high,
        )  # fmt: skip
    values, size, factor = logits + row * stride, NUM_IDS, factor_of(temperature, row)
    is_joined = is_everything_collected(own_measured, SEGMENT, COLLECTED, NUM_CHUNKS, CHUNKS)
    if is_joined & is_collected_between(own_pivots, low, high):
        values, factor = joined + row * COLLECTED, 1.0
        size = tl.sum(measured_column(own_measured, NUMBER, 0.0, NUM_CHUNKS, CHUNKS), 0).to(tl.int32)
    value, mass = _threshold_of(
        values, size, factor, largest, total, kind, min_p, top_k, top_p, row, low, high, count_low, count_high,
        mass_low, mass_high, zero,
    )  # fmt: skip
    tl.store(threshold + row, value)
    tl.store(log_total + row, largest + tl.log(mass))


@triton.jit
def _threshold_of(
    values, size, factor, largest, total, kind, min_p, top_k, top_p, row, low, high, count_low, count_high, mass_low,
    mass_high, zero,
):  # fmt: skip
    """A row's threshold in its bracket, and the mass at or above it."""
    wanted = tl.load(top_k + row).to(tl.float32)
    share = tl.load(top_p + row)
    if kind == SEVERAL:
        least = least_of(min_p, row, largest)
        if least > low:
            low = least
            every = tl.full([_NUM_STEP_PIVOTS], 0.0, tl.float32) + low
            mass, count = _above_inside(values, size, factor, largest, high, every, zero)
            mass_low = tl.max(mass, 0)
            count_low = tl.max(count, 0)
        if (wanted > 0) & (count_low > wanted):
            low, mass_low = _largest_reaching(
                values, size, factor, largest, low, high, count_low, count_high, mass_low, mass_high, wanted,
                wanted > 0, zero,
            )  # fmt: skip
    aim = tl.where(kind == BY_COUNT, wanted, share * tl.where(kind == BY_MASS, total, mass_low))
    if (kind != SEVERAL) | (share < 1.0):
        low, mass_low = _largest_reaching(
            values, size, factor, largest, low, high, count_low, count_high, mass_low, mass_high, aim,
            kind == BY_COUNT, zero,
        )  # fmt: skip
    return low, mass_low
