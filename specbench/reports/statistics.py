"""Intervals and tests over samples, for any metric that is a quotient of sums.

Belongs here: resampling, paired tests, adjusted p values, intervals of shares and of repeats. Does not belong here:
which sums a metric is made of (sample_sums.py), what a difference means (compare, decomposition.py), text.

The unit is the sample: all turns and repeats of one sample are drawn together, since they are not independent.
Everything starts from `sums` [num_samples, num_quantities], one row of summed counts a sample, and sums before it
divides: a metric is that of the summed row, never a mean of rows. Counts stay exact in float64 whatever the order of
adding, and seeds are fixed, so the same log gives the same digits anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isfinite, sqrt

import numpy as np

#: Maps summed quantities [..., num_quantities] to values [..., num_metrics]; NaN where nothing was counted.
Metric = Callable[[np.ndarray], np.ndarray]
Interval = tuple[float, float]

NUM_DRAWS = 2_000
NUM_PERMUTATIONS = 10_000
CONFIDENCE = 0.95
SEED = 20_261_130
#: Fewer samples (of those that a metric counts anything in) have no interval.
MIN_SAMPLES = 20
#: Fewer repeats have no interval of speed.
MIN_REPEATS = 3
#: Difference in standard errors that a two-sided test at 5 % sees in 80 % of all trials: 1.96 + 0.84.
VISIBLE_STANDARD_ERRORS = 2.8
#: Cells of the [draws, samples] tables that are held at once: 32 MB of float64.
_CHUNK_CELLS = 4_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """Metrics of the form offset + numerator / denominator, each a column of the sums. A `Metric`."""

    #: [num_metrics] Columns of the sums.
    numerator: np.ndarray
    #: [num_metrics] Columns of the sums.
    denominator: np.ndarray
    #: [num_metrics] 1 for an acceptance length (the bonus token), else 0.
    offset: np.ndarray

    def __call__(self, sums: np.ndarray) -> np.ndarray:
        """[..., num_metrics] of sums [..., num_quantities]; NaN where the denominator is 0."""
        return self.offset + quotient(sums[..., self.numerator], sums[..., self.denominator])


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of two runs. None is "not measured", or too few samples or repeats to say."""

    base: float | None
    new: float | None
    #: new - base, of the unrounded values.
    difference: float | None
    #: Not adjusted for the number of metrics that are looked at.
    interval: Interval | None
    #: Of the paired difference.
    standard_error: float | None

    @property
    def smallest_visible(self) -> float | None:
        """A true difference of this size would be seen in four of five such comparisons.

        None where there is no spread either, which says nothing of what could have been seen.
        """
        return VISIBLE_STANDARD_ERRORS * self.standard_error if self.standard_error else None

    @property
    def is_alike(self) -> bool:
        """Whether both runs are the same in every sample (or repeat)."""
        return self.difference == 0 and self.standard_error == 0

    @property
    def is_visible(self) -> bool | None:
        """Whether the interval leaves out 0; None without an interval."""
        return leaves_out_zero(self.interval)


def leaves_out_zero(interval: Interval | None) -> bool | None:
    """None without an interval."""
    return None if interval is None else not interval[0] <= 0 <= interval[1]


def quotient(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Elementwise; NaN where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full(np.shape(numerator), np.nan), where=denominator != 0)


def bootstrap(sums: np.ndarray, metric: Metric, num_draws: int = NUM_DRAWS, seed: int = SEED) -> np.ndarray:
    """[num_draws, num_metrics] The metric of samples drawn with replacement.

    The draws depend on the number of samples and the seed alone, so two calls with equal ones are paired.
    """
    return metric(_resampled(sums, num_draws, seed))


def percentile_interval(
    draws: np.ndarray, num_samples: np.ndarray | int, confidence: float = CONFIDENCE
) -> list[Interval | None]:
    """[num_metrics] The middle `confidence` of draws [num_draws, num_metrics]; None under 20 samples.

    `num_samples` is one number, or one for each metric: in how many samples it counts anything (`num_counted`). The
    percentiles lie a little further out than confidence says, at those that make the interval of a mean as wide as
    Student's: drawing n from n underestimates a variance by (n - 1) / n, and few samples know it badly (the "expanded
    percentile interval" of T. Hesterberg, What Teachers Should Know About the Bootstrap, The American Statistician 69,
    2015).
    """
    counted = np.broadcast_to(np.asarray(num_samples), draws.shape[1:])
    return [_interval_of(column, int(count), confidence) for column, count in zip(draws.T, counted, strict=True)]


def num_counted(sums: np.ndarray, metric: Metric) -> np.ndarray:
    """[num_metrics] Samples in which a metric counts anything: those whose own value is not NaN."""
    return np.isfinite(metric(sums)).sum(axis=0)


