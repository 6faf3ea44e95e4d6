"""The image tower's stages: how many neighbours each folds into the channels, and how many channels it leaves.

Belongs here: the plan. Does not belong here: the arithmetic of a stage (layers/towers.py), torch.

A patch of size s and t moments passes through scales: single pixels, then squares that grow by the prime factors of s,
the largest first, then all moments. Channels of a scale are the values that it folds, up to a multiple of 64. A tower
with fewer stages than scales leaves out those whose sizes are, in logarithm, furthest from an even progress; first
and last stay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, pairwise

_CHANNEL_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class ImageStage:
    """Fold t moments and hw x hw places into one, and project."""

    t: int
    hw: int
    channels_in: int
    #: Of the last stage the plan's; there the model's hidden size takes its place.
    channels_out: int


@dataclass(frozen=True, slots=True)
class _Scale:
    t: int
    hw: int
    channels: int

    @property
    def log_size(self) -> float:
        return math.log(self.t * self.hw * self.hw)


def image_stages(
    patch_size: int, temporal_patch_size: int, num_channels: int, num_stages: int
) -> tuple[ImageStage, ...]:
    """The stages of a tower, first to last."""
    scales = _scales(patch_size, temporal_patch_size, num_channels)
    num_values = patch_size * patch_size * temporal_patch_size * num_channels
    wanted = [math.log(num_values) * step / num_stages for step in range(num_stages + 1)]
    chosen = _choose(scales, wanted)
    return tuple(_stage(start, end) for start, end in pairwise(chosen))


def _stage(start: _Scale, end: _Scale) -> ImageStage:
    t, hw = end.t // start.t, end.hw // start.hw
    return ImageStage(t, hw, start.channels * t * hw * hw, end.channels)


def _scales(patch_size: int, temporal_patch_size: int, num_channels: int) -> list[_Scale]:
    scales = [_Scale(1, 1, num_channels)]
    for hw in _growing(patch_size):
        scales.append(_Scale(1, hw, _rounded(hw * hw * num_channels)))
    for t in _growing(temporal_patch_size):
        scales.append(_Scale(t, patch_size, _rounded(patch_size * patch_size * num_channels * t)))
    return scales


def _growing(number: int) -> list[int]:
    """Products of the prime factors, the largest first: 40 -> 5, 10, 20, 40."""
    products, product = [], 1
    for factor in reversed(_prime_factors(number)):
        product *= factor
        products.append(product)
    return products


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def _rounded(channels: int) -> int:
    return -(-channels // _CHANNEL_MULTIPLE) * _CHANNEL_MULTIPLE


def _choose(scales: list[_Scale], wanted: list[float]) -> list[_Scale]:
    """One scale for each wanted size: different ones, at the least sum of distances, where there are enough."""
    if len(wanted) > len(scales):
        nearest = [min(scales, key=lambda scale: abs(scale.log_size - size)) for size in wanted]
        return [scales[0], *nearest[1:-1], scales[-1]]

    def distance(chosen: tuple[_Scale, ...]) -> float:
        return sum(abs(scale.log_size - size) for scale, size in zip(chosen, wanted, strict=True))

    best = min(combinations(scales, len(wanted)), key=distance)
    return [scales[0], *best[1:-1], scales[-1]]
