"""Samples whose drafts are hard or easy as a whole (variance between) and for a while (autocorrelation within)."""

from __future__ import annotations

import numpy as np

from specbench.reports.statistics import Ratios

#: Columns of `simulated_sums`: drafts, draft tokens, accepted tokens, hits at position 0, hits at position 1.
RATIOS = Ratios(np.array([2, 2, 3, 4, 4]), np.array([1, 0, 0, 0, 3]), np.array([0, 1, 0, 0, 0]))
NAMES = ("acceptance rate", "acceptance length", "position 0", "position 1", "position 1 given position 0")


def sample_traits(num_samples: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """[num_samples] ease, and number of steps: hard samples are longer, and lengths are skewed."""
    ease = rng.normal(1.0, 0.7, num_samples)
    num_steps = np.minimum(5 + rng.gamma(2.0, 12.0 * np.exp(-0.3 * (ease - 1.0))), 150).astype(int)
    return ease, num_steps


def simulated_sums(ease: np.ndarray, num_steps: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """[num_samples, 5] Sums of samples whose steps draft k tokens, each accepted with the step's own chance."""
    sums = np.zeros((len(ease), 5))
    mood = rng.normal(0.0, 1.0, len(ease))
    for step in range(int(num_steps.max())):
        mood = 0.8 * mood + 0.6 * rng.normal(0.0, 1.0, len(ease))
        chance = 1 / (1 + np.exp(-(ease + mood)))
        is_accepted = rng.random((len(ease), k)) < chance[:, None]
        accepted = np.cumprod(is_accepted, axis=1).sum(axis=1)
        row = np.stack(
            [np.ones_like(accepted), np.full_like(accepted, k), accepted, accepted > 0, accepted > 1], axis=1
        )
        sums += row * (step < num_steps)[:, None]
    return sums
