"""Codes and scales to weights: computed in fp32, rounded once, a slice at a time.

Belongs here: arithmetic of the formats. Does not belong here: which tensors are codes (quantised.py), which part a rank
reads (quantised_slices.py), products that take codes as they are (kernels/).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch
from torch import Tensor

from specbench.engine.checkpoints.quantised import FP8_BLOCK, NVFP4_BLOCK, scale_kind

#: E2M1: what each code of 4 bits stands for.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Elements of a slice: what is held in fp32 beside codes and weights.
_SLICE_ELEMENTS = 1 << 25


def dequantise(parts: Mapping[str, Tensor], weight: Tensor) -> None:
    """Fill `weight` [..., N, K] from its codes and scales, as quantised.py names their roles."""
    per_first = max(weight.numel() // max(len(weight), 1), 1)
    # A slice of a matrix holds whole blocks of rows.
    step = FP8_BLOCK * ceil(_SLICE_ELEMENTS / per_first / FP8_BLOCK) if weight.dim() == 2 else 1
    scales = {role: part for role, part in parts.items() if role != "codes"}
    for start in range(0, len(weight), step):
        rows = slice(start, start + step)
        codes = parts["codes"][rows]
        if "block_scale" in scales:
            scale = nvfp4_scale(scales)
            per_matrix = scale if scale.dim() == 0 else scale.view(-1, 1, 1)[rows]
            weight[rows] = _nvfp4(codes, scales["block_scale"][rows], per_matrix)
        else:
            weight[rows] = codes.float() * _fp8_scale(parts["codes"], scales["scale"].float(), rows)


def scale_by_row(codes: Tensor, scale: Tensor) -> Tensor:
    """The scales of FP8 codes [N, K], however they are stored, as one for 128 columns of a row: fp32 [N, K / 128]."""
    return _fp8_scale(codes, scale.float(), slice(0, len(codes))).expand(codes.shape)[:, ::FP8_BLOCK].contiguous()


def _fp8_scale(codes: Tensor, scale: Tensor, rows: slice) -> Tensor:
    """The scale of each code of some rows, in a shape that broadcasts to theirs."""
    kind = scale_kind(tuple(codes.shape), tuple(scale.shape))
    if kind == "all":
        return scale.view(())
    if kind == "row":
        return scale.view(*codes.shape[:-1], 1)[rows]
    is_matrix = codes.dim() == 2
    scale = scale[slice(rows.start // FP8_BLOCK, ceil(rows.stop / FP8_BLOCK)) if is_matrix else rows]
    num_rows = len(codes[rows]) if is_matrix else codes.shape[-2]
    by_row = scale.repeat_interleave(FP8_BLOCK, -2)[..., :num_rows, :]
    return by_row.repeat_interleave(FP8_BLOCK, -1)[..., : codes.shape[-1]]


def nvfp4_scale(scales: Mapping[str, Tensor]) -> Tensor:
    """What multiplies the scales of blocks: one number [], or one for each matrix of a stack [E]; fp32."""
    scale = scales["scale"].float() if "scale" in scales else scales["inverse_scale"].float().reciprocal()
    return scale.view(()) if scale.numel() == 1 else scale.flatten()


def _nvfp4(codes: Tensor, block_scale: Tensor, scale: Tensor) -> Tensor:
    # codes: [..., K / 2], the even column in the low half of a byte; block_scale: [..., K / 16] -> [..., K]
    table = torch.tensor(_E2M1, device=codes.device)
    pairs = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1)
    blocks = pairs.view(*codes.shape[:-1], -1, NVFP4_BLOCK) * block_scale.float().unsqueeze(-1)
    return blocks.view(*codes.shape[:-1], -1) * scale
