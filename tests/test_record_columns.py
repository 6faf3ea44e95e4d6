"""Steps as columns are the same steps, whichever way they came."""

from __future__ import annotations

import os
import random
from dataclasses import replace

import numpy as np
import pytest

from specbench import record_columns, record_tables, run_directory
from specbench.errors import UserError
from specbench.record_columns import EngineStepColumns, RequestSteps, VerifyStepColumns, step_lists
from specbench.records import EngineStep, VerifyStep
from specbench.reports.step_columns import step_columns
from specbench.run_directory import EventLog, RunDirectory
from tests.reports.event_logs import make_request, make_sample, make_step, simulate

ENGINE_STEPS = [
    EngineStep(index, index / 3, index / 3 + 0.1, 0, 2, 5, 0.001, None if index % 2 else 0.03, 0.002, None, 7, 0, 0)
    for index in range(9)
]


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(tmp_path / "run")


def write_journal(directory, log):
    with directory.open_journal() as journal:
        for step in log.engine_steps:
            journal.append_engine_step(step)
        for request in log.requests:
            steps = [step for step in log.verify_steps if step.request_id == request.request_id]
            journal.append_request(request, steps, None)


def test_columns_are_a_sequence_of_their_records():
    log = simulate(seed=1)
    columns = VerifyStepColumns.of(log.verify_steps)
    assert list(columns) == log.verify_steps and len(columns) == len(log.verify_steps)
    assert columns[2:5] == log.verify_steps[2:5] and columns[-1] == log.verify_steps[-1]
    assert list(EngineStepColumns.of(ENGINE_STEPS)) == ENGINE_STEPS
    assert VerifyStepColumns.of(columns) is columns


def test_a_duration_not_measured_is_nan_in_columns_and_none_in_records():
    columns = EngineStepColumns.of(ENGINE_STEPS)
    assert np.isnan(columns.target_s).tolist() == [index % 2 == 1 for index in range(9)]
    assert np.isnan(columns.draft_s).all() and columns[1].target_s is None


@pytest.mark.parametrize("seed", range(3))
def test_journal_and_tables_give_the_same_columns_however_they_are_cut(directory, monkeypatch, seed):
    monkeypatch.setattr(record_columns, "BATCH_ROWS", 5)
    monkeypatch.setattr(record_tables, "ROWS_A_GROUP", 4)
    log = replace(simulate(seed), engine_steps=ENGINE_STEPS)
    write_journal(directory, log)
    for read in (directory.finalise(), directory.read_tables()):
        assert list(read.verify_steps) == log.verify_steps
        assert list(read.engine_steps) == ENGINE_STEPS
        assert read.requests == log.requests


def test_token_ids_survive_the_tables(directory):
    samples = [
        make_sample("a", 1.0, prompt_token_ids=[7, 200_000], output_token_ids=[]),
        make_sample("b", None, prompt_token_ids=None, output_token_ids=[1, 2, 3]),
    ]
    directory.write_tables(EventLog(samples=samples))
    read = directory.read_tables().samples
    assert [one.prompt_token_ids and list(one.prompt_token_ids) for one in read] == [[7, 200_000], None]
    assert [list(one.output_token_ids) for one in read] == [[], [1, 2, 3]]
    directory.write_tables(EventLog(samples=read))
    assert directory.read_tables().samples == read


def test_rows_in_order_are_not_copied_and_others_are_sorted():
    log = simulate(seed=3)
    columns = VerifyStepColumns.of(log.verify_steps)
    ordered = step_columns(log.requests, columns)
    assert np.shares_memory(ordered.num_accepted, columns.num_accepted)
    shuffled = list(log.verify_steps)
    random.Random(0).shuffle(shuffled)
    again = step_columns(log.requests, shuffled)
    for name in ("request", "step", "num_accepted", "previous", "end_s"):
        np.testing.assert_array_equal(getattr(again, name), getattr(ordered, name))


def test_warm_up_in_the_middle_and_rows_of_no_request():
    requests = [make_request("a"), make_request("w", is_warmup=True), make_request("b")]
    steps = [make_step(name, step, 2, step) for name in ("a", "w", "lost", "b") for step in range(2)]
    columns = step_columns(requests, steps)
    assert columns.request.tolist() == [0, 0, 1, 1] and columns.num_orphan_rows == 2
    assert columns.previous.tolist() == [-2, 0, -2, 0]


@pytest.mark.parametrize("tail", [1, 3, 10_000])
def test_the_end_of_a_journal_is_found_from_behind(directory, monkeypatch, tail):
    monkeypatch.setattr(run_directory, "JOURNAL_TAIL_BYTES", tail)
    write_journal(directory, EventLog([make_request("a")], [make_step("a", 0, 2, 1)], ENGINE_STEPS))
    path = directory.path / "journal.jsonl"
    os.truncate(path, path.stat().st_size - 20)
    directory.open_journal().close()
    assert path.read_bytes().endswith(b"\n") and len(directory.read_journal().engine_steps) == len(ENGINE_STEPS)
    path.write_text("torn at once")
    directory.open_journal().close()
    assert path.read_bytes() == b""


def test_steps_of_a_running_request_are_the_records_that_follow_from_its_numbers():
    steps = RequestSteps("a")
    assert len(steps) == 0 and list(steps) == []
    steps.add((7, 1, 3, 3, 2, 4, 0.5))
    steps.add((9, 3, 3, 1, 2, 4, 0.75))
    expected = [
        VerifyStep("a", 0, 7, 1, 3, 3, 2, 2, True, 4, 0.5),
        VerifyStep("a", 1, 9, 3, 3, 1, 2, 0, False, 4, 0.75),
    ]
    assert list(steps) == expected and steps == expected and steps[-1] == expected[1] and steps[0:1] == expected[:1]
    assert step_lists(steps, 10) == step_lists(expected, 10)
    assert step_lists(steps, 10)["engine_step"] == [17, 19]
    assert list(VerifyStepColumns.of(steps)) == expected


def test_engine_steps_are_on_disk_with_the_next_request_and_never_wait_for_long(directory, monkeypatch):
    monkeypatch.setattr(run_directory, "ENGINE_STEPS_A_LINE", 4)
    with directory.open_journal() as journal:
        for step in ENGINE_STEPS[:3]:
            journal.append_engine_step(step)
        assert len(directory.read_journal().engine_steps) == 0
        journal.append_request(make_request("a"), [], None)
        assert list(directory.read_journal().engine_steps) == ENGINE_STEPS[:3]
        for step in ENGINE_STEPS[3:]:
            journal.append_engine_step(step)
        assert list(directory.read_journal().engine_steps) == ENGINE_STEPS[:7]
    assert list(directory.read_journal().engine_steps) == ENGINE_STEPS


@pytest.mark.parametrize(
    "change",
    [
        ("[0,1]", "[0]"),
        ("[0,1]", '["x",1]'),
        ('"num_tokens":[5', '"num_toks":[5'),
        ('"num_tokens":[5', '"num_tokens":['),
    ],
)
def test_damaged_columns_are_a_user_error(directory, change):
    log = EventLog([make_request("a")], [make_step("a", step, 2, 1) for step in range(2)], ENGINE_STEPS)
    write_journal(directory, log)
    path = directory.path / "journal.jsonl"
    path.write_text(path.read_text().replace(*change, 1))
    with pytest.raises(UserError, match=r"journal\.jsonl:\d+: not a journal line"):
        directory.read_journal()
