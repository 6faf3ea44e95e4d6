"""How many of a window's drafts are accepted: totals of the rows' laws, probabilities and coins of drafts, and for
`block` what drafts' laws lack of the target's.

Belongs here: the first kernels behind drawn_verification.py, and `outcome`, in which their results come together.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

from specbench.engine.kernels.noise import uniform

#: Purposes among the streams of sampling/noise.py, and how many there are.
ACCEPTANCE: tl.constexpr = tl.constexpr(2)
NUM_PURPOSES: tl.constexpr = tl.constexpr(4)


@triton.jit
def tempered(logits, ids, is_id, divisor, threshold, HAS_THRESHOLD: tl.constexpr):
    """Logits over temperature; what is below the threshold is out."""
    x = tl.load(logits + ids, mask=is_id, other=float("-inf")) * tl.div_rn(1.0, divisor)
    if HAS_THRESHOLD:
        x = tl.where(x >= threshold, x, float("-inf"))
    return x


@triton.jit
def logits_row(columns, stride_request, stride_column, request, column, K: tl.constexpr, HAS_COLUMNS: tl.constexpr):
    """The logits row of a window's column, which exists."""
    row = request * (K + 1) + column
    if HAS_COLUMNS:
        row = tl.load(columns + request * stride_request + column * stride_column)
    return row


