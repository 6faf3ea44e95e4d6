"""Tests of whether two samplers follow one law, by permutation: exact at any size, with the power that they have.

Belongs here: statistics over counts and differences. Does not belong here: what was drawn, or from whom
(losslessness.py).

A test is only worth its power, so each says the smallest departure that it would see with probability POWER at LEVEL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

#: Chance that a test fails though both sides follow one law.
LEVEL = 1e-3
POWER = 0.9
NUM_PERMUTATIONS = 9_999
_NUM_SIMULATIONS = 200
_SHARES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
_SEED = 0


@dataclass(frozen=True, slots=True)
class TestResult:
    """What one test found."""

    statistic: float
    p_value: float
    #: The smallest departure that would be seen; None where none would.
    detectable: float | None


def compare_laws(counts: Sequence[tuple[np.ndarray, np.ndarray]]) -> TestResult:
    """Two-sample chi-square over strata (prompts), each with the counts of its outcomes on the two sides.

    Under one law the two sides' draws of a prompt may be exchanged: the statistic is compared with that of random
    exchanges, which holds for outcomes however rare. `detectable` is the share of one side's draws that, turned into
    the likeliest outcome of their prompt, would be seen.
    """
    rng = np.random.default_rng(_SEED)
    statistic = sum(_chi_square(left, right) for left, right in counts)
    exchanged = np.zeros(NUM_PERMUTATIONS)
    for left, right in counts:
        draws = rng.multivariate_hypergeometric(
            left + right, int(left.sum()), size=NUM_PERMUTATIONS, method="marginals"
        )
        exchanged += _chi_square(draws, left + right - draws)
    # Sums in another order differ in their last digits.
    p_value = _share_as_large(exchanged, float(statistic))
    critical = float(np.quantile(exchanged, 1 - LEVEL))
    shares = (share for share in _SHARES if _power(counts, share, critical, rng) >= POWER)
    return TestResult(float(statistic), p_value, next(shares, None))


def compare_paired(differences: np.ndarray) -> TestResult:
    """Whether paired differences, [num_pairs], are as often of one sign as of the other: mean against sign flips.

    `detectable` is the smallest mean difference that would be seen, by the normal approximation.
    """
    rng = np.random.default_rng(_SEED)
    mean = float(differences.mean())
    signs = rng.integers(0, 2, size=(NUM_PERMUTATIONS, len(differences)), dtype=np.int8) * 2 - 1
    p_value = _share_as_large(np.abs(signs @ differences) / len(differences), abs(mean))
    detectable = None
    if len(differences) >= min_pairs():
        error = float(differences.std(ddof=1)) / len(differences) ** 0.5
        detectable = (NormalDist().inv_cdf(1 - LEVEL / 2) + NormalDist().inv_cdf(POWER)) * error
    return TestResult(mean, p_value, detectable)


def min_pairs() -> int:
    """Pairs below which even differences of one sign are likelier than LEVEL."""
    return int(np.ceil(np.log2(2 / LEVEL)))


def _chi_square(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Over the last axis: sum of (left * sqrt(m / n) - right * sqrt(n / m))^2 / (left + right), n and m the sums."""
    num_left, num_right = left.sum(axis=-1, keepdims=True), right.sum(axis=-1, keepdims=True)
    scale = np.sqrt(num_right / num_left)
    both = np.maximum(left + right, 1)
    return ((left * scale - right / scale) ** 2 / both).sum(axis=-1)


def _share_as_large(exchanged: np.ndarray, observed: float) -> float:
    tolerance = 1e-9 * max(1.0, abs(observed))
    return float((1 + (exchanged >= observed - tolerance).sum()) / (1 + len(exchanged)))


def _power(
    counts: Sequence[tuple[np.ndarray, np.ndarray]], share: float, critical: float, rng: np.random.Generator
) -> float:
    """How often a departure of this size is seen."""
    statistic = np.zeros(_NUM_SIMULATIONS)
    for left, right in counts:
        law = (left + right) / (left + right).sum()
        departed = (1 - share) * law
        departed[law.argmax()] += share
        drawn = rng.multinomial(int(left.sum()), departed, size=_NUM_SIMULATIONS)
        plain = rng.multinomial(int(right.sum()), law, size=_NUM_SIMULATIONS)
        statistic += _chi_square(drawn, plain)
    return float((statistic > critical).mean())
