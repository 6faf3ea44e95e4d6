"""Sums by sample: over all samples they give every figure of metrics.json, at the path that they name."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from specbench.reports import sample_sums
from specbench.reports.acceptance import acceptance_metrics
from specbench.reports.acceptance_sections import previous_rows
from specbench.reports.sample_sums import BELOW_K, WITH_PREVIOUS, acceptance_sums, category_sums, paired
from specbench.reports.step_columns import StepColumns, step_columns
from specbench.run_directory import EventLog
from tests.reports.event_logs import simulate


def columns_of(log: EventLog, num_samples: int | None = None) -> StepColumns:
    """With `num_samples`, requests are shared out among so many samples, as turns and repeats are."""
    if num_samples is not None:
        log.requests = [replace(one, sample_id=f"s{index % num_samples}") for index, one in enumerate(log.requests)]
    return step_columns(log.requests, log.verify_steps)


def at_path(metrics: object, path: str) -> object:
    """`acceptance.by_previous[2].drafts` in nested containers."""
    for key in re.findall(r"[^.\[\]]+", path):
        metrics = metrics[int(key)] if isinstance(metrics, list) else metrics[key]
    return metrics


@pytest.mark.parametrize("seed", range(6))
def test_sums_over_all_samples_are_the_figures_at_their_paths(seed, monkeypatch):
    monkeypatch.setattr(sample_sums, "_CHUNK_ROWS", 100)
    k = 1 + seed % 4
    columns = columns_of(simulate(seed, k=k, is_ragged=True), num_samples=7)
    acceptance = acceptance_metrics(columns, k)
    counted = [acceptance_sums(columns, k), *category_sums(columns, k).values()]
    num_checked = 0
    for one in counted:
        values = one.ratios(one.sums.sum(axis=0))
        for path, value in zip(one.paths, values, strict=True):
            if not path.startswith((BELOW_K, WITH_PREVIOUS)):
                expected = at_path({"acceptance": acceptance}, path)
                assert (None if np.isnan(value) else value) == (
                    None if expected is None else pytest.approx(expected)
                ), path
                num_checked += 1
    assert num_checked == (3 + k + 3) * (2 + 2 * k) + 1


def test_totals_over_buckets_are_those_of_the_report():
    columns = columns_of(simulate(1, k=3))
    one = acceptance_sums(columns, 3)
    values = dict(zip(one.paths, one.ratios(one.sums.sum(axis=0)), strict=True))
    rows = dict(previous_rows(acceptance_metrics(columns, 3)))
    for path, label in ((BELOW_K, "0 to 2 together"), (WITH_PREVIOUS, "all with a previous step")):
        assert values[f"{path}.acceptance_length"] == rows[label]["acceptance_length"]
        assert values[f"{path}.per_position[0]"] == rows[label]["accepted_at_position"][0] / rows[label]["drafts"]


def test_turns_and_repeats_of_a_sample_are_one_row():
    log = simulate(2, k=2, num_requests=12, num_warmup=0)
    together = acceptance_sums(columns_of(log, num_samples=4), 2)
    apart = acceptance_sums(columns_of(simulate(2, k=2, num_requests=12, num_warmup=0)), 2)
    assert together.sample_ids == ("s0", "s1", "s2", "s3")
    row_of = {name: row for row, name in enumerate(apart.sample_ids)}
    for sample in range(4):
        rows = [row_of[f"r{index}"] for index in range(sample, 12, 4)]
        assert together.sums[sample] == pytest.approx(apart.sums[rows].sum(axis=0))


def test_pairing_keeps_what_both_have():
    base = acceptance_sums(columns_of(simulate(1, k=1)), 1)
    new = acceptance_sums(columns_of(simulate(2, k=3, num_requests=15)), 3)
    left, right = paired(base, new)
    assert left.sample_ids == right.sample_ids == new.sample_ids
    assert left.paths == right.paths and set(left.paths) == set(base.paths) & set(new.paths)
    for before, after in ((base, left), (new, right)):
        rows = [before.sample_ids.index(name) for name in after.sample_ids]
        expected = dict(zip(before.paths, before.ratios(before.sums[rows].sum(axis=0)), strict=True))
        values = after.ratios(after.sums.sum(axis=0))
        assert values == pytest.approx([expected[path] for path in after.paths], nan_ok=True)


def test_a_run_without_requests_has_no_rows():
    columns = step_columns([], [])
    one = acceptance_sums(columns, 2)
    assert one.sample_ids == () and one.sums.shape[0] == 0
    assert np.isnan(one.ratios(one.sums.sum(axis=0))).all()
    assert category_sums(columns, 2) == {}
