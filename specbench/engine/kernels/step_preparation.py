"""What a model's forward needs to know about the rows of a step, each in one launch on a GPU: counts and block tables
of the requests, positions and slots of their rows, the tokens there.

Belongs here: the kernels and their torch references. Does not belong here: who asks for it (layers/, execution/).

Nothing is specialised by size or alignment: a kernel that is compiled in the middle of a run stalls it.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_COLUMNS = 1024
_BLOCK_TOKENS = 128


def gather_requests(rows: Tensor, counts: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """rows [num_reqs] int64, counts [2, any] int64, block_tables [groups, any, columns] int32 -> those of the rows:
    [2, num_reqs] and [groups, num_reqs, columns]."""
    num_reqs, (num_groups, num_state_rows, num_columns) = len(rows), block_tables.shape
    own_counts = counts.new_empty(2, num_reqs)
    own_tables = block_tables.new_empty(num_groups, num_reqs, num_columns)
    assert counts.is_contiguous() and block_tables.is_contiguous()
    grid = (num_reqs, num_groups, triton.cdiv(num_columns, _BLOCK_COLUMNS))
    _gather_requests[grid](
        rows, counts, block_tables, own_counts, own_tables, num_reqs, num_state_rows, num_columns,
        BLOCK=min(_BLOCK_COLUMNS, triton.next_power_of_2(num_columns)), num_warps=4,
    )  # fmt: skip
    return own_counts, own_tables


def gather_requests_reference(rows: Tensor, counts: Tensor, block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch's operations."""
    return counts.index_select(1, rows), block_tables.index_select(1, rows)


