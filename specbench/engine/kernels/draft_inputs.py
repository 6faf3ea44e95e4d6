"""Inputs of drafting: behind a verification, which rows of all modules run and the target's hiddens at them, with the
window of the newest hiddens moved on; and of each module, from the token pool to what its first matrix takes. A launch
each on a GPU.

Belongs here: the kernels and their torch references. Why stale rows run again, proposers/mtp_multi.py says.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.all_reduce import num_programs, sum_over_ranks
from specbench.engine.kernels.inboxes import EMPTY, OwnIds
from specbench.engine.kernels.norm import rms_norm_reference
from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.sampling import best_of_bests
from specbench.engine.kernels.step_rows import PoolTokens

_BLOCK = 128
_BLOCK_HIDDEN = 256


def draft_rows(
    first_position: Tensor, num_valid: Tensor, num_accepted: Tensor, num_modules: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From the target's first position, its valid rows and its accepted drafts to the pass' first position, its live
    rows (the stale ones first) and the index of the last of these among all its rows, num_modules + 1 a request.

    All [num_reqs] int64.
    """
    first, num_live, last_rows = (torch.empty_like(first_position) for _ in range(3))
    num_reqs = len(first_position)
    _draft_rows[(triton.cdiv(num_reqs, _BLOCK),)](
        first_position, num_valid, num_accepted, first, num_live, last_rows, num_reqs,
        MODULES=num_modules, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return first, num_live, last_rows


def draft_rows_reference(
    first_position: Tensor, num_valid: Tensor, num_accepted: Tensor, num_modules: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's operations."""
    num_stale = torch.minimum((num_modules - 1 - num_accepted).clamp_min(0), first_position)
    num_live = num_stale + num_valid
    starts = torch.arange(len(first_position), device=first_position.device) * (num_modules + 1)
    return first_position - num_stale, num_live, starts + num_live - 1


@triton.jit(
    do_not_specialize=("num_reqs",),
    do_not_specialize_on_alignment=(
        "first_position",
        "num_valid",
        "num_accepted",
        "first",
        "num_live",
        "last_rows",
    ),
)
def _draft_rows(
    first_position, num_valid, num_accepted, first, num_live, last_rows, num_reqs,
    MODULES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = request < num_reqs
    position = tl.load(first_position + request, mask=is_request, other=0)
    accepted = tl.load(num_accepted + request, mask=is_request, other=0)
    stale = tl.minimum(tl.maximum(MODULES - 1 - accepted, 0), position)
    live = stale + tl.load(num_valid + request, mask=is_request, other=0)
    tl.store(first + request, position - stale, mask=is_request)
    tl.store(num_live + request, live, mask=is_request)
    tl.store(last_rows + request, request * (MODULES + 1) + live - 1, mask=is_request)


def draft_hiddens(
    hidden_states: Tensor, window: Tensor, rows: Tensor, first_position: Tensor, num_valid: Tensor, first: Tensor,
    num_rows: int,
) -> Tensor:  # fmt: skip
    """The target's hidden at each of the pass' rows, [num_reqs * num_rows, hidden]: from this step's rows, or from the
    window for those before them. Then the window holds the newest valid rows' hiddens.

    hidden_states [num_reqs * rows, hidden]; window [any, size, hidden], changed; rows [num_reqs] int64, of the window;
    first_position, num_valid, first [num_reqs] int64, as for draft_rows.
    """
    num_reqs, hidden_size = len(rows), hidden_states.shape[1]
    output = hidden_states.new_empty(num_reqs * num_rows, hidden_size)
    block = min(_BLOCK_HIDDEN, triton.next_power_of_2(hidden_size))
    assert hidden_states.is_contiguous() and window.is_contiguous()
    _draft_hiddens[(num_reqs, triton.cdiv(hidden_size, block))](
        hidden_states, window, rows, first_position, num_valid, first, output,
        HIDDEN=hidden_size, TARGET_ROWS=len(hidden_states) // num_reqs, ROWS=num_rows, WINDOW=window.shape[1],
        BLOCK_ROWS=triton.next_power_of_2(num_rows), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return output


def draft_hiddens_reference(
    hidden_states: Tensor, window: Tensor, rows: Tensor, first_position: Tensor, num_valid: Tensor, first: Tensor,
    num_rows: int,
) -> Tensor:  # fmt: skip
    """The same by torch's operations."""
    num_reqs, size = len(rows), window.shape[1]
    # [num_reqs, size + target rows, hidden]: positions from first_position - size on
    source = torch.cat((window[rows], hidden_states.unflatten(0, (num_reqs, -1))), 1)
    requests = torch.arange(num_reqs, device=rows.device)[:, None]
    offsets = (first - first_position)[:, None] + size + torch.arange(num_rows, device=rows.device)
    output = source[requests, offsets.clamp(0, source.shape[1] - 1)]
    window[rows] = source[requests, num_valid[:, None] + torch.arange(size, device=rows.device)]
    return output.flatten(0, 1)


@triton.jit
def _load_rows(
    of_step, of_window, index, is_place, HIDDEN: tl.constexpr, TARGET_ROWS: tl.constexpr, WINDOW: tl.constexpr
):
    """Hiddens at rows [R, 1] from the step's first row on: below 0 from the window, whose last entry is row -1."""
    # Dead rows may lie behind the step's.
    own = tl.minimum(tl.maximum(index, 0), TARGET_ROWS - 1)
    kept = tl.minimum(tl.maximum(index + WINDOW, 0), WINDOW - 1)
    from_step = tl.load(of_step + own * HIDDEN, mask=is_place & (index >= 0), other=0.0)
    from_window = tl.load(of_window + kept * HIDDEN, mask=is_place & (index < 0), other=0.0)
    return tl.where(index >= 0, from_step, from_window)


@triton.jit(do_not_specialize_on_alignment=("rows", "first_position", "num_valid", "first"))
def _draft_hiddens(
    hidden_states, window, rows, first_position, num_valid, first, output,
    HIDDEN: tl.constexpr, TARGET_ROWS: tl.constexpr, ROWS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    place = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    is_place = place < HIDDEN
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    of_step = hidden_states + request * (TARGET_ROWS * HIDDEN) + place
    of_window = window + tl.load(rows + request) * (WINDOW * HIDDEN) + place
    index = tl.load(first + request) - tl.load(first_position + request) + row
    value = _load_rows(of_step, of_window, index, is_place & (row < ROWS), HIDDEN, TARGET_ROWS, WINDOW)
    tl.store(output + (request * ROWS + row) * HIDDEN + place, value, mask=is_place & (row < ROWS))
    is_kept = is_place & (row < WINDOW)
    index = tl.load(num_valid + request) + row - WINDOW
    value = _load_rows(of_step, of_window, index, is_kept, HIDDEN, TARGET_ROWS, WINDOW)
    # Every entry is read before the first is written.
    tl.debug_barrier()
    tl.store(of_window + row * HIDDEN, value, mask=is_kept)


@dataclass(frozen=True, slots=True)
class InputNorms:
    """What a module norms its two inputs by."""

    # [vocab, hidden]: the token table, or this rank's rows of it
    table: Tensor
    # [hidden]: of the embedding before the module sees it; None: it is not normed
    embed_weight: Tensor | None
    embed_eps: float
    # [2, hidden]: of the previous hidden, and of the embedding
    weight: Tensor
    eps: float
    #: None where the table is whole.
    own_ids: OwnIds | None = None


def module_inputs(tokens: PoolTokens, hidden: Tensor, norms: InputNorms) -> Tensor:
    """hidden [T, hidden] at the same rows as the tokens -> [T, 2 * hidden]: the normed hidden, then the normed
    embedding of the token (of id 0 where there is none).

    A draft that is open is a token of the pool like others, and in the pool thereafter, where a row reads it.
    """
    num_rows, size = hidden.shape
    draft = tokens.draft
    inputs = hidden.new_empty(num_rows, 2 * size)
    block = triton.next_power_of_2(size)
    num_chunks = 1 if draft is None else draft.bests.values.shape[1]
    assert hidden.is_contiguous() and norms.table.is_contiguous() and norms.weight.is_contiguous()
    assert tokens.token_pool.is_contiguous() and tokens.positions.is_contiguous() and tokens.rows.is_contiguous()
    own_ids, table = norms.own_ids, norms.table
    assert own_ids is None or own_ids.inboxes.takes(num_rows, size, hidden.element_size())
    inboxes = None if own_ids is None else own_ids.inboxes
    _module_inputs[(num_rows,) if inboxes is None else num_programs(num_rows)](
        tokens.token_pool, tokens.rows, tokens.request_of_row, tokens.positions, hidden, table,
        norms.weight if norms.embed_weight is None else norms.embed_weight, norms.weight, inputs,
        *((hidden, hidden, tokens.rows) if draft is None else (draft.bests.values, draft.bests.places, draft.columns)),
        *((table,) * 4 if inboxes is None else (inboxes.addresses, inboxes.own, inboxes.counts, inboxes.is_aborted)),
        0 if own_ids is None else own_ids.first, len(table), num_rows,
        tokens.token_pool.shape[1], tokens.lookahead, 0 if draft is None else draft.index, norms.embed_eps, norms.eps,
        HIDDEN=size, BLOCK=block, HAS_EMBED_NORM=norms.embed_weight is not None,
        NUM_IDS=0 if draft is None else draft.num_ids, NUM_CHUNKS=num_chunks,
        BLOCK_CHUNKS=triton.next_power_of_2(num_chunks),
        CAPACITY=0 if inboxes is None else inboxes.own.shape[3], RANK=0 if inboxes is None else inboxes.rank,
        SIZE=1 if inboxes is None else inboxes.size, EMPTY=EMPTY[hidden.element_size()],
        **launch_options(hidden.device), num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return inputs


def module_inputs_reference(token_ids: Tensor, hidden: Tensor, norms: InputNorms) -> Tensor:
    """The same from ids [T] int64, in the arithmetic of its inputs."""
    embeds = norms.table[token_ids]
    if norms.embed_weight is not None:
        embeds = rms_norm_reference(embeds, norms.embed_weight, norms.embed_eps)
    return rms_norm_reference(torch.stack((hidden, embeds), 1), norms.weight, norms.eps).flatten(1)


@triton.jit
def _normed(values, weight, column, is_column, eps, HIDDEN: tl.constexpr):
    """RMSNorm of one row, rounded to its type."""
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / HIDDEN + eps)
    factor = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
    return (wide * scale * factor).to(values.dtype)


@triton.jit(
    do_not_specialize=("first_id", "num_ids", "num_rows", "width", "lookahead", "index"),
    do_not_specialize_on_alignment=("token_pool", "rows", "request_of_row", "positions", "columns"),
)
def _module_inputs(
    token_pool, rows, request_of_row, positions, hidden, table, embed_weight, weight, inputs, values, places, columns,
    addresses, inbox, counts, is_aborted, first_id, num_ids, num_rows, width, lookahead, index, embed_eps, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HAS_EMBED_NORM: tl.constexpr, NUM_IDS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr, CAPACITY: tl.constexpr, RANK: tl.constexpr,
    SIZE: tl.constexpr, EMPTY: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, BLOCK)
    is_column = column < HIDDEN
    for one_row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + one_row
        request = tl.load(request_of_row + row)
        own_column = tl.load(positions + row) + lookahead
        place = token_pool + tl.load(rows + request) * width + own_column
        token = tl.load(place)
        if NUM_IDS > 0:  # noqa: SIM102
            if own_column == tl.load(columns + request) + index:
                token = best_of_bests(values, places, request, NUM_IDS, NUM_CHUNKS, BLOCK_CHUNKS)
                tl.store(place, token)
        source = tl.maximum(token, 0) - first_id
        is_here = is_column & (source >= 0) & (source < num_ids)
        embed = tl.load(table + source * HIDDEN + column, mask=is_here, other=0.0)
        before = tl.load(hidden + row * HIDDEN + column, mask=is_column, other=0.0)
        if SIZE > 1:
            embed = sum_over_ranks(
                embed, addresses, inbox, counts, is_aborted, row, column, is_column, CAPACITY, RANK, SIZE, EMPTY
            ).to(before.dtype)
        own = inputs + row * (2 * HIDDEN) + column
        tl.store(own, _normed(before, weight, column, is_column, eps, HIDDEN), mask=is_column)
        if HAS_EMBED_NORM:
            embed = _normed(embed, embed_weight, column, is_column, embed_eps, HIDDEN)
        tl.store(own + HIDDEN, _normed(embed, weight + HIDDEN, column, is_column, eps, HIDDEN), mask=is_column)
