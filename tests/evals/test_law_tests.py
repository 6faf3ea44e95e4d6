"""The tests of laws: their level where nothing differs, and that they see what they say they would see."""

from __future__ import annotations

import numpy as np
import pytest

from specbench.evals import law_tests
from specbench.evals.law_tests import LEVEL, POWER, compare_laws, compare_paired, min_pairs

LAW = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02])


def drawn(rng: np.random.Generator, share: float, num_draws: int = 300) -> list[tuple[np.ndarray, np.ndarray]]:
    """Four prompts' counts; on the left a share of the draws is turned into the likeliest outcome."""
    departed = (1 - share) * LAW
    departed[0] += share
    return [(rng.multinomial(num_draws, departed), rng.multinomial(num_draws, LAW)) for _ in range(4)]


def test_p_values_of_one_law_are_uniform(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(law_tests, "NUM_PERMUTATIONS", 499)
    rng = np.random.default_rng(0)
    p_values = np.sort([compare_laws(drawn(rng, 0.0)).p_value for _ in range(60)])
    distance = np.abs(p_values - np.arange(1, 61) / 60).max()
    assert distance < 1.95 / 60**0.5, "Kolmogorov's distance at a level of 0.1 %"


def test_a_departure_of_the_stated_size_is_seen_as_often_as_stated():
    rng = np.random.default_rng(1)
    stated = compare_laws(drawn(rng, 0.0)).detectable
    assert stated is not None and 0.05 <= stated <= 0.3
    num_seen = sum(compare_laws(drawn(rng, stated)).p_value < LEVEL for _ in range(20))
    assert num_seen >= 20 * POWER - 4
    smaller = sum(compare_laws(drawn(rng, stated / 4)).p_value < LEVEL for _ in range(10))
    assert smaller <= 5, "what is not said to be seen mostly is not"


def test_outcomes_that_never_repeat_say_nothing_and_raise_no_alarm():
    num_draws = 50
    left = np.array([1] * num_draws + [0] * num_draws)
    result = compare_laws([(left, 1 - left)])
    assert result.p_value > 0.5


def test_one_outcome_alone_is_one_law():
    result = compare_laws([(np.array([20]), np.array([20]))])
    assert (result.statistic, result.p_value, result.detectable) == (0.0, 1.0, None)


def test_sides_of_different_sizes():
    rng = np.random.default_rng(2)
    same = [(rng.multinomial(100, LAW), rng.multinomial(400, LAW)) for _ in range(4)]
    assert compare_laws(same).p_value > LEVEL
    other = [(rng.multinomial(100, LAW[::-1]), rng.multinomial(400, LAW)) for _ in range(4)]
    assert compare_laws(other).p_value == pytest.approx(1e-4)


def test_paired_differences():
    rng = np.random.default_rng(3)
    around_zero = compare_paired(rng.normal(0, 1, 64))
    assert around_zero.p_value > LEVEL
    assert around_zero.detectable == pytest.approx((3.2905 + 1.2816) / 8, rel=0.2), "normal quantiles over sqrt(64)"
    num_seen = sum(compare_paired(rng.normal(around_zero.detectable, 1, 64)).p_value < LEVEL for _ in range(30))
    assert num_seen >= 20


def test_few_pairs_cannot_show_anything():
    """All of one sign is as likely as 2 in 2^n."""
    assert min_pairs() == 11
    assert compare_paired(np.ones(10)).p_value > LEVEL
    assert compare_paired(np.ones(10)).detectable is None
    assert compare_paired(np.ones(14)).p_value < LEVEL