def metric_intervals(
    sums: np.ndarray, ratios: Ratios, num_draws: int = NUM_DRAWS, seed: int = SEED, confidence: float = CONFIDENCE
) -> list[Interval | None]:
    """[num_metrics] Bootstrap intervals of one run.

    None under 20 samples, and where all draws are equal: samples without any spread say nothing of their uncertainty.
    """
    counted = num_counted(sums, ratios)
    # Of many metrics, such as those of every position behind every number of accepted drafts, few have enough.
    enough = np.flatnonzero(counted >= MIN_SAMPLES)
    columns, places = np.unique([ratios.numerator[enough], ratios.denominator[enough]], return_inverse=True)
    numerator, denominator = places.reshape(2, -1)
    draws = bootstrap(sums[:, columns], Ratios(numerator, denominator, ratios.offset[enough]), num_draws, seed)
    intervals: list[Interval | None] = [None] * len(counted)
    for index, one in zip(enough, percentile_interval(draws, counted[enough], confidence), strict=True):
        intervals[index] = None if one is None or one[0] == one[1] else one
    return intervals


def paired_difference(
    base_sums: np.ndarray,
    new_sums: np.ndarray,
    metric: Metric,
    num_draws: int = NUM_DRAWS,
    seed: int = SEED,
    confidence: float = CONFIDENCE,
) -> list[Difference]:
    """[num_metrics] new - base, where row i of both sums is the same sample. Both runs are drawn alike."""
    base, new = metric(base_sums.sum(axis=0)), metric(new_sums.sum(axis=0))
    width = base_sums.shape[1]
    both = _resampled(np.concatenate([base_sums, new_sums], axis=1), num_draws, seed)
    draws = metric(both[:, width:]) - metric(both[:, :width])
    counted = np.minimum(num_counted(base_sums, metric), num_counted(new_sums, metric))
    intervals = percentile_interval(draws, counted, confidence)
    return [
        Difference(
            base=number(base[index]),
            new=number(new[index]),
            difference=number(new[index] - base[index]),
            interval=intervals[index],
            standard_error=None if intervals[index] is None else standard_error(draws[:, index], int(counted[index])),
        )
        for index in range(len(base))
    ]


def standard_error(draws: np.ndarray, num_samples: int) -> float:
    """Of a metric with draws [num_draws], some of which may be NaN."""
    return float(np.nanstd(draws, ddof=1)) * sqrt(num_samples / (num_samples - 1))


def swap_test(
    base_sums: np.ndarray,
    new_sums: np.ndarray,
    ratios: Ratios,
    num_permutations: int = NUM_PERMUTATIONS,
    seed: int = SEED,
) -> list[float | None]:
    """[num_metrics] Two-sided p of "base and new could be swapped within each sample"; None where nothing was counted.

    With r the ratio of both runs together, sample i adds (n'_i - r d'_i) / D' - (n_i - r d_i) / D to the difference of
    ratios (n numerator, d denominator, D its sum; primes are new), and these sum to it exactly. Swapping base and new
    in a sample turns the sign of what it adds. Each run is divided by its own D: runs whose sums differ in size, as
    drafts do with k, would otherwise trade weight when they are swapped, and the test would lose its level.
    """
    added = _added_by_sample(base_sums, new_sums, ratios)
    observed = np.abs(added.sum(axis=0))
    at_least = np.zeros(added.shape[1])
    for signs in _signs(len(added), num_permutations, seed):
        at_least += (np.abs(signs @ added) >= observed * (1 - 1e-9)).sum(axis=0)
    p_values = (1 + at_least) / (1 + num_permutations)
    return [float(p) if isfinite(size) else None for p, size in zip(p_values, observed, strict=True)]


def mcnemar(only_base: int, only_new: int) -> float:
    """Exact two-sided p that as many flip one way as the other: binomial of the smaller among both, share 1/2."""
    from scipy.special import bdtr

    flips = only_base + only_new
    return min(1.0, 2 * float(bdtr(min(only_base, only_new), flips, 0.5))) if flips else 1.0


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p values adjusted for their number by Holm's step-down, in the order given. None is not one of the family."""
    tested = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * p))
        adjusted[index] = largest
    return adjusted