@triton.jit(
    do_not_specialize=("num_reqs", "num_state_rows", "num_columns"),
    do_not_specialize_on_alignment=("rows", "counts", "tables", "own_counts", "own_tables"),
)
def _gather_requests(
    rows, counts, tables, own_counts, own_tables, num_reqs, num_state_rows, num_columns, BLOCK: tl.constexpr
):
    request = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    row = tl.load(rows + request)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < num_columns
    blocks = tl.load(tables + (group * num_state_rows + row) * num_columns + column, mask=is_column, other=0)
    tl.store(own_tables + (group * num_reqs + request) * num_columns + column, blocks, mask=is_column)
    is_first = (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    tl.store(own_counts + request, tl.load(counts + row, mask=is_first, other=0), mask=is_first)
    computed = tl.load(counts + num_state_rows + row, mask=is_first, other=0)
    tl.store(own_counts + num_reqs + request, computed, mask=is_first)


def row_slots(
    first_position: Tensor, num_live: Tensor | None, block_tables: Tensor, num_rows: int, block_size: int, kernel: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Requests of `num_rows` rows each, from their first positions on: positions [T], slots [groups, T] (-1: a dead
    row) and, oldest first and with the row's own last, the slots of `kernel` taps [groups, T * kernel], all int64.

    first_position, num_live [num_reqs] int64 (None: all rows live), block_tables [groups, num_reqs, columns] int32 with
    the null block in column 0, which the taps before position 0 are in.
    """
    num_groups, num_reqs, _ = block_tables.shape
    num_tokens = num_reqs * num_rows
    positions = first_position.new_empty(num_tokens)
    slots = first_position.new_empty(num_groups, num_tokens)
    taps = first_position.new_empty(num_groups, num_tokens * kernel)
    assert block_tables.stride(2) == 1 and first_position.is_contiguous()
    _row_slots[(num_reqs, num_groups)](
        first_position, first_position if num_live is None else num_live, block_tables, positions, slots, taps,
        num_tokens, block_tables.stride(0), block_tables.stride(1),
        NUM_ROWS=num_rows, PAGE=block_size, KERNEL=kernel, HAS_LIVE=num_live is not None,
        BLOCK=triton.next_power_of_2(num_rows), num_warps=1,
    )  # fmt: skip
    return positions, slots, taps


def row_slots_reference(
    first_position: Tensor, num_live: Tensor | None, block_tables: Tensor, num_rows: int, block_size: int, kernel: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by torch's operations."""
    row = torch.arange(num_rows, device=first_position.device)
    positions = first_position[:, None] + row
    # Shifted by one block, so that nothing is negative.
    shifted = positions[:, :, None] + block_size + torch.arange(1 - kernel, 1, device=row.device)
    columns = (shifted // block_size).flatten(1).expand(len(block_tables), -1, -1)
    taps = block_tables.gather(2, columns).view(-1, *shifted.shape) * block_size + shifted % block_size
    slots = taps[..., -1]
    if num_live is not None:
        slots = torch.where(row < num_live[:, None], slots, -1)
    return positions.flatten(), slots.flatten(1), taps.flatten(1)


@triton.jit(
    do_not_specialize=("num_tokens", "group_stride", "request_stride"),
    do_not_specialize_on_alignment=("first_position", "num_live", "tables", "positions", "slots", "taps"),
)
def _row_slots(
    first_position, num_live, tables, positions, slots, taps, num_tokens, group_stride, request_stride,
    NUM_ROWS: tl.constexpr, PAGE: tl.constexpr, KERNEL: tl.constexpr, HAS_LIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    group = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, BLOCK)
    is_row = row < NUM_ROWS
    position = tl.load(first_position + request) + row
    token = request * NUM_ROWS + row
    tl.store(positions + token, position, mask=is_row & (group == 0))
    table = tables + group * group_stride + request.to(tl.int64) * request_stride
    for tap in tl.static_range(KERNEL):
        shifted = position + (PAGE + tap + 1 - KERNEL)
        block = tl.load(table + shifted // PAGE, mask=is_row, other=0).to(tl.int64)
        slot = block * PAGE + shifted % PAGE
        tl.store(taps + (group * num_tokens + token) * KERNEL + tap, slot, mask=is_row)
        if tap == KERNEL - 1:
            if HAS_LIVE:
                slot = tl.where(row < tl.load(num_live + request), slot, -1)
            tl.store(slots + group * num_tokens + token, slot, mask=is_row)


def pool_tokens(
    token_pool: Tensor, rows: Tensor, request_of_row: Tensor | None, positions: Tensor, lookahead: int
) -> Tensor:
    """Tokens at positions + lookahead of each row's request, [T] int64; 0 where there is none (-1).

    token_pool [any, width] int64; rows: its row for each request or, without request_of_row, for each row; positions
    [T].
    """
    tokens = torch.empty_like(positions)
    num_tokens = len(positions)
    assert token_pool.is_contiguous() and positions.is_contiguous() and rows.is_contiguous()
    _pool_tokens[(triton.cdiv(num_tokens, _BLOCK_TOKENS),)](
        token_pool, rows, rows if request_of_row is None else request_of_row, positions, tokens,
        num_tokens, token_pool.shape[1], lookahead,
        HAS_REQUESTS=request_of_row is not None, BLOCK=_BLOCK_TOKENS, num_warps=4,
    )  # fmt: skip
    return tokens


def pool_tokens_reference(
    token_pool: Tensor, rows: Tensor, request_of_row: Tensor | None, positions: Tensor, lookahead: int
) -> Tensor:
    """The same by torch's operations."""
    row_of_token = rows if request_of_row is None else rows[request_of_row]
    return token_pool[row_of_token, positions + lookahead].clamp_min_(0)


@triton.jit(
    do_not_specialize=("num_tokens", "width", "lookahead"),
    do_not_specialize_on_alignment=("token_pool", "rows", "request_of_row", "positions", "tokens"),
)
def _pool_tokens(
    token_pool, rows, request_of_row, positions, tokens, num_tokens, width, lookahead,
    HAS_REQUESTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = token < num_tokens
    index = token.to(tl.int64)
    if HAS_REQUESTS:
        index = tl.load(request_of_row + token, mask=is_token, other=0)
    row = tl.load(rows + index, mask=is_token, other=0)
    position = tl.load(positions + token, mask=is_token, other=0)
    value = tl.load(token_pool + row * width + position + lookahead, mask=is_token, other=0)
    tl.store(tokens + token, tl.maximum(value, 0), mask=is_token)
