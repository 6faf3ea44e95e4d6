"""Verification of drafts that were drawn from a law of their own, and the commit, on a GPU: target laws from logits,
coins, the token behind a rejection, counts. Its reference is `verify_draws` of sampling/verification.py with the commit
of execution/stages.py.

Belongs here: `standard` and `block` acceptance, greedy requests among them. Does not belong here: drafts that are
matched with the target's own samples (acceptance.py), which ids filters leave (filters.py).

1. One pass over the logits of all rows: partial sums of each law, the largest logit of greedy rows.
2. A program a request: the laws' totals, each draft's probabilities and coin; `standard` is decided here.
3. `block`: what a draft's law lacks of the target's behind a block, for blocks that their coin might let through.
4. A pass over one row of each request's logits and draft laws: the draw of the token behind the accepted drafts.
5. A program a request: commit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.noise import exponential, rough_exponential_of, uniform
from specbench.engine.kernels.overlap import launch_options

#: Logits of one program.
_CHUNK = 4096
#: Purposes among the streams of sampling/noise.py, and how many there are.
_TARGET_SAMPLE: tl.constexpr = tl.constexpr(0)
_ACCEPTANCE: tl.constexpr = tl.constexpr(2)
_RECOVERY: tl.constexpr = tl.constexpr(3)
_NUM_PURPOSES: tl.constexpr = tl.constexpr(4)


@dataclass(frozen=True, slots=True)
class DrawnWindows:
    """The requests of a step, one window each, and what verification reads and moves of their persistent rows."""

    # [B] int64: persistent rows
    rows: Tensor
    # [B] int64: drafts under verification; tokens sampled beyond accepted drafts; rows that run whatever is accepted
    num_drafts: Tensor
    samples: Tensor
    num_certain_rows: Tensor
    # [B, k + 1] int64: window column -> logits row. None: the logits' rows are the columns of the requests in order
    row_of_column: Tensor | None
    # [any, width] int64: committed tokens, then drafts
    token_pool: Tensor
    # [2, any] int64: committed and computed tokens
    counts: Tensor
    # [any] int64: request keys
    keys: Tensor
    # [any] fp32; 0 is greedy
    temperature: Tensor
    # [any, k, vocab] fp32: the laws that drafts were drawn from
    draft_probabilities: Tensor
    # [k + 1 + 6, B] int64, filled: tokens, then sampled, drafted, proposed (0), accepted, committed, computed
    packed: Tensor


def verify_and_commit(
    logits: Tensor,
    windows: DrawnWindows,
    persistent_row_of_logits: Tensor,
    *,
    is_block: bool,
    threshold: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    """logits [R, vocab] fp32, before temperature. persistent_row_of_logits [R] int64.

    threshold [R] fp32: ids whose logit over temperature is less are out. total [R] fp32: logarithm of the sum of the
    exponentials of what is left, where it is known already; greedy rows' are not read.
    """
    num_ids = logits.shape[1]
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    assert windows.draft_probabilities.is_contiguous() and windows.draft_probabilities.shape[2] == num_ids
    assert all(each is None or each.is_contiguous() for each in (threshold, total))
    assert windows.counts.is_contiguous() and windows.token_pool.is_contiguous() and windows.packed.stride(1) == 1
    work = _Work.of(logits, windows, is_block, threshold, total)
    work.sum_rows(persistent_row_of_logits)
    work.decide()
    if is_block:
        work.sum_lacking()
    work.draw()
    work.commit()


@dataclass(frozen=True, slots=True)
class _Work:
    """Intermediate results, and the launches over them in their order."""

    # [R, vocab] fp32
    logits: Tensor
    windows: DrawnWindows
    is_block: bool
    # [R] fp32
    threshold: Tensor | None
    known_total: Tensor | None
    # [R, chunks] fp32: largest logit over temperature, and sum of exponentials relative to it
    largest: Tensor
    sums: Tensor
    # [R, chunks] int32: the largest one's id
    places: Tensor
    # [R] fp32: logarithm of the sum of exponentials; [R] int64: argmax of a greedy row
    total: Tensor
    argmax: Tensor
    # [B, k + 1] fp32: worth of the first so many drafts; coin of the last of these (column 0: none)
    worth: Tensor
    coins: Tensor
    # [2, B] int32: drafts that count; accepted ones, as far as is known without the sums of `lacking`
    decided: Tensor
    # [B, k + 1, chunks] fp32: what the drafts' laws lack behind blocks
    lacking: Tensor
    # [B, chunks] fp32: best score of a draw behind the accepted drafts; [B, chunks] int32, its id
    scores: Tensor
    score_places: Tensor

    @classmethod
    def of(
        cls, logits: Tensor, windows: DrawnWindows, is_block: bool, threshold: Tensor | None, total: Tensor | None
    ) -> _Work:
        num_rows, num_ids = logits.shape
        num_chunks = triton.cdiv(num_ids, _CHUNK)
        num_requests, k = len(windows.rows), windows.draft_probabilities.shape[1]

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(*shape, dtype=dtype, device=logits.device)

        return cls(
            logits=logits,
            windows=windows,
            is_block=is_block,
            threshold=threshold,
            known_total=total,
            largest=new(num_rows, num_chunks),
            sums=new(num_rows, num_chunks),
            places=new(num_rows, num_chunks, dtype=torch.int32),
            total=new(num_rows),
            argmax=new(num_rows, dtype=torch.int64),
            worth=new(num_requests, k + 1),
            coins=new(num_requests, k + 1),
            decided=new(2, num_requests, dtype=torch.int32),
            lacking=new(num_requests, k + 1, num_chunks) if is_block else new(1),
            scores=new(num_requests, num_chunks),
            score_places=new(num_requests, num_chunks, dtype=torch.int32),
        )

    @property
    def _num_chunks(self) -> int:
        return self.largest.shape[1]

    @property
    def _num_requests(self) -> int:
        return len(self.windows.rows)

    def _shape(self) -> dict[str, object]:
        """Constants of every launch."""
        k = self.worth.shape[1] - 1
        return {
            "K": k,
            "COLUMNS": triton.next_power_of_2(k + 1),
            "NUM_IDS": self.logits.shape[1],
            "NUM_CHUNKS": self._num_chunks,
            "CHUNKS": triton.next_power_of_2(self._num_chunks),
            "BLOCK": _CHUNK,
            "HAS_COLUMNS": self.windows.row_of_column is not None,
            "HAS_THRESHOLD": self.threshold is not None,
            "HAS_TOTAL": self.known_total is not None,
            "IS_BLOCK": self.is_block,
            "IS_FAST": self.logits.is_cuda,
            **launch_options(self.logits.device),
        }

    def _columns(self) -> tuple[Tensor, int, int]:
        """Window column -> logits row, and its strides."""
        columns = self.windows.row_of_column
        return (self.argmax, 0, 0) if columns is None else (columns, columns.stride(0), columns.stride(1))

    def sum_rows(self, persistent_rows: Tensor) -> None:
        options = {name: value for name, value in self._shape().items() if name in _SUM_OPTIONS}
        _sum_rows[self.largest.shape](
            self.logits, self.logits.stride(0), persistent_rows, self.windows.temperature, self._threshold(),
            self.largest, self.sums, self.places, **options, num_warps=8,
        )  # fmt: skip

    def _threshold(self) -> Tensor:
        return self.largest if self.threshold is None else self.threshold

    def decide(self) -> None:
        windows = self.windows
        _decide[(self._num_requests,)](
            self.logits, self.logits.stride(0), self._threshold(), *self._columns(),
            windows.rows, windows.num_drafts, windows.token_pool, windows.token_pool.shape[1],
            windows.counts, windows.counts.shape[1], windows.keys, windows.temperature, windows.draft_probabilities,
            self.largest, self.sums, self.places, self.total if self.known_total is None else self.known_total,
            self.total, self.argmax, self.worth, self.coins, self.decided,
            **self._shape(), num_warps=4,
        )  # fmt: skip

    def sum_lacking(self) -> None:
        k = self.worth.shape[1] - 1
        if k < 2:
            return
        windows = self.windows
        _sum_lacking[(self._num_requests * (k - 1), self._num_chunks)](
            self.logits, self.logits.stride(0), self._threshold(), *self._columns(),
            windows.rows, windows.temperature, windows.draft_probabilities, self.total, self.worth, self.coins,
            self.decided, self.lacking, **self._shape(), num_warps=8,
        )  # fmt: skip

    def draw(self) -> None:
        windows = self.windows
        _draw[(self._num_requests, self._num_chunks)](
            self.logits, self.logits.stride(0), self._threshold(), *self._columns(),
            windows.rows, windows.counts, windows.counts.shape[1], windows.keys, windows.temperature,
            windows.draft_probabilities, self.total, self.worth, self.coins, self.decided, self.lacking,
            self.scores, self.score_places, **self._shape(), num_warps=8,
        )  # fmt: skip

    def commit(self) -> None:
        windows = self.windows
        _commit[(self._num_requests,)](
            self.logits, self.logits.stride(0), self._threshold(), *self._columns(),
            windows.rows, windows.num_drafts, windows.samples, windows.num_certain_rows,
            windows.token_pool, windows.token_pool.shape[1], windows.counts, windows.counts.shape[1], windows.keys,
            windows.temperature, windows.packed, windows.packed.stride(0), self.total, self.argmax, self.worth,
            self.coins, self.decided, self.lacking, self.scores, self.score_places,
            **self._shape(), num_warps=1,
        )  # fmt: skip


_SUM_OPTIONS = ("NUM_IDS", "NUM_CHUNKS", "BLOCK", "HAS_THRESHOLD", "HAS_TOTAL", "MAY_OVERLAP")


# ---- What kernels share


@triton.jit
def _tempered(logits, ids, is_id, divisor, threshold, HAS_THRESHOLD: tl.constexpr):
    """Logits over temperature; what is below the threshold is out."""
    x = tl.load(logits + ids, mask=is_id, other=float("-inf")) * tl.div_rn(1.0, divisor)
    if HAS_THRESHOLD:
        x = tl.where(x >= threshold, x, float("-inf"))
    return x


@triton.jit
def _logits_row(columns, stride_request, stride_column, request, column, K: tl.constexpr, HAS_COLUMNS: tl.constexpr):
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
def _outcome(
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
def _sum_rows(
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
    x = _tempered(logits + row * stride, ids, ids < NUM_IDS, tl.where(is_greedy, 1.0, divisor), lowest, HAS_THRESHOLD)
    top = tl.max(x, 0)
    of_chunk = row * NUM_CHUNKS + chunk
    tl.store(largest + of_chunk, top)
    if is_greedy:
        tl.store(places + of_chunk, tl.min(tl.where(x == top, ids, NUM_IDS), 0))
    else:
        tl.store(sums + of_chunk, tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0))


@triton.jit(
    do_not_specialize=("stride_request", "stride_column", "width", "num_state_rows"),
    do_not_specialize_on_alignment=(
        "threshold", "columns", "rows", "num_drafts", "token_pool", "counts", "keys", "temperature", "known_total",
    ),
)  # fmt: skip
def _decide(
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
    row = _logits_row(columns, stride_request, stride_column, request, tl.minimum(column, K), K, HAS_COLUMNS)
    row = row.to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    part = row[:, None] * NUM_CHUNKS + chunk[None, :]
    is_part = is_row[:, None] & (chunk < NUM_CHUNKS)[None, :]
    if divisor == 0:
        tops = tl.load(largest + part, mask=is_part, other=float("-inf"))
        place = tl.load(places + part, mask=is_part, other=NUM_IDS)
        top = tl.max(tops, 1)
        place = tl.min(tl.where(tops == top[:, None], place, NUM_IDS), 1)
        tl.store(argmax + row, tl.where(place >= NUM_IDS, 0, place).to(tl.int64), mask=is_row)
        return
    if HAS_TOTAL:
        row_total = tl.load(known_total + row, mask=is_row, other=0.0)
    else:
        tops = tl.load(largest + part, mask=is_part, other=float("-inf"))
        top = tl.max(tops, 1)
        factor = tl.where(tops == float("-inf"), 0.0, tl.exp(tops - top[:, None]))
        row_total = top + tl.log(tl.sum(tl.load(sums + part, mask=is_part, other=0.0) * factor, 1))
    tl.store(total + row, row_total, mask=is_row)
    committed = tl.load(counts + source)
    start = tl.load(counts + num_state_rows + source)
    draft = tl.load(token_pool + source * width + committed + column, mask=column < drafts_here, other=-1)
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
    coin = uniform(tl.load(keys + source), start, column * _NUM_PURPOSES + _ACCEPTANCE, column * 0)
    tl.store(decided + request, usable)
    if IS_BLOCK:
        tl.store(coins + request * (K + 1) + column + 1, coin, mask=column < K)
        ratio = tl.where(is_usable, target / drawn, 0.0)
        worth_so_far = 1.0
        tl.store(worth + request * (K + 1), 1.0)
        for length in tl.static_range(1, K + 1):
            worth_so_far = tl.minimum(worth_so_far * tl.sum(tl.where(column == length - 1, ratio, 0.0), 0), 1.0)
            tl.store(worth + request * (K + 1) + length, worth_so_far)
    else:
        is_accepted = is_usable & (coin * drawn < target)
        accepted = tl.min(tl.where(is_accepted, COLUMNS, column), 0)
        tl.store(decided + tl.num_programs(0) + request, accepted)


@triton.jit(
    do_not_specialize=("stride_request", "stride_column"),
    do_not_specialize_on_alignment=("threshold", "columns", "rows", "temperature"),
)
def _sum_lacking(
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
    row = _logits_row(columns, stride_request, stride_column, request, length, K, HAS_COLUMNS).to(tl.int64)
    lowest = float("-inf")
    if HAS_THRESHOLD:
        lowest = tl.load(threshold + row)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    x = _tempered(logits + row * stride, ids, ids < NUM_IDS, divisor, lowest, HAS_THRESHOLD)
    law = draft_probabilities + (source * K + length) * NUM_IDS
    drawn = tl.load(law + ids, mask=ids < NUM_IDS, other=0.0)
    lack = tl.maximum(own_worth * tl.exp(x - tl.load(total + row)) - drawn, 0.0)
    tl.store(lacking + (request * (K + 1) + length) * NUM_CHUNKS + chunk, tl.sum(lack, 0))


@triton.jit(
    do_not_specialize=("stride_request", "stride_column", "num_state_rows"),
    do_not_specialize_on_alignment=("threshold", "columns", "rows", "counts", "keys", "temperature"),
)
def _draw(
    logits, stride, threshold, columns, stride_request, stride_column, rows, counts, num_state_rows, keys, temperature,
    draft_probabilities, total, worth, coins, decided, lacking, scores, score_places,
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
    divisor = tl.load(temperature + source)
    if divisor == 0:
        return
    usable, accepted, scale = _outcome(
        worth, coins, decided, lacking, request, num_requests, K, COLUMNS, NUM_CHUNKS, CHUNKS, IS_BLOCK
    )
    is_recovery = accepted < usable
    row = _logits_row(columns, stride_request, stride_column, request, accepted, K, HAS_COLUMNS).to(tl.int64)
    lowest = float("-inf")
    if HAS_THRESHOLD:
        lowest = tl.load(threshold + row)
    ids = chunk * BLOCK + tl.arange(0, BLOCK)
    is_id = ids < NUM_IDS
    x = _tempered(logits + row * stride, ids, is_id, divisor, lowest, HAS_THRESHOLD)
    weight = tl.exp(x - tl.load(total + row))
    position = tl.load(counts + source) + accepted
    if is_recovery:
        position = tl.load(counts + num_state_rows + source)
        law = draft_probabilities + (source * K + accepted) * NUM_IDS
        weight = tl.maximum(scale * weight - tl.load(law + ids, mask=is_id, other=0.0), 0.0)
    stream = tl.where(is_recovery, accepted * _NUM_PURPOSES + _RECOVERY, _TARGET_SAMPLE)
    key = tl.load(keys + source)
    u = uniform(key, position, stream, ids)
    at = request * NUM_CHUNKS + chunk
    rough = weight / rough_exponential_of(u, IS_FAST)
    best = tl.max(rough, 0)
    # Rough scores are within a tenth of this. Exact ones are made one by one of those near the best.
    least = tl.where(best > 0, best * 0.999, float("inf"))
    place = tl.min(tl.where(rough >= least, ids, NUM_IDS), 0)
    best = 0.0
    best_place = NUM_IDS
    while place < NUM_IDS:
        score = tl.sum(tl.where(ids == place, weight, 0.0), 0) / exponential(key, position, stream, place)
        best_place = tl.where(score > best, place, best_place)
        best = tl.maximum(score, best)
        place = tl.min(tl.where((rough >= least) & (ids > place), ids, NUM_IDS), 0)
    tl.store(scores + at, best)
    tl.store(score_places + at, best_place)


@triton.jit
def _draw_of_law(
    logits, divisor, lowest, total, key, position, stream, NUM_IDS: tl.constexpr, HAS_THRESHOLD: tl.constexpr
):
    """A draw from the target's law, by one program; hardly ever needed."""
    best = -1.0
    place = NUM_IDS
    for start in range(0, NUM_IDS, 256):
        ids = start + tl.arange(0, 256)
        x = _tempered(logits, ids, ids < NUM_IDS, divisor, lowest, HAS_THRESHOLD)
        score = tl.where(ids < NUM_IDS, tl.exp(x - total) / exponential(key, position, stream, ids), -1.0)
        most = tl.max(score, 0)
        first = tl.min(tl.where(score == most, ids, NUM_IDS), 0)
        place = tl.where(most > best, first, place)
        best = tl.maximum(best, most)
    return place


