"""Rotary position embedding: pairs (i, i + d/2) of each query and key head turned by an angle that grows by position.

Angles are computed once a step, in fp32, and serve every layer.

Does not belong here: frequencies as config.json says them (rotary_config.py), which heads turn (attention.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.engine.layers.rotary_config import LinearScaling, Llama3Scaling, RotaryConfig, YarnScaling


@dataclass(frozen=True, slots=True)
class Rotation:
    """Where the rows of one step are turned to."""

    #: [T, 1, d] in the model's dtype, on a GPU in fp32
    cos: Tensor
    #: [T, 1, d], negative in its first half: what the other half of a pair is multiplied by
    signed_sin: Tensor

    def apply_(self, heads: Tensor) -> None:
        """Turn heads [T, any, d] in place."""
        swapped = heads.roll(heads.shape[-1] // 2, -1)
        heads.mul_(self.cos).addcmul_(swapped, self.signed_sin)


class RotaryEmbedding:
    """Positions to rotations."""

    def __init__(self, config: RotaryConfig, dtype: torch.dtype, device: torch.device) -> None:
        #: [d / 2] fp32
        self._inverse_frequencies = inverse_frequencies(config).to(device)
        self._magnitude = config.magnitude
        self._dtype = dtype

    def __call__(self, positions: Tensor) -> Rotation:
        # positions: [T] int64
        if positions.is_cuda:
            from specbench.engine.kernels.rotation import rotation

            return Rotation(*rotation(positions, self._inverse_frequencies, self._magnitude))
        angles = positions[:, None].float() * self._inverse_frequencies
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        return Rotation(
            torch.cat((cos, cos), 1)[:, None].to(self._dtype), torch.cat((-sin, sin), 1)[:, None].to(self._dtype)
        )


def inverse_frequencies(config: RotaryConfig) -> Tensor:
    """[d / 2] fp32, radians a position."""
    d, scaling = config.head_dim, config.scaling
    plain = 1.0 / config.theta ** (torch.arange(0, d, 2, dtype=torch.float32) / d)
    match scaling:
        case LinearScaling():
            return plain / scaling.factor
        case Llama3Scaling():
            return _llama3(plain, scaling)
        case YarnScaling():
            return _yarn(plain, config.theta, d, scaling)
    return plain


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's reference code: by how many wavelengths fit in the original context."""
    num_wavelengths = scaling.original_max_positions / (2 * math.pi / plain)
    kept_share = (num_wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_share = kept_share.clamp(0.0, 1.0)
    return (1 - kept_share) * plain / scaling.factor + kept_share * plain


def _yarn(plain: Tensor, theta: float, d: int, scaling: YarnScaling) -> Tensor:
    """YaRN (Peng et al. 2023), section 3.2: a ramp over dimensions between two numbers of rotations."""

    def dimension_of(num_rotations: float) -> float:
        return d * math.log(scaling.original_max_positions / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.is_truncated:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    width = high - low or 0.001
    stretched_share = ((torch.arange(d // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / scaling.factor * stretched_share + plain * (1 - stretched_share)
