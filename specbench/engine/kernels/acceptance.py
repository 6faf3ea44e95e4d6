"""Which drafts of a step are accepted, and what that changes, in one launch on a GPU: match with the target's samples
or toss coins, append the emitted tokens to the pool, move the counts, fill in the step's results.

Belongs here: the kernel. Its reference is what it replaces: sampling/verification.py and the commit of
execution/stages.py; the coins are those of sampling/noise.py, bit for bit.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: The coins' purpose among the streams of a window, and how many purposes there are.
_ACCEPTANCE: tl.constexpr = tl.constexpr(2)
_NUM_PURPOSES: tl.constexpr = tl.constexpr(4)


def accept_and_commit(
    sampled_ids: Tensor,
    rows: Tensor,
    num_live: Tensor,
    token_pool: Tensor,
    counts: Tensor,
    packed: Tensor,
    keys: Tensor,
    conditional_rates: Tensor | None,
) -> None:
    """sampled_ids [num_reqs * num_rows] int64; rows, num_live [num_reqs] int64, persistent rows and how many rows of
    each window count (0: padding); token_pool [any, width] int64; counts [2, any] int64, committed and computed tokens.

    packed [k + 1 + 6, num_reqs] int64, filled: the tokens, then sampled, drafted, proposed (0), accepted, committed,
    computed. keys [any] int64, request keys by persistent row. conditional_rates [k] fp32: drafts are accepted by
    coins, each at its rate once those before it are; None: while they equal the samples.
    """
    num_reqs = len(rows)
    k = packed.shape[0] - 7
    num_rows = len(sampled_ids) // num_reqs
    assert num_rows in (1, k + 1) and counts.is_contiguous() and token_pool.is_contiguous() and packed.stride(1) == 1
    _accept_and_commit[(num_reqs,)](
        sampled_ids, rows, num_live, token_pool, counts, packed, keys,
        keys if conditional_rates is None else conditional_rates,
        token_pool.shape[1], counts.shape[1], packed.stride(0),
        K=k, NUM_ROWS=num_rows, BLOCK=triton.next_power_of_2(k + 1), IS_COINS=conditional_rates is not None,
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _mix(x):
    """The 32-bit finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _low_bits(x):
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _coin(key, start, column):
    """The uniform variate that decides on the draft of a window's column."""
    stream = (column * _NUM_PURPOSES + _ACCEPTANCE).to(tl.uint32)
    spread = _mix(stream * 0x9E3779B1)
    low = _mix(_low_bits(key) ^ _mix(_low_bits(start * 2 + 1) ^ spread))
    high = _mix(_low_bits(key >> 32) ^ _mix(_low_bits(start) ^ spread))
    bits = _mix(_mix(low) ^ high) & 0x7FFFFFFF
    return tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)


# Tokens of a window are read and written in place: one warp, so that all are read before the first is written.
@triton.jit(
    do_not_specialize=("width", "num_state_rows", "packed_stride"),
    do_not_specialize_on_alignment=(
        "sampled_ids",
        "rows",
        "num_live",
        "token_pool",
        "counts",
        "packed",
        "keys",
        "rates",
    ),
)
def _accept_and_commit(
    sampled_ids, rows, num_live, token_pool, counts, packed, keys, rates, width, num_state_rows, packed_stride,
    K: tl.constexpr, NUM_ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_COINS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(rows + request)
    live = tl.load(num_live + request)
    is_live = tl.minimum(live, 1)
    committed = tl.load(counts + row)
    computed = tl.load(counts + num_state_rows + row)
    column = tl.arange(0, BLOCK)
    window = token_pool + row * width + committed + column
    drafts = tl.load(window, mask=column < K, other=-1)
    own_row = column if NUM_ROWS > 1 else column * 0
    samples = tl.load(sampled_ids + request * NUM_ROWS + own_row, mask=column <= K, other=0)
    is_drafted = (column < K) & (drafts >= 0) & (column < live - is_live)
    if IS_COINS:
        rate = tl.load(rates + column, mask=column < K, other=0.0)
        is_right = _coin(tl.load(keys + row), computed, column) < rate
    else:
        is_right = drafts == samples
    accepted = tl.min(tl.where(is_drafted & is_right, BLOCK, column), 0).to(tl.int64)
    drafted = tl.sum(is_drafted.to(tl.int64), 0)
    tokens = samples
    if IS_COINS:
        tokens = tl.where(column < accepted, drafts, samples)
    tl.store(window, tokens, mask=column <= K)
    tl.store(counts + row, committed + accepted + is_live)
    tl.store(counts + num_state_rows + row, computed + accepted + is_live)
    of_request = packed + request
    tl.store(of_request + column * packed_stride, tokens, mask=column <= K)
    tl.store(of_request + (K + 1) * packed_stride, accepted + is_live)
    tl.store(of_request + (K + 2) * packed_stride, drafted)
    tl.store(of_request + (K + 3) * packed_stride, accepted * 0)
    tl.store(of_request + (K + 4) * packed_stride, accepted)
    tl.store(of_request + (K + 5) * packed_stride, committed + accepted + is_live)
    tl.store(of_request + (K + 6) * packed_stride, computed + accepted + is_live)
