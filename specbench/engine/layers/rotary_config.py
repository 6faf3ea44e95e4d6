"""What a rotary position embedding is made from, as config.json says it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long wavelengths stretched by a factor, short ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    #: Context that the model was first trained with, in tokens.
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """Dimensions of few rotations stretched by a factor, those of many kept, with a ramp between (YaRN)."""

    factor: float
    original_max_positions: int
    #: Rotations over the original context where the ramp begins and ends.
    beta_fast: float
    beta_slow: float
    #: Whether the ramp's ends are rounded outwards to whole dimensions.
    is_truncated: bool
    #: Factor of sines and cosines; None: 0.1 ln(factor) + 1.
    attention_factor: float | None

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """Angle of pair i at position p: p * theta^(-2i / head_dim), scaled."""

    theta: float
    head_dim: int
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None

    @property
    def magnitude(self) -> float:
        """Factor of sines and cosines."""
        return self.scaling.magnitude if isinstance(self.scaling, YarnScaling) else 1.0
