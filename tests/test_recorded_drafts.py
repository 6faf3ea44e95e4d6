"""Drafts for the stub: recorded before the run, taken from an earlier run or from a file, or refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specbench import benchmark
from specbench.benchmark import Invocation
from specbench.errors import UserError
from specbench.run_config import RunConfig
from tests.fake_engine import Script
from tests.test_run_config import STUB, values

INVOCATION = Invocation("specbench +model=inkling", ("+model=inkling",), "model: {}\n", job_name=None)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    return script


def config(tmp_path: Path, **changes: object) -> RunConfig:
    return RunConfig.from_dict(values(eval__num_samples=6, output_root=str(tmp_path / "outputs"), **(STUB | changes)))


def test_plain_decoding_is_recorded_first(script: Script, tmp_path: Path) -> None:
    outcome = benchmark.run(config(tmp_path), INVOCATION)
    assert outcome.directory is not None
    file = outcome.directory / "drafts.jsonl"
    plain, stub = script.started
    assert (plain.proposer, plain.num_speculative_tokens, plain.drafts) == ("none", 0, None)
    assert (stub.proposer, stub.num_speculative_tokens, stub.drafts) == ("stub", 4, str(file))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows == [{"prompt_token_ids": [1, 2], "output_token_ids": [5, 5, 5, 5]}] * 6
    assert len(script.seen) == 6 + 4 + 6, "recorded, warmed up, measured"


def test_an_earlier_run_of_the_checkpoint_serves(script: Script, tmp_path: Path) -> None:
    earlier = benchmark.run(
        config(tmp_path, spec__method="none", spec__drafts=None, spec__num_speculative_tokens=None), INVOCATION
    )
    assert earlier.directory is not None
    outcome = benchmark.run(config(tmp_path, spec__drafts=str(earlier.directory)), INVOCATION)
    assert outcome.directory is not None
    assert script.started[-1].drafts == str(outcome.directory / "drafts.jsonl")
    assert len((outcome.directory / "drafts.jsonl").read_text().splitlines()) == 6

    run_file = earlier.directory / "run.json"
    record = json.loads(run_file.read_text())
    record["model"]["sha256"] = "0" * 64
    run_file.write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"spec\.drafts: .* another checkpoint"):
        benchmark.run(config(tmp_path, spec__drafts=str(earlier.directory)), INVOCATION)


def test_a_file_is_read_where_it_is(script: Script, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt_token_ids": [1], "output_token_ids": [2]}\n')
    benchmark.run(config(tmp_path, spec__drafts=str(file)), INVOCATION)
    assert script.started[-1].drafts == str(file)
    with pytest.raises(UserError, match=r"spec\.drafts: .* does not exist"):
        benchmark.run(config(tmp_path, spec__drafts=str(tmp_path / "none")), INVOCATION)
    with pytest.raises(UserError, match=r"spec\.drafts: .* is not a run directory"):
        benchmark.run(config(tmp_path, spec__drafts=str(tmp_path)), INVOCATION)


def test_a_resumed_run_drafts_from_what_it_recorded(script: Script, tmp_path: Path) -> None:
    script.num_left = 8  # six to record, two measured
    run_config = replace(config(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(run_config, INVOCATION)
    (path,) = (tmp_path / "outputs").rglob("run.json")
    script.num_left, script.started = -1, []
    outcome = benchmark.resume(path.parent)
    assert outcome.metrics is not None and outcome.metrics["requests"]["completed"] == 6
    assert [engine.proposer for engine in script.started] == ["stub"]
