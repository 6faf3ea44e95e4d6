"""Angles of a step's rows on a GPU: cosines and signed sines of every pair, in one launch."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options


def rotation(positions: Tensor, inverse_frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """positions [T] int64, inverse_frequencies [d / 2] fp32 -> cosines and sines, the latter negative in their first
    half, [T, 1, d] fp32 each."""
    half = len(inverse_frequencies)
    cos = torch.empty(len(positions), 1, 2 * half, dtype=torch.float32, device=positions.device)
    signed_sin = torch.empty_like(cos)
    _rotate_row[(len(positions),)](
        positions,
        inverse_frequencies,
        cos,
        signed_sin,
        magnitude,
        HALF=half,
        BLOCK=triton.next_power_of_2(half),
        **launch_options(positions.device),
        num_warps=1,
    )
    return cos, signed_sin


def rotation_reference(positions: Tensor, inverse_frequencies: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    """The same in plain torch."""
    angles = positions[:, None].float() * inverse_frequencies
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    return torch.cat((cos, cos), 1)[:, None], torch.cat((-sin, sin), 1)[:, None]


@triton.jit(do_not_specialize_on_alignment=("positions",))
def _rotate_row(
    positions,
    inverse_frequencies,
    cos,
    signed_sin,
    magnitude,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    pair = tl.arange(0, BLOCK)
    is_pair = pair < HALF
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inverse_frequencies + pair, mask=is_pair, other=0.0)
    c, s = tl.cos(angle) * magnitude, tl.sin(angle) * magnitude
    start = row.to(tl.int64) * (2 * HALF) + pair
    tl.store(cos + start, c, mask=is_pair)
    tl.store(cos + start + HALF, c, mask=is_pair)
    tl.store(signed_sin + start, -s, mask=is_pair)
    tl.store(signed_sin + start + HALF, s, mask=is_pair)
