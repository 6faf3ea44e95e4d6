"""Position 0 taken apart: published counts give the published terms, and no sentence says what it cannot know."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from specbench.reports.decomposition import Decomposition, decompose
from specbench.reports.decomposition_section import decomposition_section, decomposition_sentence
from specbench.reports.drafted_run import DraftedRun
from specbench.reports.number_format import percent, points
from specbench.reports.step_columns import step_columns
from specbench.reports.table import section_markdown
from specbench.run_directory import EventLog
from tests.reports.event_logs import log_of_accepted, make_request, make_step, simulate
from tests.reports.simulated_runs import draft_hits, drafted_run

#: previous accepted -> drafts, position-0 hits
MTP1 = {0: (4214, 2968), 1: (20673, 17709)}
MTP8 = {
    0: (2418, 1695),
    1: (1529, 1069),
    2: (955, 700),
    3: (846, 585),
    4: (597, 432),
    5: (543, 407),
    6: (368, 263),
    7: (361, 273),
    8: (2268, 2046),
}


def run_of(log: EventLog, k: int, label: str = "") -> DraftedRun:
    return DraftedRun(label or f"mtp{k}", k, step_columns(log.requests, log.verify_steps))


def bucket_run(buckets: dict, k: int, num_samples: int = 400, label: str = "", seed: int = 0) -> DraftedRun:
    """Each draft of the table is the second step of a request; requests are dealt out to samples by chance."""
    pairs = []
    for previous, (drafts, hits) in buckets.items():
        pairs += [(previous, 1)] * hits + [(previous, 0)] * (drafts - hits)
    random.Random(seed + k).shuffle(pairs)
    log = log_of_accepted(pairs, k)
    log.requests = [replace(one, sample_id=f"s{index % num_samples}") for index, one in enumerate(log.requests)]
    return run_of(log, k, label)


@pytest.fixture(scope="module")
def published() -> Decomposition:
    return decompose(bucket_run(MTP1, 1), bucket_run(MTP8, 8))


def test_published_investigation_comes_out_of_its_counts(published):
    rejected, accepted = published.classes
    assert (rejected.base_drafts, rejected.base_hits) == (4214, 2968)
    assert (rejected.new_drafts, rejected.new_hits) == (7617, 5424)
    assert (accepted.base_drafts, accepted.new_drafts, accepted.new_hits) == (20673, 2268, 2046)
    rates = [
        (percent(one.difference.base), percent(one.difference.new)) for one in (*published.classes, published.total)
    ]
    assert rates == [("70.43%", "71.21%"), ("85.66%", "90.21%"), ("83.08%", "75.57%")]
    assert f"{100 * published.predicted.value:.1f}" == "73.9"
    assert (points(published.mix.value), points(published.rate.value)) == ("-9.16 pts", "+1.64 pts")
    assert published.mix.value + published.rate.value == pytest.approx(published.total.difference.difference)
    assert published.unmatched.value == 0


def test_other_order_of_the_published_terms(published):
    share = 7617 / 9885 - 4214 / 24887
    new_rates = 5424 / 7617 - 2046 / 2268
    assert published.mix_at_new_rates.value == pytest.approx(share * new_rates)
    assert published.mix_at_new_rates.value + published.rate_at_base_mix.value == pytest.approx(
        published.mix.value + published.rate.value
    )


def test_published_rejected_class_shows_no_difference(published):
    rejected = published.classes[0].difference
    assert points(rejected.difference) == "+0.78 pts"
    assert rejected.standard_error == pytest.approx(0.0088, abs=0.0006)
    assert rejected.interval[0] < 0 < rejected.interval[1]
    assert published.classes[0].is_visible is False
    sentence = decomposition_sentence(published)
    assert "77.1% of mtp8's drafts follow a rejection, against 16.9% of mtp1's" in sentence
    assert "predicts 73.93%, -9.16 pts from the mix alone" in sentence
    assert "Remaining difference within matched history: +1.64 pts" in sentence
    assert "it alone says nothing about the drafters" in sentence
    assert "Rejected last time: 71.21% against 70.43%, +0.78 pts: no difference visible." in sentence
    assert "better" not in section_markdown(decomposition_section(published))


def test_tables_hold_the_published_values(published):
    text = " ".join(section_markdown(decomposition_section(published)).split())
    assert "| rejected last time | 4,214 (16.9%) | 70.43% | 7,617 (77.1%) | 71.21% | +0.78 pts |" in text
    assert "| all with a previous step | 24,887 (100.0%) | 83.08% | 9,885 (100.0%) | 75.57% | -7.51 pts |" in text
    assert "| Mix: what the drafts follow | -9.16 pts |" in text
    assert "Unmatched" not in text


def test_buckets_stand_alone_when_k_is_equal():
    half = {previous: (drafts // 2, hits // 2) for previous, (drafts, hits) in MTP8.items()}
    same = decompose(bucket_run(MTP8, 8, label="base"), bucket_run(half, 8, label="new", seed=1))
    assert [one.label for one in same.classes] == [f"{accepted} accepted last time" for accepted in range(9)]
    assert [one.base_drafts for one in same.classes] == [drafts for drafts, _ in MTP8.values()]
    assert not any(one.is_visible for one in same.classes)
    sentence = decomposition_sentence(same)
    assert "Within matched history no difference is visible" in sentence
    assert "a true one of " in sentence and "would be seen four times in five" in sentence


def test_small_classes_are_merged_with_their_neighbour_and_empty_ones_are_unmatched():
    base = bucket_run({0: (100, 50), 1: (19, 10), 2: (100, 60), 3: (5, 5), 4: (40, 30), 5: (30, 30)}, 8, label="base")
    new = bucket_run({0: (100, 50), 1: (400, 10), 2: (21, 6), 3: (9, 9), 4: (12, 4), 7: (3, 1)}, 8, label="new")
    one = decompose(base, new)
    assert [(c.label, c.base_drafts, c.new_drafts) for c in one.classes] == [
        ("0 or 1 accepted last time", 119, 500),
        ("2 or 3 or 4 accepted last time", 145, 42),
        ("5 accepted last time", 30, 0),
        ("7 accepted last time", 0, 3),
    ]
    assert [c.is_matched for c in one.classes] == [True, True, False, False]


def test_terms_with_an_unmatched_class_by_hand():
    base = bucket_run({0: (40, 20), 1: (60, 48), 2: (100, 90)}, 2, label="base")
    new = bucket_run({0: (60, 33), 1: (40, 34)}, 2, label="new")
    one = decompose(base, new)
    # Among classes of both: base 0.4 and 0.6 at 0.50 and 0.80, new 0.6 and 0.4 at 0.55 and 0.85.
    assert one.mix.value == pytest.approx(0.2 * 0.50 - 0.2 * 0.80)
    assert one.rate.value == pytest.approx(0.05)
    assert one.predicted.value == pytest.approx(0.6 * 0.50 + 0.4 * 0.80)
    assert one.unmatched.value == pytest.approx(0 - (158 / 200 - 68 / 100))
    assert one.total.difference.difference == pytest.approx(67 / 100 - 158 / 200)
    assert "Drafts that only one run has (2 accepted last time) add -11.00 pts" in decomposition_sentence(one)
    assert "Unmatched: classes that only one run has" in section_markdown(decomposition_section(one))


@pytest.mark.parametrize("seed", range(4))
def test_terms_add_up_to_the_difference(seed):
    ks = (3, 3) if seed % 2 else (2, 4)
    base, new = (run_of(simulate(seed + 10 * k, k=k, num_requests=40, is_ragged=True), k, f"run {k}") for k in ks)
    one = decompose(base, new)
    for mix, rate in ((one.mix, one.rate), (one.mix_at_new_rates, one.rate_at_base_mix)):
        whole = mix.value + rate.value + one.unmatched.value
        assert whole == pytest.approx(one.total.difference.difference)
    assert sum(c.base_drafts for c in one.classes) == one.total.base_drafts
    is_counted = base.columns.is_draft & (base.columns.previous >= 0)
    assert one.total.base_drafts == is_counted.sum()
    assert one.total.base_hits == (is_counted & (base.columns.num_accepted > 0)).sum()


def test_fully_accepted_is_all_that_was_drafted():
    log = EventLog([make_request("r")])
    log.verify_steps = [
        make_step("r", step, *counts) for step, counts in enumerate([(2, 2), (3, 2), (3, 0), (0, 0), (3, 1)])
    ]
    one = decompose(run_of(log, 3), run_of(log_of_accepted([(1, 1), (0, 1)], 1), 1))
    assert {c.label: c.base_drafts for c in one.classes} == {"rejected or fully accepted last time": 2}
    many = EventLog([make_request(f"r{index}") for index in range(20)])
    many.verify_steps = [replace(step, request_id=f"r{index}") for index in range(20) for step in log.verify_steps]
    other = run_of(log_of_accepted([(1, 1, 0, 1)] * 20, 1), 1)
    drafts = {c.label: (c.base_drafts, c.base_hits) for c in decompose(run_of(many, 3), other).classes}
    assert drafts == {"rejected last time": (20, 0), "fully accepted last time": (20, 20)}


def test_a_run_against_itself_shows_no_difference_at_all():
    base = bucket_run(MTP8, 8)
    sentence = decomposition_sentence(decompose(base, replace(base, label="again")))
    assert sentence == (
        "Position 0 is accepted at 75.57% in mtp8 and in again, over drafts with a previous step: the same in every "
        "sample, and behind the same steps."
    )


def test_few_samples_say_nothing_of_chance():
    one = decompose(bucket_run(MTP1, 1, num_samples=19), bucket_run(MTP8, 8, num_samples=19))
    assert one.rate.interval is one.total.difference.interval is one.total.is_visible is None
    sentence = decomposition_sentence(one)
    assert "no interval from under 20 samples" in sentence
    assert "no difference" not in sentence
    assert "too few samples" in sentence


def test_runs_without_drafts_behind_drafts_are_not_taken_apart():
    nothing = run_of(log_of_accepted([(1,), (0,)], 1), 1, "short")
    one = decompose(bucket_run(MTP1, 1), nothing)
    assert one.mix is one.predicted is None
    assert decomposition_sentence(one) == (
        "Nothing to take apart: short has no draft whose request's previous step drafted too."
    )
    empty = decompose(run_of(EventLog(), 1, "a"), run_of(EventLog(), 8, "b"))
    assert section_markdown(decomposition_section(empty)).endswith(
        "a and b has no draft whose request's previous step drafted too."
    )


def test_runs_without_a_class_in_common():
    one = decompose(bucket_run({0: (50, 30)}, 2, label="a"), bucket_run({1: (50, 30)}, 2, label="b"))
    assert one.mix is None
    assert "no class of history in common" in decomposition_sentence(one)


def test_other_samples_can_be_taken_apart_too():
    base = bucket_run(MTP1, 1)
    renamed = [replace(one, sample_id="other " + one.sample_id) for one in base.columns.requests]
    apart = decompose(replace(base, columns=replace(base.columns, requests=renamed)), bucket_run(MTP8, 8))
    assert points(apart.rate.value) == "+1.64 pts"
    assert apart.classes[0].difference.standard_error == pytest.approx(0.0088, abs=0.0008)


def test_equal_drafters_with_other_k_differ_by_what_their_drafts_follow():
    hits = draft_hits(150, 200, 8, np.random.default_rng(1))
    one = decompose(drafted_run("k1", hits[:, :, :1]), drafted_run("k8", hits))
    assert one.total.difference.difference < -0.02 and one.total.is_visible
    assert one.mix.value < -0.02 and one.mix.is_visible
    assert abs(one.rate.value) < abs(one.mix.value)
    assert "better" not in section_markdown(decomposition_section(one))


def false_alarms(num_simulations: int, num_samples: int) -> float:
    """Share of pairs of runs with the same law whose rate term is visible."""
    rng = np.random.default_rng(8)
    visible = []
    for _ in range(num_simulations):
        runs = [drafted_run(name, draft_hits(num_samples, 60, 3, rng)) for name in ("a", "b")]
        visible.append(decompose(*runs).rate.is_visible)
    return float(np.mean(visible))


@pytest.mark.slow
def test_rate_term_keeps_its_level():
    share = false_alarms(1_000, 100)
    print(share)
    assert 0.03 <= share <= 0.07


def test_rate_term_is_seldom_visible_without_a_difference():
    assert false_alarms(20, 40) <= 0.25
