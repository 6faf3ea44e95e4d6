"""A run directory survives a kill, refuses what it does not know, and keeps no secret."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array
from dataclasses import replace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbench.errors import UserError
from specbench.records import (
    DataIdentity,
    EngineStep,
    ModelIdentity,
    OutputCheck,
    RequestRecord,
    RunRecord,
    SampleRecord,
    VerifyStep,
)
from specbench.run_directory import EventLog, RunDirectory

RUN = RunRecord(
    status="running",
    config={"spec": {"num_speculative_tokens": 8}, "engine": {"api_key": "sk-1", "base_url": "http://me:pw@host:1/v1"}},
    command="specbench +model=inkling engine.api_key=sk-1",
    version="0.1.0",
    commit=None,
    is_dirty=None,
    hardware={"gpus": []},
    packages={"torch": "2.11.0"},
    model=ModelIdentity("inkling", "inkling-nano", None, None, None, True, 5_800_000, 8),
    data=DataIdentity("nano_problems", None, None, None, True, 4),
    acceptance_source="engine",
    started_at="2026-11-01T00:00:00Z",
    output_check=OutputCheck("mismatch", 2, 1, 0, 1, 0.1, 0.2, 0.2, [{"request_id": "r0", "margin": 0.2}]),
    notices=["packaged data"],
)
REQUEST = RequestRecord("r0", "s0", 0, 0, False, None, 5, 2, 4, "stop", 0.0, 0.1, 0.2, 0.3, 0, None)
FAILED = RequestRecord("r1", "s1", 1, 2, False, "math", 5, 0, 0, "error", 0.5, None, None, None, 1, "lost")
WARMUP = replace(REQUEST, request_id="w0", is_warmup=True)
STEPS = [VerifyStep("r0", 0, 3, 1, 8, 3, 3, 1, True, 2, 0.3)]
ENGINE_STEP = EngineStep(3, 0.2, 0.3, 0, 1, 9, 0.001, None, 0.002, None, 7, 0, 0)
SAMPLE = SampleRecord(
    "s0",
    0,
    0,
    "q",
    None,
    "ä # 4\n",
    "",
    array("i", [1, 2]),
    "4",
    {"official": "4", "boxed": None},
    {"official": 1.0, "boxed": None},
    False,
)
BARE_SAMPLE = SampleRecord("s1", 1, 2, None, array("i", [3, 4]), "", "hm", array("i"), None, {}, {}, True, "math")
LOG = EventLog([REQUEST, FAILED], STEPS, [ENGINE_STEP], [SAMPLE, BARE_SAMPLE])


def rows(log):
    """The log with its columns as lists of records."""
    return EventLog(log.requests, list(log.verify_steps), list(log.engine_steps), log.samples)


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory.create(tmp_path / "outputs" / "run")
    directory.write_run(RUN)
    return directory


def write_journal(directory):
    with directory.open_journal() as journal:
        journal.append_engine_step(ENGINE_STEP)
        journal.append_request(REQUEST, STEPS, SAMPLE)
        journal.append_request(FAILED, [], BARE_SAMPLE)


def test_journal_round_trip(directory):
    write_journal(directory)
    assert rows(directory.read_event_log()) == LOG


def test_parquet_round_trip(directory):
    write_journal(directory)
    assert rows(directory.finalise()) == LOG
    assert rows(directory.read_tables()) == LOG


def test_samples_of_warmup_are_left_out(directory):
    with directory.open_journal() as journal:
        journal.append_request(WARMUP, [], SAMPLE)
    log = directory.read_journal()
    assert (log.requests, log.samples) == ([WARMUP], [])


def test_every_line_is_on_disk_before_the_journal_is_closed(directory):
    journal = directory.open_journal()
    journal.append_request(REQUEST, STEPS, SAMPLE)
    assert directory.read_journal().requests == [REQUEST]
    journal.close()


@pytest.mark.parametrize("cut", [1, 2, 40])
def test_a_torn_last_line_is_left_out_and_cut_off_before_appending(directory, cut):
    write_journal(directory)
    path = directory.path / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert rows(directory.read_journal()) == EventLog([REQUEST], STEPS, [ENGINE_STEP], [SAMPLE])
    with directory.open_journal() as journal:
        journal.append_request(FAILED, [], BARE_SAMPLE)
    assert rows(directory.read_journal()) == LOG


@pytest.mark.parametrize(
    "damage", ["{", '{"kind":"other"}', '{"kind":"engine_steps"}', "[]", "5", "", '{"kind":"request"}']
)
def test_a_damaged_middle_is_an_error_that_names_the_line(directory, damage):
    write_journal(directory)
    path = directory.path / "journal.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], damage, lines[2]]) + "\n")
    with pytest.raises(UserError, match=r"journal\.jsonl:2: not a journal line"):
        directory.read_journal()


def test_tables_of_a_resumed_run_are_not_believed(directory):
    write_journal(directory)
    directory.finalise()
    with directory.open_journal() as journal:
        journal.append_request(WARMUP, [], None)
    assert WARMUP in directory.read_event_log().requests
    directory.write_run(replace(RUN, status="finished"))
    assert rows(directory.read_event_log()) == LOG


def test_empty_run_has_empty_tables(directory):
    assert rows(directory.finalise()) == EventLog() == rows(directory.read_tables())


def test_pandas_reads_scores_and_missing_values(directory):
    directory.write_tables(LOG)
    samples = pd.read_parquet(directory.path / "samples.parquet")
    assert dict(samples["score"][0])["official"] == 1.0
    assert dict(samples["extracted"][0]) == {"official": "4", "boxed": None}
    requests = pd.read_parquet(directory.path / "requests.parquet")
    assert requests["first_token_s"].isna().tolist() == [False, True]
    assert str(requests["turn"].dtype) == "int16" and str(requests["num_output_tokens"].dtype) == "int32"


def test_foreign_columns_are_a_user_error(directory):
    directory.write_tables(LOG)
    pq.write_table(pa.table({"request_id": ["r0"]}), directory.path / "requests.parquet")
    with pytest.raises(UserError, match=r"requests\.parquet: its columns"):
        directory.read_tables()
    (directory.path / "requests.parquet").write_text("torn")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        directory.read_tables()


def test_run_round_trip_without_secrets(directory):
    run = directory.read_run()
    assert run.config["engine"] == {"api_key": "[redacted]", "base_url": "http://[redacted]@host:1/v1"}
    assert run.command == "specbench +model=inkling engine.api_key=[redacted]"
    assert replace(run, config=RUN.config, command=RUN.command) == RUN
    assert "sk-1" not in (directory.path / "run.json").read_text()


@pytest.mark.parametrize(
    "key", ["api_key", "HF_TOKEN", "hf.token", "password", "client-secret", "Authorization", "key"]
)
def test_secret_keys(tmp_path, key):
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_run(
        replace(RUN, config={"x": [{key: "hush-hush"}]}, error=f"refused: {key}=hush-hush Bearer hush-hush")
    )
    assert "hush-hush" not in (directory.path / "run.json").read_text()


def test_counts_of_tokens_are_no_secrets(directory):
    config = {
        "spec": {"num_speculative_tokens": 8},
        "stop_token_ids": [1],
        "tokenizer": "t",
        "max_tokens": 3,
        "token": 5,
    }
    directory.write_run(replace(RUN, config=config))
    assert directory.read_run().config == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema_version is 2, this specbench reads 1"),
        ({"schema_version": None}, "schema_version is None"),
        ({"surprise": 1}, "surprise"),
        ({"model": {}}, "not a run record"),
    ],
)
def test_unknown_run_files_are_user_errors(directory, change, message):
    path = directory.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        directory.read_run()
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        directory.read_run()


def test_a_directory_that_holds_a_run_is_refused_and_another_is_no_run(directory, tmp_path):
    with pytest.raises(UserError, match="already holds a run"):
        RunDirectory.create(directory.path)
    assert RunDirectory.open(directory.path) == directory
    with pytest.raises(UserError, match="not a run directory"):
        RunDirectory.open(tmp_path)


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written") as caught:
        RunDirectory.create(tmp_path / "file" / "run")
    assert "\n" not in str(caught.value)


def test_replacing_leaves_no_partial_file(directory):
    directory.write_run(replace(RUN, status="finished"))
    directory.write_file("metrics.json", "{}")
    directory.write_file("report.md", "# x\n")
    assert directory.read_run().status == "finished"
    assert sorted(path.name for path in directory.path.iterdir()) == ["metrics.json", "report.md", "run.json"]


def test_importing_does_not_load_the_table_library():
    code = "import sys, specbench.run_directory; sys.exit('pyarrow' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("acceptance_source", 1.5, "acceptance_source is 1.5"),
        ("packages", ["torch"], r"packages is \['torch'\]"),
        ("num_segments", "2", "num_segments is '2'"),
        ("config", {"spec": None}, "config.spec is None"),
        ("model", "inkling", "not a run record"),
    ],
)
def test_a_value_of_another_type_is_named(tmp_path, key, value, what):
    directory = RunDirectory.create(tmp_path)
    directory.write_run(RUN)
    content = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(content | {key: value}))
    with pytest.raises(UserError, match=what):
        directory.read_run()
