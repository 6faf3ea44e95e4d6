"""The token behind a window's accepted drafts, and the commit.

Belongs here: the last kernels behind drawn_verification.py.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl

from specbench.engine.kernels.drawn_acceptance import NUM_PURPOSES, logits_row, outcome, tempered
from specbench.engine.kernels.noise import exponential, inverse_ceiling, random_bits

#: Threads of a program that draws.
_COLUMNS: tl.constexpr = tl.constexpr(256)
#: Purposes among the streams of sampling/noise.py.
_TARGET_SAMPLE: tl.constexpr = tl.constexpr(0)
_RECOVERY: tl.constexpr = tl.constexpr(3)


@triton.jit
def _weight_behind(
    logits, law, ids, divisor, lowest, total, scale, is_recovery, NUM_IDS: tl.constexpr, HAS_THRESHOLD: tl.constexpr
):
    """What ids weigh in the draw behind the accepted drafts; 0 for none."""
    weight = tl.exp(tempered(logits, ids, ids < NUM_IDS, divisor, lowest, HAS_THRESHOLD) - total)
    if is_recovery:
        weight = tl.maximum(scale * weight - tl.load(law + ids, mask=ids < NUM_IDS, other=0.0), 0.0)
    return weight


@triton.jit
def _best_behind(
    logits, law, first, divisor, lowest, total, scale, is_recovery, key, position, stream, zero,
    NUM_IDS: tl.constexpr, BLOCK: tl.constexpr, HAS_THRESHOLD: tl.constexpr, IS_FAST: tl.constexpr,
):  # fmt: skip
    """The best score of a chunk's ids, 0 where none weighs anything, and whose it is. A thread has a column of ids; as
    in filter_rows.py, `zero` is 0."""
    ids = (tl.arange(0, BLOCK // _COLUMNS) * _COLUMNS)[:, None] + tl.arange(0, _COLUMNS)[None, :]
    ids = (first + zero) + ids
    weight = _weight_behind(logits, law, ids, divisor, lowest, total, scale, is_recovery, NUM_IDS, HAS_THRESHOLD)
    bounds = tl.max(weight * inverse_ceiling(random_bits(key, position, stream, ids), IS_FAST), 0)
    # Columns whose bound is above the best score so far are scored, the highest first.
    column = tl.arange(0, _COLUMNS)
    best = 0.0
    best_place = NUM_IDS
    bound = tl.max(bounds, 0)
    while (bound > 0) & (bound >= best * 0.9999):
        here = tl.min(tl.where(bounds == bound, column, _COLUMNS), 0)
        some = first + tl.arange(0, BLOCK // _COLUMNS) * _COLUMNS + here
        score = _weight_behind(
            logits, law, some, divisor, lowest, total, scale, is_recovery, NUM_IDS, HAS_THRESHOLD
        ) / exponential(key, position, stream, some)
        top = tl.max(score, 0)
        place = tl.min(tl.where(score == top, some, NUM_IDS), 0)
        is_better = (top > best) | ((top == best) & (place < best_place))
        best_place = tl.where(is_better, place, best_place)
        best = tl.maximum(top, best)
        bounds = tl.where(column == here, 0.0, bounds)
        bound = tl.max(bounds, 0)
    return best, best_place


@triton.jit(
    do_not_specialize=("stride_request", "stride_column", "num_state_rows", "zero"),
    do_not_specialize_on_alignment=("threshold", "columns", "rows", "counts", "keys", "temperature"),
)
def draw(
    logits, stride, threshold, columns, stride_request, stride_column, rows, counts, num_state_rows, keys, temperature,
    draft_probabilities, total, worth, coins, decided, lacking, scores, score_places, zero,
    K: tl.constexpr, COLUMNS: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_THRESHOLD: tl.constexpr, HAS_TOTAL: tl.constexpr,
    IS_BLOCK: tl.constexpr, IS_FAST: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a chunk of the row behind a window's accepted drafts: the best of what the draft's law lacks of the
    target's behind a rejection, else of the target's law."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    chunk = tl.program_id(1)
    num_requests = tl.num_programs(0)
    source = tl.load(rows + request)
    # What nobody decided of a greedy request is read and not used.
    usable, accepted, scale = outcome(
        worth, coins, decided, lacking, request, num_requests, K, COLUMNS, NUM_CHUNKS, CHUNKS, IS_BLOCK
    )
    divisor = tl.load(temperature + source)
    if divisor == 0:
        return
    is_recovery = accepted < usable
    row = logits_row(columns, stride_request, stride_column, request, accepted, K, HAS_COLUMNS).to(tl.int64)
    lowest = float("-inf")
    if HAS_THRESHOLD:
        lowest = tl.load(threshold + row)
    key, row_total = tl.load(keys + source), tl.load(total + row)
    position = tl.load(counts + source) + accepted
    if is_recovery:
        position = tl.load(counts + num_state_rows + source)
    stream = tl.where(is_recovery, accepted * NUM_PURPOSES + _RECOVERY, _TARGET_SAMPLE)
    own_logits = logits + row * stride
    law = draft_probabilities + (source * K + tl.minimum(accepted, K - 1)) * NUM_IDS
    best, place = _best_behind(
        own_logits, law, chunk * BLOCK, divisor, lowest, row_total, scale, is_recovery, key, position, stream, zero,
        NUM_IDS, BLOCK, HAS_THRESHOLD, IS_FAST,
    )  # fmt: skip
    at = request * NUM_CHUNKS + chunk
    tl.store(scores + at, best)
    tl.store(score_places + at, place)


@triton.jit
def _draw_of_law(
    logits, divisor, lowest, total, key, position, stream, NUM_IDS: tl.constexpr, HAS_THRESHOLD: tl.constexpr
):
    """A draw from the target's law, by one program; hardly ever needed."""
    best = -1.0
    place = NUM_IDS
    for start in range(0, NUM_IDS, 256):
        ids = start + tl.arange(0, 256)
        x = tempered(logits, ids, ids < NUM_IDS, divisor, lowest, HAS_THRESHOLD)
        score = tl.where(ids < NUM_IDS, tl.exp(x - total) / exponential(key, position, stream, ids), -1.0)
        most = tl.max(score, 0)
        first = tl.min(tl.where(score == most, ids, NUM_IDS), 0)
        place = tl.where(most > best, first, place)
        best = tl.maximum(best, most)
    return place


