"""The passes over the vocabulary behind filters.py: what lies above a row's pivots, and the ids at which its threshold
may be.

Belongs here: the one kernel that reads all logits, some of them twice.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

from specbench.engine.kernels.filter_rows import (
    LARGEST,
    LOOK_AGAIN,
    MEASURE_WIDTH,
    NUM_PIVOTS,
    NUMBER,
    STATE_LARGEST,
    STATE_TASK,
    STATE_WIDTH,
    TOTAL,
    above_in_columns,
    columns_of,
    factor_of,
    kind_of,
    weights_of,
)

#: Threads of a program.
_COLUMNS: tl.constexpr = tl.constexpr(256)


@triton.jit(do_not_specialize=("zero",), do_not_specialize_on_alignment=("temperature", "min_p", "top_k", "top_p"))
def measure_and_collect(
    logits, stride, temperature, min_p, top_k, top_p, pivots, measured, state, collected, zero,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, SAMPLE: tl.constexpr,
    SEGMENT: tl.constexpr, COLLECTED: tl.constexpr, IS_SECOND: tl.constexpr, IS_FAST: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row; of a row without filters, the mass alone."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    if IS_SECOND:
        if tl.load(state + row * STATE_WIDTH + STATE_TASK) != LOOK_AGAIN:
            return
    elif tl.load(temperature + row) == 0:
        return
    first = chunk * CHUNK
    x = columns_of(logits + row * stride, first, factor_of(temperature, row), zero, NUM_IDS, CHUNK, _COLUMNS)
    of_chunk = row * NUM_CHUNKS + chunk
    own_measured = measured + of_chunk * MEASURE_WIDTH
    if IS_SECOND:
        weights = _weights_of(x, tl.load(state + row * STATE_WIDTH + STATE_LARGEST), IS_FAST)
        worth = tl.full([_COLUMNS], 1.0, tl.float32)
    else:
        # Relative to the largest of each column, so that no thread waits for the others.
        tops = tl.max(x, 0)
        largest = tl.max(tops, 0)
        weights = _weights_of(x, tops[None, :], IS_FAST)
        worth = weights_of(tops, largest)
        tl.store(own_measured + LARGEST, largest)
        tl.store(own_measured + TOTAL, tl.sum(tl.sum(weights, 0) * worth, 0))
        if kind_of(temperature, min_p, top_k, top_p, row) == 0:
            return
    own_pivots = pivots + row * NUM_PIVOTS
    pivot = tl.arange(0, NUM_PIVOTS)
    mass, count = above_in_columns(x, weights, tl.load(own_pivots + pivot))
    tl.store(own_measured + pivot, tl.sum(mass * worth[None, :], 1))
    tl.store(own_measured + NUM_PIVOTS + pivot, tl.sum(count, 1))
    few, lower, upper = tl.load(own_pivots), tl.load(own_pivots + 1), tl.load(own_pivots + 2)
    number = _collect(x, (x >= few) | ((x >= lower) & (x < upper)), collected + of_chunk * SEGMENT, SEGMENT)
    tl.store(own_measured + NUMBER, number * 1.0)


@triton.jit
def _weights_of(x, largest, IS_FAST: tl.constexpr):
    """As `weights_of`, which spends two instructions on results that are no normal numbers."""
    if IS_FAST:
        x = (x - tl.maximum(largest, -3e38)) * 1.4426950408889634
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return weights_of(x, largest)


@triton.jit
def _collect(x, is_wanted, segment, SEGMENT: tl.constexpr):
    """Write the wanted ones column by column, as far as there is room; how many there are."""
    number = is_wanted.to(tl.int32)
    of_column = tl.sum(number, 0)
    at = (tl.cumsum(of_column, 0) - of_column)[None, :] + tl.cumsum(number, 0) - 1
    at = tl.max_contiguous(at, [1, 32])
    tl.store(segment + at, x, mask=is_wanted & (at < SEGMENT))
    return tl.sum(of_column, 0)
