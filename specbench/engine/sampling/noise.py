"""Counter-based random numbers: each is a function of its key, nothing is drawn in an order.

The number for a vocabulary entry depends on (request key, position, stream, global vocabulary id) alone, so a result
depends neither on the batch, nor on chunking, nor on how the vocabulary is split over ranks.

A stream is a purpose and, for the purposes of a verified window, a row of it; the position is then that of the window's
first row. Keyed by the row's own position instead, two windows that overlap would use the same coins twice, and a coin
that has decided one window is no longer fair in the next.
"""

from __future__ import annotations

from functools import cache
from typing import TypeVar

import torch

#: Purposes that must not share numbers. Plain samples of the target are keyed by position, the others by window.
TARGET_SAMPLE, DRAFT, ACCEPTANCE, RECOVERY = range(4)
_NUM_PURPOSES = 4

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1
_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)


_Row = TypeVar("_Row", int, torch.Tensor)


def window_stream(purpose: int, row: _Row) -> _Row:
    """Stream of a row of a window: like `row` (int64), 0 being the window's first row."""
    return row * _NUM_PURPOSES + purpose


@cache
def spread_ids(num_ids: int, device: torch.device) -> torch.Tensor:
    """What noise takes of the global ids 0 .. num_ids - 1, int32 [num_ids]: made once."""
    return _as_int32(torch.arange(num_ids, device=device) * _GOLDEN & _MASK)


def exponential_noise(
    keys: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Independent Exp(1) variates, fp32 [num_rows, num_ids].

    keys: int64 [num_rows], 64-bit request keys. positions: int64 [num_rows]. stream: one for all or int64 [num_rows].
    ids: int32 [num_ids], of `spread_ids`.
    """
    return uniform_noise(keys, positions, stream, ids).neg_().log1p_().neg_()


def uniform_noise(
    keys: torch.Tensor, positions: torch.Tensor, stream: int | torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Independent variates in (0, 1), fp32 [num_rows, num_ids]; parameters as for `exponential_noise`.

    Small ones decide an argmax and keep their relative precision: the least is 2^-32.
    """
    spread = _mix(stream * _GOLDEN & _MASK)
    low = _mix((keys & _MASK) ^ _mix((positions * 2 + 1) & _MASK ^ spread))
    high = _mix(((keys >> 32) & _MASK) ^ _mix(positions & _MASK ^ spread))
    bits = ids ^ _as_int32(low)[:, None]
    _mix_int32_(bits)
    bits ^= _as_int32(high)[:, None]
    _mix_int32_(bits)
    bits &= 0x7FFFFFFF
    # The largest would round to 1, whose logarithms are infinite and at which no coin accepts.
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_max_(1 - 2.0**-24)


_Bits = TypeVar("_Bits", int, torch.Tensor, int | torch.Tensor)


def _mix(x: _Bits) -> _Bits:
    """The 32-bit finaliser of MurmurHash3, on a 32-bit value or int64 tensors that hold such."""
    x = ((x ^ (x >> 16)) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> 13)) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> 16)


def _mix_int32_(x: torch.Tensor) -> None:
    """The same in place on int32, whose products wrap: half the bytes, and the vocabulary is where the time goes."""
    for shift, multiplier in ((16, _MULTIPLIERS[0]), (13, _MULTIPLIERS[1]), (16, None)):
        # An arithmetic shift drags the sign along; the mask takes it off.
        x ^= (x >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        if multiplier is not None:
            x *= multiplier - (1 << 32)


def _as_int32(x: torch.Tensor) -> torch.Tensor:
    """The same 32 bits, from int64 in [0, 2^32)."""
    return (x - ((x & 0x80000000) << 1)).to(torch.int32)