@triton.jit
def _best_of_draws(scores, places, request, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr):
    """The best score behind a window's accepted drafts, and whose it is."""
    chunk = tl.arange(0, CHUNKS)
    at = request * NUM_CHUNKS + chunk
    score = tl.load(scores + at, mask=chunk < NUM_CHUNKS, other=-1.0)
    place = tl.load(places + at, mask=chunk < NUM_CHUNKS, other=NUM_IDS)
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, place, NUM_IDS), 0)


@triton.jit
def _pack(
    packed, stride, tokens, is_drafted, sampled, accepted, committed, computed, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """A request's column of what the host reads of a step; `committed` before it, `computed` behind it."""
    column = tl.arange(0, COLUMNS)
    tl.store(packed + column * stride, tokens, mask=column <= K)
    tl.store(packed + (K + 1) * stride, sampled)
    tl.store(packed + (K + 2) * stride, tl.sum(is_drafted.to(tl.int64), 0))
    tl.store(packed + (K + 3) * stride, accepted * 0)
    tl.store(packed + (K + 4) * stride, accepted)
    tl.store(packed + (K + 5) * stride, committed + sampled)
    tl.store(packed + (K + 6) * stride, computed)


# Tokens of a window are read and written in place: one warp, so that all are read before the first is written.
@triton.jit(
    do_not_specialize=("stride_request", "stride_column", "width", "num_state_rows", "packed_stride"),
    do_not_specialize_on_alignment=(
        "threshold", "columns", "rows", "num_drafts", "samples", "num_certain_rows", "token_pool", "counts", "keys",
        "temperature", "packed",
    ),
)  # fmt: skip
def commit(
    logits, stride, threshold, columns, stride_request, stride_column, rows, num_drafts, samples, num_certain_rows,
    token_pool, width, counts, num_state_rows, keys, temperature, packed, packed_stride, total, argmax, worth, coins,
    decided, lacking, scores, score_places,
    K: tl.constexpr, COLUMNS: tl.constexpr, NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, HAS_COLUMNS: tl.constexpr, HAS_THRESHOLD: tl.constexpr, HAS_TOTAL: tl.constexpr,
    IS_BLOCK: tl.constexpr, IS_FAST: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a request."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0)
    num_requests = tl.num_programs(0)
    source = tl.load(rows + request)
    committed = tl.load(counts + source)
    computed = tl.load(counts + num_state_rows + source)
    drafts_here = tl.load(num_drafts + request)
    column = tl.arange(0, COLUMNS)
    window = token_pool + source * width + committed + column
    drafts = tl.load(window, mask=column < K, other=-1)
    is_drafted = (column < drafts_here) & (drafts >= 0)
    if tl.load(temperature + source) == 0:
        row = logits_row(columns, stride_request, stride_column, request, tl.minimum(column, K), K, HAS_COLUMNS)
        tokens = tl.load(argmax + row, mask=column <= drafts_here, other=0)
        accepted = tl.min(tl.where(is_drafted & (drafts == tokens), COLUMNS, column), 0)
    else:
        usable, accepted, _ = outcome(
            worth, coins, decided, lacking, request, num_requests, K, COLUMNS, NUM_CHUNKS, CHUNKS, IS_BLOCK
        )
        best, last = _best_of_draws(scores, score_places, request, NUM_IDS, NUM_CHUNKS, CHUNKS)
        if best <= 0:
            # Laws that are equal but for rounding lack nothing: whatever was rejected, the target's own law is right.
            row = logits_row(columns, stride_request, stride_column, request, accepted, K, HAS_COLUMNS).to(tl.int64)
            lowest = float("-inf")
            if HAS_THRESHOLD:
                lowest = tl.load(threshold + row)
            stream = tl.where(accepted < usable, accepted * NUM_PURPOSES + _RECOVERY, _TARGET_SAMPLE)
            last = _draw_of_law(
                logits + row * stride, tl.load(temperature + source), lowest, tl.load(total + row),
                tl.load(keys + source), tl.where(accepted < usable, computed, committed + accepted), stream,
                NUM_IDS, HAS_THRESHOLD,
            )  # fmt: skip
        last = tl.where(last >= NUM_IDS, 0, last)
        tokens = tl.where(column == accepted, last.to(tl.int64), drafts)
    accepted = accepted.to(tl.int64)
    sampled = accepted + tl.load(samples + request)
    valid = accepted + tl.load(num_certain_rows + request)
    tl.store(window, tokens, mask=column <= K)
    tl.store(counts + source, committed + sampled)
    tl.store(counts + num_state_rows + source, computed + valid)
    _pack(
        packed + request, packed_stride, tokens, is_drafted, sampled, accepted, committed, computed + valid, K, COLUMNS
    )
