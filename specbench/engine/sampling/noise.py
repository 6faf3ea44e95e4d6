"""Counter-based random numbers: each is a function of its key, nothing is drawn in an order.

The number for a vocabulary entry depends on (request key, position, purpose, global vocabulary id) alone, so a result
depends neither on the batch, nor on chunking, nor on how the vocabulary is split over ranks.
"""

from __future__ import annotations

import torch

#: Streams that must not share numbers: plain samples of the target are the first.
TARGET_SAMPLE = 0

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B1


def _mix(x: torch.Tensor) -> torch.Tensor:
    """The 32-bit finaliser of MurmurHash3, on int64 tensors that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


def exponential_noise(
    keys: torch.Tensor, positions: torch.Tensor, purpose: int, vocab_ids: torch.Tensor
) -> torch.Tensor:
    """Independent Exp(1) variates, fp32 [num_rows, num_ids].

    keys: int64 [num_rows], 64-bit request keys. positions: int64 [num_rows]. vocab_ids: int64 [num_ids], global ids.
    """
    low = _mix((keys & _MASK) ^ _mix((positions * 2 + 1) & _MASK))
    high = _mix(((keys >> 32) & _MASK) ^ _mix((positions + (purpose << 28)) & _MASK))
    bits = _mix((vocab_ids * _GOLDEN & _MASK)[None, :] ^ low[:, None])
    bits = _mix(bits ^ high[:, None])
    # Small variates decide an argmax, and they keep their relative precision: u is at least 2^-33.
    uniform = (bits.to(torch.float32) + 0.5) * 2.0**-32
    return -torch.log1p(-uniform)