@triton.jit
def _chances(
    worth, coins, lacking, request, usable, K: tl.constexpr, COLUMNS: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """The accepted drafts of a window under `block`, and the worth of these."""
    column = tl.arange(0, COLUMNS)
    of_window = request * (K + 1) + column
    is_block = (column > 0) & (column <= usable)
    own_worth = tl.load(worth + of_window, mask=column <= K, other=0.0)
    coin = tl.load(coins + of_window, mask=is_block, other=2.0)
    # Only those were summed: the others' chance is known, their worth where it is 1 or the window's last, less where
    # the coin is too large for it anyway.
    is_summed = is_block & (column < usable) & (own_worth < 1.0) & (coin < own_worth)
    chunk = tl.arange(0, CHUNKS)
    parts = tl.load(
        lacking + of_window[:, None] * NUM_CHUNKS + chunk[None, :],
        mask=is_summed[:, None] & (chunk < NUM_CHUNKS)[None, :],
        other=0.0,
    )
    lack = tl.sum(parts, 1)
    chance = tl.where(is_summed, lack / (lack + 1.0 - own_worth), own_worth)
    accepted = tl.max(tl.where(is_block & (coin < chance), column, 0), 0)
    return accepted, tl.sum(tl.where(column == accepted, own_worth, 0.0), 0)


@triton.jit
def outcome(
    worth, coins, decided, lacking, request, num_requests, K: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr, IS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Usable and accepted drafts of a window, and what the target's law is scaled by behind them."""
    usable = tl.load(decided + request)
    accepted = tl.load(decided + num_requests + request)
    scale = 1.0
    if IS_BLOCK:
        accepted, scale = _chances(worth, coins, lacking, request, usable, K, COLUMNS, NUM_CHUNKS, CHUNKS)
    return usable, accepted, scale


# ---- In the order of their launches


@triton.jit(do_not_specialize_on_alignment=("persistent_rows", "temperature", "threshold"))
def sum_rows(
    logits, stride, persistent_rows, temperature, threshold, largest, sums, places,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    HAS_TOTAL: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of a row."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    divisor = tl.load(temperature + tl.load(persistent_rows + row))
    is_greedy = divisor == 0
    if HAS_TOTAL:  # noqa: SIM102
        if divisor != 0:
            return
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    lowest = float("-inf")
    if HAS_THRESHOLD:
        lowest = tl.where(is_greedy, float("-inf"), tl.load(threshold + row))
    x = tempered(logits + row * stride, ids, ids < NUM_IDS, tl.where(is_greedy, 1.0, divisor), lowest, HAS_THRESHOLD)
    top = tl.max(x, 0)
    of_chunk = row * NUM_CHUNKS + chunk
    tl.store(largest + of_chunk, top)
    if is_greedy:
        tl.store(places + of_chunk, tl.min(tl.where(x == top, ids, NUM_IDS), 0))
    else:
        tl.store(sums + of_chunk, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0))


@triton.jit
def _parts_of(row, is_row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Places of the chunks of a window's rows, [columns, chunks], and which of them there are."""
    chunk = tl.arange(0, CHUNKS)
    return row[:, None] * NUM_CHUNKS + chunk[None, :], is_row[:, None] & (chunk < NUM_CHUNKS)[None, :]


@triton.jit
def _argmax_of(largest, places, row, is_row, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """The best id of a window's rows, int64 [columns]."""
    part, is_part = _parts_of(row, is_row, NUM_CHUNKS, CHUNKS)
    tops = tl.load(largest + part, mask=is_part, other=float("-inf"))
    place = tl.load(places + part, mask=is_part, other=NUM_IDS)
    place = tl.min(tl.where(tops == tl.max(tops, 1)[:, None], place, NUM_IDS), 1)
    return tl.where(place >= NUM_IDS, 0, place).to(tl.int64)


@triton.jit
def _total_of(largest, sums, row, is_row, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """Logarithm of the sum of the exponentials of a window's rows, [columns]."""
    part, is_part = _parts_of(row, is_row, NUM_CHUNKS, CHUNKS)
    tops = tl.load(largest + part, mask=is_part, other=float("-inf"))
    top = tl.max(tops, 1)
    factor = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - top[:, None]))
    return top + tl.log(tl.sum(tl.load(sums + part, mask=is_part, other=0.0) * factor, 1))


@triton.jit
def _store_worth(worth, ratio, K: tl.constexpr, COLUMNS: tl.constexpr):
    """What the first so many drafts of a window are worth: the running product of their ratios, never above 1."""
    column = tl.arange(0, COLUMNS)
    so_far = 1.0
    tl.store(worth, 1.0)
    for length in tl.static_range(1, K + 1):
        so_far = tl.minimum(so_far * tl.sum(tl.where(column == length - 1, ratio, 0.0), 0), 1.0)
        tl.store(worth + length, so_far)


@triton.jit(
    do_not_specialize=("stride_request", "stride_column", "width", "num_state_rows"),
    do_not_specialize_on_alignment=(
        "threshold", "columns", "rows", "num_drafts", "token_pool", "counts", "keys", "temperature", "known_total",
    ),
)  # fmt: skip
def decide(
    logits, stride, threshold, columns, stride_request, stride_column, rows, num_drafts, token_pool, width, counts,
    num_state_rows, keys, temperature, draft_probabilities, largest, sums, places, known_total, total, argmax, worth,
    coins, decided,
    K: tl.constexpr, COLUMNS: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_THRESHOLD: tl.constexpr, HAS_TOTAL: tl.constexpr,
    IS_BLOCK: tl.constexpr, IS_FAST: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a request: totals or argmaxes of its rows; probabilities and coins of its drafts."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    source = tl.load(rows + request)
    divisor = tl.load(temperature + source)
    drafts_here = tl.load(num_drafts + request)
    column = tl.arange(0, COLUMNS)
    is_row = column <= drafts_here
    row = logits_row(columns, stride_request, stride_column, request, tl.minimum(column, K), K, HAS_COLUMNS)
    row = row.to(tl.int64)
    committed = tl.load(counts + source)
    start = tl.load(counts + num_state_rows + source)
    draft = tl.load(token_pool + source * width + committed + column, mask=column < drafts_here, other=-1)
    if divisor == 0:
        place = _argmax_of(largest, places, row, is_row, NUM_IDS, NUM_CHUNKS, CHUNKS)
        tl.store(argmax + row, place, mask=is_row)
        return
    if HAS_TOTAL:
        row_total = tl.load(known_total + row, mask=is_row, other=0.0)
    else:
        row_total = _total_of(largest, sums, row, is_row, NUM_CHUNKS, CHUNKS)
    tl.store(total + row, row_total, mask=is_row)
    # Where a draft is missing, the window ends.
    usable = tl.min(tl.where(draft >= 0, COLUMNS, column), 0)
    is_usable = column < usable
    x = tl.load(logits + row * stride + draft, mask=is_usable, other=float("-inf"))
    x = x * tl.div_rn(1.0, divisor)
    if HAS_THRESHOLD:
        x = tl.where(x >= tl.load(threshold + row, mask=is_usable, other=0.0), x, float("-inf"))
    target = tl.exp(x - row_total)
    law = (source * K + column) * NUM_IDS
    drawn = tl.load(draft_probabilities + law + draft, mask=is_usable, other=1.0)
    coin = uniform(tl.load(keys + source), start, column * NUM_PURPOSES + ACCEPTANCE, column * 0)
    tl.store(decided + request, usable)
    if IS_BLOCK:
        tl.store(coins + request * (K + 1) + column + 1, coin, mask=column < K)
        _store_worth(worth + request * (K + 1), tl.where(is_usable, target / drawn, 0.0), K, COLUMNS)
    else:
        is_accepted = is_usable & (coin * drawn < target)
        accepted = tl.min(tl.where(is_accepted, COLUMNS, column), 0)
        tl.store(decided + tl.num_programs(0) + request, accepted)


@triton.jit(
    do_not_specialize=("stride_request", "stride_column"),
    do_not_specialize_on_alignment=("threshold", "columns", "rows", "temperature"),
)
def sum_lacking(
    logits, stride, threshold, columns, stride_request, stride_column, rows, temperature, draft_probabilities, total,
    worth, coins, decided, lacking,
    K: tl.constexpr, COLUMNS: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_THRESHOLD: tl.constexpr, HAS_TOTAL: tl.constexpr,
    IS_BLOCK: tl.constexpr, IS_FAST: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk behind a block. A block's chance is at most its worth, and 1 where its worth is: most blocks
    are decided without the sum."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0) // (K - 1)
    length = tl.program_id(0) % (K - 1) + 1
    chunk = tl.program_id(1)
    source = tl.load(rows + request)
    divisor = tl.load(temperature + source)
    if divisor == 0:
        return
    own_worth = tl.load(worth + request * (K + 1) + length)
    coin = tl.load(coins + request * (K + 1) + length)
    if (length >= tl.load(decided + request)) | (own_worth >= 1.0) | (coin >= own_worth):
        return
    row = logits_row(columns, stride_request, stride_column, request, length, K, HAS_COLUMNS).to(tl.int64)
    lowest = float("-inf")
    if HAS_THRESHOLD:
        lowest = tl.load(threshold + row)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tempered(logits + row * stride, ids, ids < NUM_IDS, divisor, lowest, HAS_THRESHOLD)
    law = draft_probabilities + (source * K + length) * NUM_IDS
    drawn = tl.load(law + ids, mask=ids < NUM_IDS, other=0.0)
    lack = tl.maximum(own_worth * tl.exp(x - tl.load(total + row)) - drawn, 0.0)
    tl.store(lacking + (request * (K + 1) + length) * NUM_CHUNKS + chunk, tl.sum(lack, 0))
