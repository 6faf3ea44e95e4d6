"""Accuracy: failures and invalid answers are wrong, every repeat counts, scorers stand side by side."""

from __future__ import annotations

import pytest

from specbench.reports.accuracy import accuracy_metrics
from specbench.reports.metrics import compute_metrics
from specbench.reports.number_format import percent, percent_of
from specbench.reports.statistics import wilson
from specbench.run_directory import EventLog
from tests.reports.event_logs import make_request, make_run, make_sample


def test_published_accuracy_and_its_interval():
    assert percent_of(1259, 1319) == "95.45% (1,259/1,319)"
    assert [percent(one) for one in wilson(1259, 1319)] == ["94.19%", "96.45%"]


def scored() -> EventLog:
    requests = [make_request(name, sample_id=name) for name in "abcdef"]
    requests[3] = make_request("d", finish_reason="error", error="lost", category="hard")
    requests[4] = make_request("e", finish_reason="aborted")
    samples = [
        make_sample("a", 1.0, extracted={"official": "1", "last": "1"}, score={"official": 1.0, "last": 1.0}),
        make_sample("b", 0.0, extracted={"official": None, "last": "2"}, score={"official": 0.0, "last": 1.0}),
        make_sample("c", 0.0, is_truncated=True, category="hard"),
        make_sample("e", 1.0),  # right as far as it went, but aborted
        make_sample("f", None, reference=None, extracted={"official": "4"}),
    ]
    return EventLog(requests=requests, samples=samples)


def test_failures_and_invalid_answers_are_wrong_and_stay_in_the_total():
    accuracy = compute_metrics(make_run(1), scored())["eval"]
    assert (accuracy["correct"], accuracy["total"], accuracy["accuracy"]) == (1, 5, 0.2)
    assert (accuracy["invalid"], accuracy["truncated"]) == (2, 1)
    assert accuracy["name"] == "nano_problems" and accuracy["scorer"] == "official"
    assert accuracy["interval"] == list(wilson(1, 5))
    assert accuracy["by"]["category"]["hard"]["total"] == 2  # c, and d which never gave an answer


def test_scorers_side_by_side():
    scorers = compute_metrics(make_run(1), scored())["eval"]["scorers"]
    assert scorers["official"] == {"accuracy": 0.2, "correct": 1, "total": 5, "invalid": 2}
    assert scorers["last"]["correct"] == 2


def test_an_answer_that_is_invalid_cannot_be_right():
    samples = [make_sample("a", 1.0, extracted={"official": None})]
    accuracy = accuracy_metrics("x", "official", [make_request("a")], samples)
    assert (accuracy["correct"], accuracy["invalid"]) == (0, 1)


def test_every_repeat_counts():
    requests = [make_request(f"r{repeat}", sample_id="a", repeat=repeat) for repeat in range(3)]
    samples = [make_sample("a", float(repeat > 0), repeat=repeat) for repeat in range(3)]
    accuracy = accuracy_metrics("x", "official", requests, samples)
    assert (accuracy["correct"], accuracy["total"]) == (2, 3)


def test_equal_answers_to_one_sample_do_not_narrow_the_interval():
    def measured(num_repeats: int) -> dict:
        keys = [(f"s{index}", repeat) for index in range(50) for repeat in range(num_repeats)]
        requests = [make_request(f"{name}-{repeat}", sample_id=name, repeat=repeat) for name, repeat in keys]
        samples = [make_sample(name, float(int(name[1:]) % 5 > 0), repeat=repeat) for name, repeat in keys]
        return accuracy_metrics("x", "official", requests, samples)

    once, thrice = measured(1), measured(3)
    assert once["interval"] == list(wilson(40, 50))
    assert (thrice["correct"], thrice["total"]) == (120, 150)
    assert thrice["interval"] == pytest.approx(wilson(0.8 * 49, 49))


def test_without_a_scorer_nothing_is_scored():
    accuracy = accuracy_metrics("x", None, [make_request("a")], [make_sample("a", None, extracted={}, score={})])
    assert accuracy["accuracy"] is accuracy["total"] is accuracy["invalid"] is accuracy["interval"] is None
    assert (accuracy["truncated"], accuracy["scorers"], accuracy["by"]) == (0, {}, {})
