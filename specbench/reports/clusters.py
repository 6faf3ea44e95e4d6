"""Standard errors of counts over verify steps, by sample: the steps of one sample are not independent.

Belongs here: linearised standard errors, cheap enough for millions of steps, that health checks compare against.
Does not belong here: intervals that are printed beside a figure (statistics.py, by resampling), thresholds.

Every estimate is a smooth function of sums over samples. Its variance is that of the summed influence of each sample,
n / (n - 1) Σ u², with u the derivative by the sample's sums (W. Cochran, Sampling Techniques, 3rd ed., 1977, section
6.3, for a ratio; K.-Y. Liang and S. Zeger, Biometrika 73, 1986, for a slope).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

#: Fewer samples say too little of how samples differ.
MIN_SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and how far chance alone moves it."""

    value: float
    standard_error: float

    def standard_errors_from(self, reference: float) -> float:
        """(value - reference) / standard_error; without any spread, an infinity or 0."""
        distance = self.value - reference
        if self.standard_error > 0:
            return distance / self.standard_error
        return float(np.inf * np.sign(distance)) if distance else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class SampleRatio:
    """A ratio of counts, kept by sample."""

    #: [num_samples]
    numerator: np.ndarray
    #: [num_samples]
    denominator: np.ndarray

    @property
    def num_samples(self) -> int:
        """Samples in which anything was counted."""
        return int((self.denominator > 0).sum())

    @property
    def total(self) -> int:
        return int(self.denominator.sum())

    @property
    def value(self) -> float:
        """Σ numerator / Σ denominator; the denominator must not be 0."""
        return float(self.numerator.sum() / self.denominator.sum())

    @property
    def influence(self) -> np.ndarray:
        """[num_samples]"""
        return (self.numerator - self.value * self.denominator) / self.denominator.sum()

    def estimate(self) -> Estimate:
        return combination([(1.0, self)])


def combination(terms: Sequence[tuple[float, SampleRatio]]) -> Estimate:
    """Σ weight · ratio, of ratios that are counted in the same samples."""
    value = sum(weight * ratio.value for weight, ratio in terms)
    influence = np.sum([weight * ratio.influence for weight, ratio in terms], axis=0)
    num_samples = int(np.any([ratio.denominator > 0 for _, ratio in terms], axis=0).sum())
    return Estimate(float(value), _standard_error(influence, num_samples))


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Sums over the rows of each unit (a request) that a slope of y over x is made of, [num_units] each."""

    count: np.ndarray
    x: np.ndarray
    y: np.ndarray
    xx: np.ndarray
    xy: np.ndarray

    @classmethod
    def of_runs(cls, x: np.ndarray, y: np.ndarray, start: np.ndarray) -> Moments:
        """Of rows x, y [num_rows] in which unit i is the rows from start[i] to start[i + 1], each at least one row."""
        count = np.diff(np.append(start, len(x)))
        sums = [np.add.reduceat(values, start) for values in (x, y, x * x, x * y)]
        return cls(count, *sums)

    @classmethod
    def of_units(cls, x: np.ndarray, y_sum: np.ndarray, count: np.ndarray) -> Moments:
        """Of units whose rows have one x: x, the sum of y, and the number of rows, [num_units] each."""
        return cls(count, count * x, y_sum, count * x * x, x * y_sum)


def slope(moments: Moments, group: np.ndarray, sample: np.ndarray) -> Estimate | None:
    """Slope of y over x within groups, each with its own mean: group and sample of each unit, [num_units] each.

    None where x does not vary within any group.
    """
    count = np.maximum(np.bincount(group, weights=moments.count), 1)
    mean_x = (np.bincount(group, weights=moments.x) / count)[group]
    mean_y = (np.bincount(group, weights=moments.y) / count)[group]
    spread = moments.xx - 2 * mean_x * moments.x + moments.count * mean_x**2
    product = moments.xy - mean_x * moments.y - mean_y * moments.x + moments.count * mean_x * mean_y
    total = float(spread.sum())
    if not total > 1e-9 * max(float(moments.xx.sum()), 1.0):
        return None
    value = float(product.sum()) / total
    influence = np.bincount(sample, weights=product - value * spread) / total
    num_samples = int((np.bincount(sample, weights=moments.count) > 0).sum())
    return Estimate(value, _standard_error(influence, num_samples))


def _standard_error(influence: np.ndarray, num_samples: int) -> float:
    if num_samples < 2:
        return float("inf")
    return sqrt(float(influence @ influence) * num_samples / (num_samples - 1))
