"""Intervals of one run: where they stand, what they are of, and that the report prints them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from specbench.reports.acceptance_sections import acceptance_sections
from specbench.reports.metrics import compute_metrics
from specbench.reports.sample_sums import BELOW_K, WITH_PREVIOUS
from specbench.reports.table import section_markdown
from tests.reports.event_logs import make_run, simulate
from tests.reports.test_report_sample_sums import at_path

METRICS = compute_metrics(make_run(3), simulate(1, k=3, num_requests=150))


def test_every_interval_is_around_the_figure_at_its_path():
    intervals = METRICS["intervals"]
    for path, (low, high) in intervals.items():
        if not path.startswith((BELOW_K, WITH_PREVIOUS)):
            assert low <= at_path(METRICS, path) <= high, path
    expected = {"acceptance_rate", "acceptance_length", "per_request_mean_length", "per_position[2]",
                "per_position_conditional[1]", "by_previous[2].per_position[0]", "by_previous[5].per_position[0]",
                "by_previous[3].per_position_conditional[1]", "by_category.a.acceptance_rate",
                "by_turn[0].acceptance_rate", "by_output_position[0].acceptance_length",
                "by_prompt_length[0].per_position[0]"}  # fmt: skip
    assert {f"acceptance.{name}" for name in expected} <= intervals.keys()


def test_nothing_drafted_after_drafts_has_no_interval():
    assert not [path for path in METRICS["intervals"] if path.startswith("acceptance.by_previous[1]")]


def test_few_samples_have_no_interval_though_they_have_many_requests():
    log = simulate(1, k=3, num_requests=150)
    log.requests = [replace(one, sample_id=f"s{index % 19}") for index, one in enumerate(log.requests)]
    assert compute_metrics(make_run(3), log)["intervals"] == {}


def test_requests_of_one_sample_are_not_taken_for_independent():
    log = simulate(1, k=3, num_requests=60, num_warmup=0)
    twins = [replace(one, request_id=one.request_id + "t", repeat=1) for one in log.requests]
    twin_steps = [replace(one, request_id=one.request_id + "t") for one in log.verify_steps]
    alone = compute_metrics(make_run(3), log)["intervals"]
    log.requests += twins
    log.verify_steps += twin_steps
    doubled = compute_metrics(make_run(3), log)["intervals"]
    assert doubled.keys() == alone.keys()
    for path, interval in alone.items():
        assert doubled[path] == pytest.approx(interval), path


def test_without_speculation_there_is_none():
    metrics = compute_metrics(make_run(None, method="none"), simulate(1, k=0, num_requests=40))
    assert metrics["intervals"] == {}


def test_intervals_are_printed_beside_their_figures():
    sections = [*map(section_markdown, acceptance_sections(METRICS["acceptance"], METRICS["intervals"]))]
    interval = r"\d+\.\d\d% to \d+\.\d\d%"
    assert re.search(rf"\| Acceptance rate +\| +\d+\.\d\d% \| +{interval} \|", sections[0])
    assert re.search(r"\| Acceptance length +\| +\d\.\d\d \| +\d\.\d\d to \d\.\d\d \|", sections[0])
    assert re.search(
        rf"\| Position 0 \| +\d+ \| +\d+\.\d\d% \| {interval} \| +\d+\.\d\d% \| +{interval} \|", sections[1]
    )
    for label in ("0 \\(draft rejected\\)", "0 to 2 together", "all with a previous step", "all"):
        assert re.search(rf"\| {label} +\| +[\d,]+ \| +\d+\.\d\d% \| {interval} \|", sections[2]), label
    assert re.search(rf"\| a +\| +\d+ \| +\d+\.\d\d% \(\d+/[\d,]+\) \| {interval} \|", sections[4])
