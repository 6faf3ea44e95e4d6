"""Acceptance by condition: hand-computed buckets, counts that add up, and merged rows with conditional rates."""

from __future__ import annotations

import numpy as np
import pytest

from specbench.reports.acceptance import acceptance_metrics
from specbench.reports.acceptance_sections import acceptance_sections, previous_rows
from specbench.reports.condition_sections import condition_sections
from specbench.reports.conditions import BUCKETS, condition_tables
from specbench.reports.step_columns import step_columns
from specbench.reports.table import section_markdown
from specbench.run_directory import EventLog
from tests.reports.event_logs import log_of_accepted, make_request, make_step, simulate


def tables(log: EventLog, k: int | None) -> dict:
    return condition_tables(step_columns(log.requests, log.verify_steps), k)


def short_and_long() -> EventLog:
    """Request a: 63 prompt tokens, nothing cached; b: 64 prompt tokens, 16 of them cached."""
    log = EventLog(
        [
            make_request("a", num_prompt_tokens=63, num_output_tokens=8),
            make_request("b", num_prompt_tokens=64, num_cached_prompt_tokens=16, num_output_tokens=30),
        ]
    )
    log.verify_steps = [
        make_step("a", 0, 2, 2, output_index=1, batch_size=2),
        make_step("a", 1, 2, 1, output_index=4, batch_size=2),
        make_step("a", 2, 0, 0, output_index=20, batch_size=2),  # no draft: in no bucket
        make_step("b", 0, 2, 0, output_index=15, batch_size=2),
        make_step("b", 1, 2, 2, output_index=16, batch_size=1),
    ]
    return log


def seen(table: list[dict]) -> list[tuple]:
    return [(row["bucket"], row["requests"], row["drafts"], row["accepted_tokens"]) for row in table]


def test_buckets_by_hand():
    found = tables(short_and_long(), 2)
    assert seen(found["by_output_position"]) == [("0 to 15", 2, 3, 3), ("16 to 31", 1, 1, 2)]
    assert seen(found["by_prompt_length"]) == [("0 to 63", 1, 2, 3), ("64 to 127", 1, 2, 2)]
    assert seen(found["by_cached_fraction"]) == [("0%", 1, 2, 3), ("25% to 50%", 1, 2, 2)]
    assert seen(found["by_batch_size"]) == [("1", 1, 1, 2), ("2", 2, 3, 3)]
    second = found["by_batch_size"][1]
    assert second["accepted_at_position"] == [2, 1]
    assert second["reached_position"] == [3, 2]
    assert second["per_position"] == pytest.approx([2 / 3, 1 / 3])
    assert second["per_position_conditional"] == pytest.approx([2 / 3, 1 / 2])
    assert (second["low"], second["below"]) == (2, 3)


@pytest.mark.parametrize(
    ("name", "value", "label"),
    [
        ("by_output_position", 0, "0 to 15"),
        ("by_output_position", 32, "32 to 63"),
        ("by_prompt_length", 8192, "8,192 to 16,383"),
        ("by_prompt_length", 2**30, "8,388,608 and more"),
        ("by_cached_fraction", 0.001, "under 25%"),
        ("by_cached_fraction", 1.0, "75% and more"),
        ("by_batch_size", 3, "3 to 4"),
        ("by_batch_size", 64, "33 to 64"),
        ("by_batch_size", 65, "65 to 128"),
    ],
)
def test_edges_are_fixed(name, value, label):
    buckets = BUCKETS[name]
    assert buckets.labels[buckets.index([value])[0]] == label


def test_a_cache_that_was_not_asked_is_not_nought():
    log = log_of_accepted([(1, 1)] * 3, 2)
    log.requests[1:] = [make_request(f"r{i}", num_cached_prompt_tokens=None, num_output_tokens=5) for i in (1, 2)]
    assert seen(tables(log, 2)["by_cached_fraction"]) == [("0%", 1, 2, 2)]


