"""Statistics: small cases by hand and by scipy, and simulations that intervals and tests must live up to."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from scipy.stats import binomtest, t

from specbench.reports import statistics
from specbench.reports.statistics import (
    Difference,
    Ratios,
    bootstrap,
    clustered_wilson,
    holm,
    mcnemar,
    metric_intervals,
    num_counted,
    paired_difference,
    paired_repeat_difference,
    percentile_interval,
    repeat_interval,
    swap_test,
    wilson,
)
from tests.reports.simulated_samples import NAMES, RATIOS, sample_traits, simulated_sums

SHARE = Ratios(np.array([0]), np.array([1]), np.array([0]))


def sums_of(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int64)


def random_sums(num_samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    totals = rng.integers(1, 30, num_samples)
    return np.stack([rng.binomial(totals, rng.beta(4, 2, num_samples)), totals], axis=1)


def test_a_metric_is_the_ratio_of_sums_and_nan_without_a_denominator():
    length = Ratios(np.array([0, 0]), np.array([1, 2]), np.array([1, 0]))
    value = length(np.array([[3, 4, 0], [6, 3, 1]]))
    assert value[0, 0] == 1.75 and np.isnan(value[0, 1])
    assert value[1].tolist() == [3.0, 6.0]


def test_every_draw_is_a_sum_of_whole_samples():
    sums = np.array([[1, 100], [10, 100], [100, 100]])
    draws = bootstrap(sums, SHARE, num_draws=500)[:, 0]
    possible = {(a + b + c) / 300 for a, b, c in product([1, 10, 100], repeat=3)}
    assert set(draws) <= possible and len(set(draws)) == len(possible)
    assert draws.mean() == pytest.approx(0.37, abs=0.05)


def test_draws_depend_on_seed_and_number_of_samples_alone(monkeypatch):
    sums = random_sums(50)
    draws = bootstrap(sums, SHARE)
    monkeypatch.setattr(statistics, "_CHUNK_CELLS", 777)
    assert np.array_equal(bootstrap(sums, SHARE), draws)
    assert np.array_equal(bootstrap(np.concatenate([sums, sums], axis=1), SHARE), draws)
    assert not np.array_equal(bootstrap(sums, SHARE, seed=1), draws)


def test_spread_of_draws_is_that_of_the_ratio_of_sums():
    sums = random_sums(400)
    share = sums[:, 0].sum() / sums[:, 1].sum()
    expected = np.sqrt(np.square(sums[:, 0] - share * sums[:, 1]).sum()) / sums[:, 1].sum()
    assert bootstrap(sums, SHARE)[:, 0].std() == pytest.approx(expected, rel=0.06)


def test_interval_of_a_mean_is_as_wide_as_students():
    sums = np.stack([np.random.default_rng(1).normal(5, 1, 25), np.ones(25)], axis=1)
    (low, high) = metric_intervals(sums, SHARE, num_draws=40_000)[0]
    expected = t.interval(0.95, 24, sums[:, 0].mean(), sums[:, 0].std(ddof=1) / 5)
    assert (low, high) == pytest.approx(expected, abs=0.03)


def test_no_interval_under_twenty_samples_that_count_anything():
    assert metric_intervals(random_sums(19), SHARE) == [None]
    assert metric_intervals(random_sums(20), SHARE) != [None]
    mostly_empty = np.concatenate([random_sums(19), np.zeros((100, 2), np.int64)])
    assert num_counted(mostly_empty, SHARE).tolist() == [19]
    assert metric_intervals(mostly_empty, SHARE) == [None]
    assert metric_intervals(np.zeros((0, 2)), SHARE) == [None]


def test_samples_without_any_spread_have_no_interval():
    assert metric_intervals(sums_of(*[(7, 7)] * 30), SHARE) == [None]


def test_draws_that_are_nan_are_left_out():
    draws = np.array([[np.nan], [0.0], [1.0]])
    ((low, high),) = percentile_interval(draws, 30)
    assert 0.0 <= low < 0.1 and 0.9 < high <= 1.0
    assert percentile_interval(np.full((9, 1), np.nan), 30) == [None]


def test_difference_of_a_run_with_itself_is_none_at_all():
    sums = random_sums(60)
    (itself,) = paired_difference(sums, sums, SHARE)
    assert (itself.difference, itself.interval, itself.standard_error) == (0.0, (0.0, 0.0), 0.0)
    assert itself.is_visible is False
    assert swap_test(sums, sums, SHARE) == [1.0]


def test_paired_difference_is_of_unrounded_values_and_knows_what_it_could_see():
    base = random_sums(100)
    new = base + np.array([1, 2]) * (np.arange(100)[:, None] % 2)
    (one,) = paired_difference(base, new, SHARE)
    base_share, new_share = (part[:, 0].sum() / part[:, 1].sum() for part in (base, new))
    assert (one.base, one.new, one.difference) == (base_share, new_share, new_share - base_share)
    assert one.interval[0] < one.difference < one.interval[1]
    assert one.smallest_visible == 2.8 * one.standard_error
    unpaired = np.hypot(*(bootstrap(part, SHARE)[:, 0].std() for part in (base, new)))
    assert one.standard_error < unpaired / 3


def test_too_few_samples_leave_the_difference_without_interval():
    (one,) = paired_difference(random_sums(10), random_sums(10, 1), SHARE)
    assert one.difference is not None
    assert one.interval is one.standard_error is one.smallest_visible is one.is_visible is None


def test_nothing_counted_is_not_measured():
    empty, filled = np.zeros((30, 2), np.int64), random_sums(30)
    (one,) = paired_difference(empty, filled, SHARE)
    assert one.base is one.difference is one.interval is None and one.new is not None
    assert swap_test(empty, filled, SHARE) == [None]


def test_swap_test_counts_the_swaps_that_differ_as_much():
    base = sums_of((1, 10), (2, 10), (3, 10), (5, 10))
    new = sums_of((4, 10), (4, 10), (4, 10), (3, 10))
    steps = [3, 2, 1, -2]
    as_much = [abs(sum(sign * step for sign, step in zip(signs, steps, strict=True))) >= 4 for signs in
               product([1, -1], repeat=4)]  # fmt: skip
    (p,) = swap_test(base, new, SHARE)
    assert p == pytest.approx(np.mean(as_much), abs=0.02)


def test_swap_test_sees_a_difference_that_is_there_and_never_says_zero():
    base = random_sums(200)
    new = base - np.array([1, 0]) * (base[:, :1] > 0)
    assert swap_test(base, new, SHARE) == [pytest.approx(1 / 10_001)]


def test_swap_test_adds_up_to_the_difference():
    base, new = random_sums(30), 3 * random_sums(30, 1)
    added = statistics._added_by_sample(base, new, SHARE)
    assert added.sum() == pytest.approx(SHARE(new.sum(axis=0))[0] - SHARE(base.sum(axis=0))[0])


def test_mcnemar_by_hand_and_by_scipy():
    assert mcnemar(0, 0) == mcnemar(4, 4) == 1.0
    assert mcnemar(1, 5) == mcnemar(5, 1) == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar(0, 10) == pytest.approx(2 / 1024)
    for one, other in [(3, 12), (30, 41), (7, 8)]:
        assert mcnemar(one, other) == pytest.approx(binomtest(one, one + other).pvalue)


def test_holm_by_hand():
    assert holm([0.01, 0.04, None, 0.03]) == [pytest.approx(0.03), pytest.approx(0.06), None, pytest.approx(0.06)]
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == [] and holm([None]) == [None]


@pytest.mark.parametrize(("successes", "total"), [(0, 5), (5, 5), (3, 7), (775, 1000)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_wilson_is_scipys(successes, total, confidence):
    expected = binomtest(successes, total).proportion_ci(confidence, method="wilson")
    assert wilson(successes, total, confidence) == pytest.approx((expected.low, expected.high))


def test_wilson_of_nothing():
    assert wilson(0, 0) is None
    assert clustered_wilson(np.array([]), np.array([])) is None


def test_answers_of_one_sample_count_as_far_as_they_differ():
    single, once = np.array([1, 0, 1, 1, 0, 1, 1, 1, 0, 1]), np.ones(10)
    assert clustered_wilson(single, once) == wilson(7, 10)
    # Three equal answers a sample say what one answer does: 10 samples, less one for the estimated variance.
    assert clustered_wilson(3 * single, 3 * once) == pytest.approx(wilson(0.7 * 9, 9))
    # Answers that spread more evenly over samples than chance would have it are no better than independent ones.
    assert clustered_wilson(np.array([2] * 9 + [1]), 3 * once) == pytest.approx(wilson(19, 30))
    assert clustered_wilson(np.full(10, 2), 3 * once) == pytest.approx(wilson(2 / 3 * 10, 10))
    assert clustered_wilson(3 * once, 3 * once) == wilson(10, 10)
    assert clustered_wilson(np.array([2]), np.array([3])) == pytest.approx(wilson(2 / 3, 1))


def test_speed_has_an_interval_from_three_repeats_on():
    assert repeat_interval([10.0, 11.0]) is None
    expected = t.interval(0.95, 2, 11.0, 1 / np.sqrt(3))
    assert repeat_interval([10.0, 11.0, 12.0]) == pytest.approx(expected)


def test_speed_is_paired_by_the_order_of_repeats():
    one = paired_repeat_difference([10.0, 20.0, 30.0], [11.0, 21.5, 31.5])
    assert (one.base, one.new) == (20.0, pytest.approx(64 / 3))
    assert one.difference == pytest.approx(4 / 3)
    assert one.standard_error == pytest.approx(1 / 6)
    assert one.interval == pytest.approx(t.interval(0.95, 2, 4 / 3, 1 / 6))
    assert one.is_visible
    assert paired_repeat_difference([10.0], [12.0]) == Difference(10.0, 12.0, 2.0, None, None)
    assert paired_repeat_difference([], []).difference is None


def coverage(num_simulations: int, num_samples: int, seed: int) -> dict[str, float]:
    """Share of simulated runs whose interval holds the ratio of all of them together."""
    rng = np.random.default_rng(seed)
    sums = simulated_sums(*sample_traits(num_simulations * num_samples, rng), k=3, rng=rng)
    truth = RATIOS(sums.sum(axis=0))
    runs = sums.reshape(num_simulations, num_samples, -1)
    intervals = [metric_intervals(run, RATIOS, seed=index) for index, run in enumerate(runs)]
    low, high = np.moveaxis(np.array(intervals), 2, 0)
    return dict(zip(NAMES, ((low <= truth) & (truth <= high)).mean(axis=0), strict=True))


def false_alarms(num_simulations: int, num_samples: int, ks: tuple[int, int], seed: int) -> dict[str, dict[str, float]]:
    """Share of pairs of runs with equal chances that a test at 5 % tells apart: on position 0, equal for any k."""
    rng = np.random.default_rng(seed)
    ease, num_steps = sample_traits(num_simulations * num_samples, rng)
    lengths = [np.maximum(num_steps // (1 + k // 2), 1) for k in ks]
    base, new = (
        simulated_sums(ease, steps, k, rng).reshape(num_simulations, num_samples, -1)
        for k, steps in zip(ks, lengths, strict=True)
    )
    metric = Ratios(RATIOS.numerator[2:3], RATIOS.denominator[2:3], RATIOS.offset[2:3])
    pairs = list(zip(base, new, strict=True))
    p_values = [swap_test(one, other, metric, 1_000, seed=i)[0] for i, (one, other) in enumerate(pairs)]
    visible = [
        paired_difference(one, other, metric, 1_000, seed=i)[0].is_visible for i, (one, other) in enumerate(pairs)
    ]
    return {"swap test": float(np.mean(np.array(p_values) <= 0.05)), "interval": float(np.mean(visible))}


def test_intervals_hold_the_truth_in_a_few_simulations():
    for name, share in coverage(150, 100, seed=3).items():
        assert 0.89 <= share <= 0.99, name


@pytest.mark.parametrize("ks", [(3, 3), (1, 8)])
def test_paired_tests_keep_their_level_in_a_few_simulations(ks):
    for name, share in false_alarms(150, 60, ks, seed=4).items():
        assert 0.005 <= share <= 0.11, name


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [100, 300])
def test_intervals_hold_the_truth(num_samples):
    shares = coverage(1_000, num_samples, seed=5)
    print(num_samples, shares)
    for name, share in shares.items():
        assert 0.93 <= share <= 0.97, name


@pytest.mark.slow
@pytest.mark.parametrize("ks", [(3, 3), (1, 8), (1, 32)])
def test_paired_tests_keep_their_level(ks):
    shares = false_alarms(1_000, 100, ks, seed=6)
    print(ks, shares)
    for name, share in shares.items():
        assert 0.03 <= share <= 0.07, name
