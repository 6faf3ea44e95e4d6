"""Arrival times follow the laws that they are named after, depend on nothing but the seed, and a trace is replayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from specbench.arrivals import ClosedLoad, OpenLoad, arrival_times, check_timetable, make_load
from specbench.errors import UserError
from specbench.run_config import LoadConfig

EMPTY = LoadConfig(name="closed", concurrency=None, warmup=0, repeats=1, reset_cache=True)
POISSON = dataclasses.replace(EMPTY, name="poisson", rate=20.0)
TRACE = dataclasses.replace(EMPTY, name="trace", time_scale=1.0)
#: A law is doubted below this; seeds are fixed, so a test that passes always passes.
LEVEL = 1e-3


def times(config: LoadConfig, num_requests: int = 4000, seed: int = 0, repeat: int = 0) -> np.ndarray:
    return arrival_times(config, seed=seed, repeat=repeat, num_requests=num_requests)


def notices(config: LoadConfig, num_requests: int) -> tuple[str, ...]:
    return check_timetable(config, seed=0, num_repeats=2, num_requests=num_requests)


def gaps(config: LoadConfig, **changes: int) -> np.ndarray:
    return np.diff(times(config, **changes), prepend=0.0)


def written(folder: Path, text: str) -> str:
    file = folder / "trace.jsonl"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_closed_load_has_no_timetable() -> None:
    load = make_load(dataclasses.replace(EMPTY, concurrency=4), seed=0, repeat=0, num_requests=9)
    assert load == ClosedLoad(4) and load.scheduled_s(7) is None


@pytest.mark.parametrize("seed", range(5))
def test_poisson_gaps_pass_a_test_against_the_exponential_law(seed: int) -> None:
    from scipy.stats import kstest

    assert kstest(gaps(POISSON, seed=seed), "expon", args=(0, 1 / 20.0)).pvalue > LEVEL


def test_the_test_against_the_exponential_law_can_fail() -> None:
    from scipy.stats import kstest

    even = dataclasses.replace(POISSON, name="gamma", burstiness=1.3)
    assert kstest(gaps(even), "expon", args=(0, 1 / 20.0)).pvalue < LEVEL


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_and_the_spread_of_their_burstiness(burstiness: float) -> None:
    from scipy.stats import kstest

    drawn = gaps(dataclasses.replace(POISSON, name="gamma", burstiness=burstiness))
    assert kstest(drawn, "gamma", args=(burstiness, 0, 1 / (20.0 * burstiness))).pvalue > LEVEL
    assert drawn.std() / drawn.mean() == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_burst_sends_its_requests_at_once_and_keeps_the_rate() -> None:
    config = dataclasses.replace(EMPTY, name="burst", rate=4.0, burst_size=3)
    assert times(config, 7).tolist() == [0.0, 0.0, 0.0, 0.75, 0.75, 0.75, 1.5]


@pytest.mark.parametrize(("rate_from", "rate"), [(10.0, 50.0), (50.0, 10.0), (20.0, 20.0)])
def test_a_ramp_changes_its_rate_in_a_straight_line_and_then_keeps_it(rate_from: float, rate: float) -> None:
    from scipy.stats import kstest

    config = dataclasses.replace(EMPTY, name="ramp", rate_from=rate_from, rate=rate, ramp_s=30.0)
    arrived = times(config)
    # The expected number of arrivals by each arrival are the points of a Poisson process of rate 1.
    inside = np.minimum(arrived, 30.0)
    expected = rate_from * inside + (rate - rate_from) / 60 * inside**2 + rate * np.maximum(arrived - 30.0, 0.0)
    assert arrived[-1] > 40.0, "the part of equal rate is looked at too"
    assert kstest(np.diff(expected, prepend=0.0), "expon").pvalue > LEVEL


def test_offline_is_everything_at_once() -> None:
    assert times(dataclasses.replace(EMPTY, name="offline"), 3).tolist() == [0.0, 0.0, 0.0]


def test_times_depend_on_the_seed_and_the_repeat_alone() -> None:
    first = times(POISSON, 50)
    assert (first == times(POISSON, 50)).all() and (first == times(POISSON, 80)[:50]).all()
    assert (first != times(POISSON, 50, seed=1)).all() and (first != times(POISSON, 50, repeat=1)).all()


def test_a_resumed_run_keeps_the_gaps_of_what_is_left() -> None:
    whole = times(POISSON, 6)
    load = make_load(POISSON, seed=0, repeat=0, num_requests=6, places=[2, 3, 5])
    assert isinstance(load, OpenLoad)
    assert load.times_s == pytest.approx((0.0, whole[3] - whole[2], whole[5] - whole[2]))


def test_a_trace_is_replayed_from_its_first_timestamp(tmp_path: Path) -> None:
    file = written(tmp_path, '100\n\n{"timestamp": 100.5, "input_length": 7}\n100.5\n104\n')
    config = dataclasses.replace(TRACE, trace=file, time_scale=2.0)
    assert times(config, 3).tolist() == [0.0, 1.0, 1.0]
    assert notices(config, 4) == ()
    assert notices(config, 3) == ("load.trace: the first 3 of 4 timestamps are replayed.",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1\n3\n\n2\n", "line 4: time goes backwards, from 3 s in line 2 to 2 s"),
        ("1\nsoon\n", "line 2: neither a number nor JSON"),
        ('{"time": 3}\n', 'line 1: no "timestamp"'),
        ('{"timestamp": "3"}\n', "line 1: the timestamp must be a number"),
        ("NaN\n", "line 1: the timestamp must be a number"),
        ("1" + "0" * 400 + "\n", "line 1: the timestamp must be a number"),
        ("0\n1\n1e9\n", "load.time_scale: the last of 3 requests would arrive 1e+09 s after"),
        ("true\n", "line 1: the timestamp must be a number"),
        ("\n", "holds no timestamps"),
        ("1\n2\n", "has 2 timestamps for 3 requests; say eval.num_samples=2"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    config = dataclasses.replace(TRACE, trace=written(tmp_path, text))
    with pytest.raises(UserError) as caught:
        notices(config, 3)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"load\.trace: .* does not exist"):
        notices(dataclasses.replace(TRACE, trace=str(tmp_path / "none")), 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"rate": 1e-300},
        {"name": "gamma", "rate": 1e-200, "burstiness": 1e-200},
        {"name": "burst", "rate": 1e-9, "burst_size": 1},
        {"name": "ramp", "rate_from": 1e-200, "rate": 1e-200, "ramp_s": 1.0},
    ],
)
def test_a_timetable_without_an_end_is_refused(changes: dict) -> None:
    with pytest.raises(UserError, match=r"^load\.rate: the last of 4 requests would arrive .* 30 days"):
        notices(dataclasses.replace(POISSON, **changes), 4)
