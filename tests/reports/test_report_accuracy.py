"""Accuracy: failures and invalid answers are wrong, every repeat counts, scorers stand side by side."""

from __future__ import annotations

import pytest

from specbench.records import TaskResult
from specbench.reports.accuracy import accuracy_metrics
from specbench.reports.compared_run import run_of_log
from specbench.reports.markdown import report_markdown
from specbench.reports.metrics import compute_metrics
from specbench.reports.number_format import percent, percent_of
from specbench.reports.pull_request import run_pull_request
from specbench.reports.statistics import wilson
from specbench.reports.terminal_summary import summary_rows
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


#: right of all, by task, in the published table of MMAU.
MMAU = {"music": (256, 334), "sound": (260, 333), "speech": (259, 333)}


def mmau_log() -> EventLog:
    log = EventLog()
    for task, (correct, total) in MMAU.items():
        for number in range(total):
            name = f"{task}-{number}"
            groups = {
                "task": task,
                "difficulty": "easy" if number % 2 else "hard",
                "sub_category": f"kind {number % 7}",
            }
            log.requests.append(make_request(name, category=task))
            log.samples.append(make_sample(name, float(number < correct), category=task, groups=groups))
    return log


def test_groups_stand_in_place_of_the_category_and_come_out_as_published():
    log = mmau_log()
    metrics = compute_metrics(make_run(1), log)
    by = metrics["eval"]["by"]
    assert list(by) == ["task", "difficulty", "sub_category"]
    assert {name: (entry["correct"], entry["total"]) for name, entry in by["task"].items()} == MMAU
    assert sum(entry["total"] for entry in by["sub_category"].values()) == 1000
    report = report_markdown(make_run(1), metrics)
    for line in (
        "**77.50% (775/1,000)** by the scorer `official`",
        "| music | 76.65% (256/334) |",
        "| sound | 78.08% (260/333) |",
        "| speech | 77.78% (259/333) |",
        "| Sub-category | Accuracy",
    ):
        assert line in " ".join(report.split()), line


def test_a_pull_request_and_the_terminal_show_the_first_grouping_alone():
    run, log = make_run(1), mmau_log()
    metrics = compute_metrics(run, log)
    compared = run_of_log(run, log, "runs/a")
    body = " ".join(run_pull_request(compared).split("<details>")[0].split())
    assert "Task music | 76.65% (256/334)" in body and "Difficulty" not in body
    rows = [(row.label, row.value) for row in summary_rows(run, metrics)]
    assert ("  task speech", "77.78% (259/333)") in rows
    assert not any("difficulty" in label for label, _ in rows)


def test_an_evals_own_results_have_its_own_columns():
    results = [
        TaskResult("gsm8k", "3.0", name, 5, "exact_match", value, 0.0057, 1319, True, 0)
        for name, value in (("strict-match", 0.9545), ("flexible-extract", None))
    ]
    run = make_run(1, task_results=results)
    text = " ".join(report_markdown(run, compute_metrics(run, scored())).split())
    assert "| gsm8k | 3.0 | strict-match | 5 | exact_match | ↑ | 0.9545 | 0.0057 | 1,319 |" in text
    assert "| gsm8k | 3.0 | flexible-extract | 5 | exact_match | ↑ | n/a | 0.0057 | 1,319 |" in text
    labels = [(row.label, row.value) for row in summary_rows(run, compute_metrics(run, scored()))]
    assert ("  gsm8k", "0.9545 exact_match, strict-match") in labels
    assert "Repeat" not in text.split("As the eval itself gives it")[1].split("##")[0]