def wilson(successes: float, total: float, confidence: float = CONFIDENCE) -> Interval | None:
    """Wilson's score interval of successes / total, which need not be whole; None where total is 0."""
    from scipy.special import ndtri

    if total == 0:
        return None
    z2 = float(ndtri((1 + confidence) / 2)) ** 2
    share = successes / total
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = sqrt(z2) / (1 + z2 / total) * sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def clustered_wilson(successes: np.ndarray, totals: np.ndarray, confidence: float = CONFIDENCE) -> Interval | None:
    """Wilson's interval of a share of answers, successes and totals [num_samples] being those of each sample.

    Answers to one sample are not independent. They are counted as the number of independent answers that would leave
    the share as uncertain as it is between samples: share (1 - share) / variance, at most the number of answers, with
    the variance of a ratio of sums over samples (W. Cochran, Sampling Techniques, 3rd ed., 1977, section 9A.2). Where
    samples show no variance, each counts once.
    """
    answered = totals > 0
    successes, totals = successes[answered], totals[answered]
    total, num_samples = float(totals.sum()), len(totals)
    if total == num_samples:
        return wilson(float(successes.sum()), total, confidence)
    share = float(successes.sum()) / total
    variance = float(np.square(successes - share * totals).sum()) / total**2
    if num_samples == 1 or variance == 0:
        effective = float(num_samples)
    else:
        effective = min(total, share * (1 - share) / variance * (num_samples - 1) / num_samples)
    return wilson(share * effective, effective, confidence)


def repeat_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval | None:
    """Student's interval of the mean over repeats of a whole run; None under 3. The only interval of a speed."""
    if len(values) < MIN_REPEATS:
        return None
    half = _student(len(values), confidence) * _error_of_mean(values)
    mean = float(np.mean(values))
    return mean - half, mean + half


def paired_repeat_difference(base: Sequence[float], new: Sequence[float], confidence: float = CONFIDENCE) -> Difference:
    """Means over repeats and Student's interval of new - base, repeat i of base with repeat i of new (interleaved).

    Where their numbers differ, only as many as both have are paired; under 3 there is no interval.
    """
    num_pairs = min(len(base), len(new))
    pairs = [(float(base[index]), float(new[index])) for index in range(num_pairs)]
    differences = [second - first for first, second in pairs]
    interval = repeat_interval(differences, confidence)
    return Difference(
        base=float(np.mean([first for first, _ in pairs])) if pairs else None,
        new=float(np.mean([second for _, second in pairs])) if pairs else None,
        difference=float(np.mean(differences)) if pairs else None,
        interval=interval,
        standard_error=None if interval is None else _error_of_mean(differences),
    )


def number(value: float) -> float | None:
    """A plain float; None for NaN."""
    return float(value) if isfinite(value) else None


def _resampled(sums: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """[num_draws, num_quantities] Sums of samples drawn with replacement."""
    num_samples = len(sums)
    values = np.asarray(sums, np.float64)
    drawn = np.zeros((num_draws, values.shape[1]))
    if num_samples == 0:
        return drawn
    rng = np.random.default_rng(seed)
    for first, last in _chunks(num_draws, num_samples):
        chosen = rng.integers(0, num_samples, (last - first, num_samples))
        chosen += np.arange(last - first)[:, None] * num_samples
        times = np.bincount(chosen.ravel(), minlength=(last - first) * num_samples)
        drawn[first:last] = times.reshape(last - first, num_samples).astype(np.float64) @ values
    return drawn


def _chunks(num_draws: int, num_samples: int) -> Iterator[tuple[int, int]]:
    size = max(1, _CHUNK_CELLS // max(1, num_samples))
    for first in range(0, num_draws, size):
        yield first, min(first + size, num_draws)


def _interval_of(draws: np.ndarray, num_samples: int, confidence: float) -> Interval | None:
    from scipy.special import ndtr

    draws = draws[np.isfinite(draws)]
    if num_samples < MIN_SAMPLES or len(draws) == 0:
        return None
    tail = float(ndtr(-sqrt(num_samples / (num_samples - 1)) * _student(num_samples, confidence)))
    low, high = np.quantile(draws, [tail, 1 - tail])
    return float(low), float(high)


def _added_by_sample(base_sums: np.ndarray, new_sums: np.ndarray, ratios: Ratios) -> np.ndarray:
    """[num_samples, num_metrics] What each sample adds to new - base; NaN where a run counted nothing."""
    totals = base_sums.sum(axis=0) + new_sums.sum(axis=0)
    both = quotient(totals[ratios.numerator], totals[ratios.denominator])

    def share(sums: np.ndarray) -> np.ndarray:
        excess = sums[:, ratios.numerator] - both * sums[:, ratios.denominator]
        return quotient(excess, np.broadcast_to(sums[:, ratios.denominator].sum(axis=0), excess.shape))

    return share(new_sums) - share(base_sums)


def _signs(num_samples: int, num_permutations: int, seed: int) -> Iterator[np.ndarray]:
    """Chunks [permutations, num_samples] of +1 and -1."""
    rng = np.random.default_rng(seed)
    for first, last in _chunks(num_permutations, num_samples):
        yield rng.integers(0, 2, (last - first, num_samples), dtype=np.int8) * 2.0 - 1.0


def _student(num_values: int, confidence: float) -> float:
    """Student's quantile for the mean of `num_values`."""
    from scipy.special import stdtrit

    return float(stdtrit(num_values - 1, (1 + confidence) / 2))


def _error_of_mean(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) / sqrt(len(values))