# Tokens of a window are read and written in place: one warp, so that all are read before the first is written.
@triton.jit(
    do_not_specialize=("stride_request", "stride_column", "width", "num_state_rows", "packed_stride"),
    do_not_specialize_on_alignment=(
        "threshold", "columns", "rows", "num_drafts", "samples", "num_certain_rows", "token_pool", "counts", "keys",
        "temperature", "packed",
    ),
)  # fmt: skip
def _commit(
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
        row = _logits_row(columns, stride_request, stride_column, request, tl.minimum(column, K), K, HAS_COLUMNS)
        tokens = tl.load(argmax + row, mask=column <= drafts_here, other=0)
        accepted = tl.min(tl.where(is_drafted & (drafts == tokens), COLUMNS, column), 0)
    else:
        usable, accepted, _ = _outcome(
            worth, coins, decided, lacking, request, num_requests, K, COLUMNS, NUM_CHUNKS, CHUNKS, IS_BLOCK
        )
        chunk = tl.arange(0, CHUNKS)
        at = request * NUM_CHUNKS + chunk
        score = tl.load(scores + at, mask=chunk < NUM_CHUNKS, other=-1.0)
        place = tl.load(score_places + at, mask=chunk < NUM_CHUNKS, other=NUM_IDS)
        best = tl.max(score, 0)
        last = tl.min(tl.where(score == best, place, NUM_IDS), 0)
        if best <= 0:
            # Laws that are equal but for rounding lack nothing: whatever was rejected, the target's own law is right.
            row = _logits_row(columns, stride_request, stride_column, request, accepted, K, HAS_COLUMNS).to(tl.int64)
            lowest = float("-inf")
            if HAS_THRESHOLD:
                lowest = tl.load(threshold + row)
            stream = tl.where(accepted < usable, accepted * _NUM_PURPOSES + _RECOVERY, _TARGET_SAMPLE)
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
    of_request = packed + request
    tl.store(of_request + column * packed_stride, tokens, mask=column <= K)
    tl.store(of_request + (K + 1) * packed_stride, sampled)
    tl.store(of_request + (K + 2) * packed_stride, tl.sum(is_drafted.to(tl.int64), 0))
    tl.store(of_request + (K + 3) * packed_stride, accepted * 0)
    tl.store(of_request + (K + 4) * packed_stride, accepted)
    tl.store(of_request + (K + 5) * packed_stride, committed + sampled)
    tl.store(of_request + (K + 6) * packed_stride, computed + valid)