def test_millions_of_rows_fall_into_the_same_buckets():
    """A long array is looked up by number; a short one is searched."""
    buckets, values = BUCKETS["by_output_position"], np.arange(1 << 20) % 70_000
    found = buckets.index(values)
    for start in range(0, 1 << 20, 1 << 17):
        part = slice(start, start + 1000)
        assert (found[part] == buckets.index(values[part])).all()


@pytest.mark.parametrize("seed", range(4))
def test_every_table_counts_every_draft_once(seed):
    log = simulate(seed, k=3, is_ragged=True)
    pooled = acceptance_metrics(step_columns(log.requests, log.verify_steps), 3)
    for table in tables(log, 3).values():
        assert sum(row["drafts"] for row in table) == pooled["drafts"]
        assert sum(row["accepted_tokens"] for row in table) == pooled["accepted_tokens"]
        assert min(row["drafts"] for row in table) > 0
        assert all(0 < row["requests"] <= row["drafts"] for row in table)


def test_nothing_drafted_has_no_buckets_and_no_section():
    log = log_of_accepted([(0, 0)], 0)
    found = tables(log, None)
    assert list(found.values()) == [[]] * 5
    columns = step_columns(log.requests, log.verify_steps)
    assert condition_sections(acceptance_metrics(columns, None) | found, {}) == []


def test_section_prints_counts_and_marks_few():
    log = log_of_accepted([(1,) * 30, (2,) * 2], 2)
    log.verify_steps = [
        make_step("r0" if i < 30 else "r1", i % 30, 2, 1 if i < 30 else 2, batch_size=1 if i < 30 else 2)
        for i in range(32)
    ]
    columns = step_columns(log.requests, log.verify_steps)
    intervals = {"acceptance.by_batch_size[0].acceptance_length": [1.9, 2.1]}
    (section,) = condition_sections(acceptance_metrics(columns, 2) | condition_tables(columns, 2), intervals)
    text = section_markdown(section)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| Batch size | 1 | 1 | 30 | 50.00% | n/a | 2.00 | 1.90 to 2.10 | 100.00% | n/a | 100.0 / 0.0 |" in lines
    assert "| Batch size | 2 | 1 | 2 | 100.00%* | n/a | 3.00* | n/a | 100.00%* | n/a | 100.0 / 100.0 |" in lines


def test_rows_together_have_rates_given_the_previous_position():
    # The second step of each request: after 0 accepted 0, 1, 2 of 2; after 1 accepted 2; after 2 accepted 1.
    log = log_of_accepted([(0, 0), (0, 1), (0, 2), (1, 2), (2, 1)], 2)
    acceptance = acceptance_metrics(step_columns(log.requests, log.verify_steps), 2)
    rows = dict(previous_rows(acceptance))
    together = rows["0 to 1 together"]
    assert together["reached_position"] == [4, 3]
    assert together["per_position_conditional"] == pytest.approx([3 / 4, 2 / 3])
    assert rows["all with a previous step"]["per_position_conditional"] == pytest.approx([4 / 5, 2 / 4])
    text = section_markdown(acceptance_sections(acceptance, {})[2])
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "| 0 to 1 together | 75.00%* (4) | 66.67%* (3) |" in lines
    assert "| 2 (chain never broke) | 100.00%* (1) | 0.00%* (1) |" in lines
    assert "| 1 | 100.00%* (1) | 100.00%* (1) |" in lines


def test_a_position_that_nothing_reached_is_not_measured():
    text = section_markdown(acceptance_sections(acceptance_metrics(step_columns(*_rejected()), 2), {})[2])
    assert "| 0 (draft rejected) | 0.00%* (1) | n/a |" in [" ".join(line.split()) for line in text.splitlines()]


def _rejected() -> tuple[list, list]:
    log = log_of_accepted([(0, 0)], 2)
    return log.requests, log.verify_steps
