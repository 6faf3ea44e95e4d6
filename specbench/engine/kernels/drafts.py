"""Drafts on a GPU: the argmax of logits, into the token pool at once or by the kernel that reads it; their number.

Belongs here: what is written to the pool behind a drafting pass, or in place of one. Does not belong here: the logits'
argmax (head_best.py, sampling.py), inputs of the next pass (draft_inputs.py), drafts that are drawn
(tempered_sampling.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.sampling import ChunkBests, best_of_bests, bests_warps

_BLOCK = 128


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """Argmaxes that are known by the best of each part of the logits, and are not in the token pool yet."""

    bests: ChunkBests
    num_ids: int
    # [num_reqs] int64: pool column of each request's draft 0, of which this is number `index`
    columns: Tensor
    index: int


def store_draft(token_pool: Tensor, rows: Tensor, columns: Tensor, index: int, token_ids: Tensor) -> None:
    """token_pool[rows, columns + index] = token_ids; rows, columns, token_ids [num_reqs] int64."""
    assert token_pool.is_contiguous() and rows.is_contiguous() and columns.is_contiguous()
    _store_draft[(triton.cdiv(len(rows), _BLOCK),)](
        token_pool, rows, columns, token_ids.contiguous(), len(rows), token_pool.shape[1], index,
        BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("num_reqs", "width", "index"),
    do_not_specialize_on_alignment=("token_pool", "rows", "columns", "token_ids"),
)
def _store_draft(token_pool, rows, columns, token_ids, num_reqs, width, index, BLOCK: tl.constexpr):
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < num_reqs
    row = tl.load(rows + request, mask=is_request, other=0)
    column = tl.load(columns + request, mask=is_request, other=0)
    token = tl.load(token_ids + request, mask=is_request, other=0)
    tl.store(token_pool + row * width + column + index, token, mask=is_request)


def store_recorded(text: Tensor, token_pool: Tensor, rows: Tensor, columns: Tensor, wanted: Tensor, k: int) -> None:
    """token_pool[rows, columns + i] for i < k: what text [any, width] has there (-1: nothing is known), number `wanted`
    made wrong (see proposers/stub.py); rows, columns, wanted [num_reqs] int64."""
    assert text.is_contiguous() and token_pool.is_contiguous()
    assert rows.is_contiguous() and columns.is_contiguous() and wanted.is_contiguous()
    _store_recorded[(len(rows),)](
        text, token_pool, rows, columns, wanted, text.shape[1], token_pool.shape[1],
        K=k, BLOCK=triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=("text_width", "width"),
    do_not_specialize_on_alignment=("text", "token_pool", "rows", "columns", "wanted"),
)
def _store_recorded(text, token_pool, rows, columns, wanted, text_width, width, K: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    row = tl.load(rows + request)
    column = tl.load(columns + request) + index
    right = tl.load(text + row * text_width + tl.minimum(column, text_width - 1), mask=index < K, other=-1)
    is_spoilt = (index == tl.load(wanted + request)) & (right >= 0)
    token = tl.where(is_spoilt, tl.where(right > 0, right - 1, 1), right)
    tl.store(token_pool + row * width + column, token, mask=index < K)


def close_draft(draft: OpenDraft, token_pool: Tensor, rows: Tensor) -> Tensor:
    """The ids (ties: the lowest), int64 [num_reqs], which are in the pool thereafter, as by `store_draft`."""
    token_ids = torch.empty_like(rows)
    num_chunks = draft.bests.values.shape[1]
    assert token_pool.is_contiguous() and rows.is_contiguous() and draft.columns.is_contiguous()
    _store_best[(len(rows),)](
        draft.bests.values, draft.bests.places, token_pool, rows, draft.columns, token_ids,
        token_pool.shape[1], draft.index,
        NUM_IDS=draft.num_ids, NUM_CHUNKS=num_chunks, BLOCK=triton.next_power_of_2(num_chunks),
        **launch_options(rows.device), num_warps=bests_warps(num_chunks),
    )  # fmt: skip
    return token_ids


@triton.jit(
    do_not_specialize=("width", "index"),
    do_not_specialize_on_alignment=("token_pool", "rows", "columns", "token_ids"),
)
def _store_best(
    values, places, token_pool, rows, columns, token_ids, width, index,
    NUM_IDS: tl.constexpr, NUM_CHUNKS: tl.constexpr, BLOCK: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    place = tl.load(rows + request) * width + tl.load(columns + request) + index
    token = best_of_bests(values, places, request, NUM_IDS, NUM_CHUNKS, BLOCK)
    tl.store(token_ids + request, token)
    tl.store(token_pool + place, token)


def count_drafts(
    token_pool: Tensor, rows: Tensor, columns: Tensor, samples: Tensor, k: int, num_proposed: Tensor
) -> None:
    """num_proposed [num_reqs] int64, filled: drafts before the first that is missing (-1) among the k from columns on;
    0 where samples [num_reqs] is."""
    assert token_pool.is_contiguous() and rows.is_contiguous() and columns.is_contiguous() and samples.is_contiguous()
    _count_drafts[(len(rows),)](
        token_pool, rows, columns, samples, num_proposed, token_pool.shape[1],
        K=k, BLOCK=triton.next_power_of_2(k + 1), num_warps=1,
    )  # fmt: skip


def count_drafts_reference(token_pool: Tensor, rows: Tensor, columns: Tensor, samples: Tensor, k: int) -> Tensor:
    """The same by torch's operations, [num_reqs]."""
    drafts = token_pool[rows[:, None], columns[:, None] + rows.new_ones(k).cumsum(0) - 1]
    return (drafts >= 0).long().cumprod(dim=1).sum(dim=1) * (samples > 0)


@triton.jit(
    do_not_specialize=("width",),
    do_not_specialize_on_alignment=("token_pool", "rows", "columns", "samples", "num_proposed"),
)
def _count_drafts(token_pool, rows, columns, samples, num_proposed, width, K: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    window = token_pool + tl.load(rows + request) * width + tl.load(columns + request)
    draft = tl.load(window + index, mask=index < K, other=-1)
    # Column K is missing always.
    count = tl.min(tl.where(draft >= 0, BLOCK, index), 0).to(tl.int64)
    tl.store(num_proposed + request, tl.where(tl.load(samples + request) > 0, count, 0))
