"""What the kernels behind filters.py have in common: what a row asks for, the brackets that thresholds are known to lie
in, and what is kept of a row between launches.

Belongs here: functions that more than one of these kernels calls. No kernel is launched from here.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

#: The first: above it ids are few. The next two: on either side of where the threshold should be, and the lower one is
#: first if a pass is to collect what is between them; it always collects what is above the first. The last: elsewhere.
NUM_PIVOTS: tl.constexpr = tl.constexpr(4)
#: Of each chunk: mass and number of ids above each pivot; then the number collected, the largest logit, mass of all.
#: Masses of the first pass are relative to the chunk's largest logit, those of the second to the row's.
MEASURE_WIDTH: tl.constexpr = tl.constexpr(16)
NUMBER: tl.constexpr = tl.constexpr(8)
LARGEST: tl.constexpr = tl.constexpr(9)
TOTAL: tl.constexpr = tl.constexpr(10)
#: Of each row: ends of its bracket, number and mass of the ids at or above these (six), then
STATE_WIDTH: tl.constexpr = tl.constexpr(16)
STATE_LARGEST: tl.constexpr = tl.constexpr(6)
STATE_TOTAL: tl.constexpr = tl.constexpr(7)
STATE_TASK: tl.constexpr = tl.constexpr(8)
#: What is to be done with a row: nothing, or its threshold is among what was collected, or a second pass has to look.
NOTHING: tl.constexpr = tl.constexpr(0)
IS_COLLECTED: tl.constexpr = tl.constexpr(1)
LOOK_AGAIN: tl.constexpr = tl.constexpr(2)
#: What a row asks for: its aim is a share of the probability, a number of ids, or there are several filters.
BY_MASS: tl.constexpr = tl.constexpr(1)
BY_COUNT: tl.constexpr = tl.constexpr(2)
SEVERAL: tl.constexpr = tl.constexpr(3)


@triton.jit
def kind_of(temperature, min_p, top_k, top_p, row):
    """What a row asks for; 0 where it asks for nothing or is greedy."""
    has_k = tl.load(top_k + row) > 0
    has_p = tl.load(top_p + row) < 1.0
    kind = tl.where(has_k, tl.where(has_p, SEVERAL, BY_COUNT), tl.where(has_p, BY_MASS, 0))
    kind = tl.where(tl.load(min_p + row) > 0, SEVERAL, kind)
    return tl.where(tl.load(temperature + row) == 0, 0, kind)


@triton.jit
def factor_of(temperature, row):
    value = tl.load(temperature + row)
    return tl.div_rn(1.0, tl.where(value == 0, 1.0, value))


@triton.jit
def tempered(logits, ids, is_id, factor):
    """Logits over temperature. No -0, whose bits are not in order."""
    return tl.load(logits + ids, mask=is_id, other=float("-inf")) * factor + 0.0


@triton.jit
def weights_of(x, largest):
    """Exponentials relative to the largest; 0 for what is out."""
    return tl.exp(x - tl.maximum(largest, -3e38))


@triton.jit
def least_of(min_p, row, largest):
    """What min_p leaves at least."""
    share = tl.load(min_p + row)
    return tl.where(share > 0, largest + tl.log(tl.where(share > 0, share, 1.0)), float("-inf"))


@triton.jit
def columns_of(logits, first, factor, zero, num_ids, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Logits over temperature of consecutive ids, [size / columns, columns].

    A thread has a column, so that what it counts or adds up needs no other thread until the end. The compiler must not
    see where the first one is (`zero` is 0): a thread would read four at once, and they would be moved between threads
    to have columns.
    """
    ids = (tl.arange(0, SIZE // COLUMNS) * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    logits += first + zero
    if first + SIZE <= num_ids:
        # Most are whole, and masks take as long as the rest of reading.
        x = tl.load(logits + ids) * factor + 0.0
    else:
        x = tempered(logits, ids, ids < num_ids - first, factor)
    return x


@triton.jit
def above_in_columns(x, weights, pivots):
    """Mass and number of the ids [rows, columns] at or above each pivot in each column: [pivots, columns] each."""
    is_above = tl.where(x[None, :, :] >= pivots[:, None, None], 1.0, 0.0)
    return tl.sum(is_above * weights[None, :, :], 1), tl.sum(is_above, 1)


@triton.jit
def measured_column(measured, COLUMN: tl.constexpr, other, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """One measurement of every chunk of a row."""
    chunk = tl.arange(0, CHUNKS)
    return tl.load(measured + chunk * MEASURE_WIDTH + COLUMN, mask=chunk < NUM_CHUNKS, other=other)


@triton.jit
def measured_tile(measured, FIRST: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Measurements of every chunk of a row from column FIRST on, [chunks, 4]."""
    chunk = tl.arange(0, CHUNKS)
    address = measured + chunk[:, None] * MEASURE_WIDTH + (tl.arange(0, NUM_PIVOTS) + FIRST)[None, :]
    return tl.load(address, mask=(chunk < NUM_CHUNKS)[:, None], other=0.0)


@triton.jit
def is_everything_collected(
    measured, SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr
):
    """Whether there was room for the ids that a pass was to collect."""
    number = measured_column(measured, NUMBER, 0.0, NUM_CHUNKS, CHUNKS)
    return (tl.max(number, 0) <= SEGMENT) & (tl.sum(number, 0) <= COLLECTED)


@triton.jit
def is_collected_between(pivots, low, high):
    """Whether a pass with these pivots collects all that lies in a bracket, in which there is no pivot."""
    few, lower, upper = tl.load(pivots), tl.load(pivots + 1), tl.load(pivots + 2)
    return (low >= few) | ((low >= lower) & ((high <= upper) | (few <= upper)))


@triton.jit
def narrowed(
    pivots, mass, count, kind, min_p, top_k, top_p, row, largest, total,
    low, high, count_low, count_high, mass_low, mass_high,
):  # fmt: skip
    """A bracket, narrowed by what was measured at pivots, [4] each."""
    wanted = tl.load(top_k + row).to(tl.float32)
    is_enough = count >= tl.where(wanted > 0, wanted, float("inf"))
    is_low = pivots <= least_of(min_p, row, largest)
    is_reached = tl.where(kind == BY_MASS, mass >= tl.load(top_p + row) * total, is_enough | is_low)
    new_low = tl.max(tl.where(is_reached, pivots, float("-inf")), 0)
    new_high = tl.min(tl.where(is_reached, float("inf"), pivots), 0)
    # Of several filters the others may move the threshold up.
    new_high = tl.where(kind == SEVERAL, float("inf"), new_high)
    count_low = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, count, 0.0), 0), count_low)
    mass_low = tl.where(new_low > low, tl.max(tl.where(pivots == new_low, mass, 0.0), 0), mass_low)
    count_high = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, count, 0.0), 0), count_high)
    mass_high = tl.where(new_high < high, tl.max(tl.where(pivots == new_high, mass, 0.0), 0), mass_high)
    return tl.maximum(new_low, low), tl.minimum(new_high, high), count_low, count_high, mass_low, mass_high
