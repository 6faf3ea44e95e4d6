"""Random weights: for speed where no checkpoint is at hand. The text that they generate means nothing.

A tensor depends on its name, its shape and its device alone, so that two engines hold the same model. The scale keeps
hidden states of order one through any number of layers, in bf16 too, and logits apart.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

_NORM_SUFFIXES = ("norm.weight", "global_scale")
_NORM_SPREAD, _BIAS_SPREAD = 0.1, 0.02
#: Standard deviation of FP8 codes, which reach to 448, and of NVFP4 codes that are all as likely.
_FP8_SPREAD, _NVFP4_SPREAD = 32.0, 2.926


def fill_at_random(weight: Tensor, name: str) -> Tensor:
    """Draw the tensor called `name` in place: norms about 1, biases about 0, matrices (inputs last) by 1/sqrt(inputs).
    Returns it."""
    generator = torch.Generator(weight.device).manual_seed(zlib.crc32(name.encode()))
    if name.endswith(_NORM_SUFFIXES):
        return weight.normal_(1.0, _NORM_SPREAD, generator=generator)
    if weight.dim() == 1:
        return weight.normal_(0.0, _BIAS_SPREAD, generator=generator)
    return weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


def random_fp8(shape: tuple[int, ...], name: str, device: torch.device) -> dict[str, Tensor]:
    """The same matrix in codes with one scale for all."""
    drawn = fill_at_random(torch.empty(shape, dtype=torch.bfloat16, device=device), name)
    scale = torch.tensor(shape[-1] ** -0.5 / _FP8_SPREAD, device=device)
    return {"codes": (drawn / scale).to(torch.float8_e4m3fn), "scale": scale}


def random_nvfp4(shape: tuple[int, ...], name: str, device: torch.device) -> dict[str, Tensor]:
    """A stack of matrices in codes, every one as likely, with one scale each."""
    *leading, width = shape
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    codes = torch.randint(256, (*leading, width // 2), generator=generator, dtype=torch.uint8, device=device)
    block_scale = torch.ones(*leading, width // 16, device=device).to(torch.float8_e4m3fn)
    return {
        "codes": codes,
        "block_scale": block_scale,
        "scale": torch.full(shape[:1], width**-0.5 / _NVFP4_SPREAD, device=device),
    }
