"""Verification of drafts that were drawn from a law of their own, and the commit, on a GPU: target laws from logits,
coins, the token behind a rejection, counts. Its reference is `verify_draws` of sampling/verification.py with the commit
of execution/stages.py.

Belongs here: how to ask, the intermediate results, and the order of the launches; `standard` and `block` acceptance,
greedy requests among them. Does not belong here: the kernels (drawn_acceptance.py: 1 to 3, drawn_commit.py: 4 and 5),
drafts that are matched with the target's own samples (acceptance.py), which ids filters leave (filters.py).

1. One pass over the logits of all rows: partial sums of each law, the largest logit of greedy rows.
2. A program a request: the laws' totals, each draft's probabilities and coin; `standard` is decided here.
3. `block`: what a draft's law lacks of the target's behind a block, for blocks that their coin might let through.
4. A pass over one row of each request's logits and draft laws: the draw of the token behind the accepted drafts.
5. A program a request: commit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specbench.engine.kernels.drawn_acceptance import decide, sum_lacking, sum_rows
from specbench.engine.kernels.drawn_commit import commit, draw
from specbench.engine.kernels.overlap import launch_options

#: Logits of one program.
_CHUNK = 4096


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
        sum_rows[self.largest.shape](
            self.logits, self.logits.stride(0), persistent_rows, self.windows.temperature, self._threshold(),
            self.largest, self.sums, self.places, **options, num_warps=8,
        )  # fmt: skip

    def _threshold(self) -> Tensor:
        return self.largest if self.threshold is None else self.threshold

    def decide(self) -> None:
        windows = self.windows
        decide[(self._num_requests,)](
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
        sum_lacking[(self._num_requests * (k - 1), self._num_chunks)](
            self.logits, self.logits.stride(0), self._threshold(), *self._columns(),
            windows.rows, windows.temperature, windows.draft_probabilities, self.total, self.worth, self.coins,
            self.decided, self.lacking, **self._shape(), num_warps=8,
        )  # fmt: skip

    def draw(self) -> None:
        windows = self.windows
        draw[self.scores.shape](
            self.logits, self.logits.stride(0), self._threshold(), *self._columns(),
            windows.rows, windows.counts, windows.counts.shape[1], windows.keys, windows.temperature,
            windows.draft_probabilities, self.total, self.worth, self.coins, self.decided, self.lacking,
            self.scores, self.score_places, 0, **self._shape(), num_warps=8,
        )  # fmt: skip

    def commit(self) -> None:
        windows = self.windows
        commit[(self._num_requests,)](
            self.logits, self.logits.stride(0), self._threshold(), *self._columns(),
            windows.rows, windows.num_drafts, windows.samples, windows.num_certain_rows,
            windows.token_pool, windows.token_pool.shape[1], windows.counts, windows.counts.shape[1], windows.keys,
            windows.temperature, windows.packed, windows.packed.stride(0), self.total, self.argmax, self.worth,
            self.coins, self.decided, self.lacking, self.scores, self.score_places,
            **self._shape(), num_warps=1,
        )  # fmt: skip


_SUM_OPTIONS = ("NUM_IDS", "NUM_CHUNKS", "BLOCK", "HAS_THRESHOLD", "HAS_TOTAL", "MAY_OVERLAP")
