"""A run of conversations: turns follow the answers that came, a failed one takes the rest along, and a run resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specbench import benchmark
from specbench.benchmark import Invocation
from specbench.run_config import RunConfig
from specbench.run_directory import RunDirectory
from tests.fake_engine import Script
from tests.test_run_config import values

INVOCATION = Invocation("specbench +model=inkling", (), "", job_name=None)
ANSWER = "#### 7"  # of the fake engine, always


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    return script


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Three conversations of three turns, one client."""
    rows = [{"id": name, "turns": [f"{name}0", f"{name}1", f"{name}2"], "category": name} for name in "abc"]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = {"eval__name": "prompts", "eval__data": str(file), "eval__protocol": None, "eval__scorer": None}
    changes |= {"eval__instruction": None, "eval__num_samples": None, "load__concurrency": 1, "load__warmup": 2}
    return RunConfig.from_dict(values(**changes, output_root=str(tmp_path / "outputs")))


def said(script: Script) -> dict[str, list[str]]:
    """Request -> what its messages say, of the measured ones."""
    return {
        one.request_id: [message["content"] for message in one.messages or ()]
        for one in script.asked
        if not one.is_warmup
    }


def test_each_turn_has_the_answers_before_it(script: Script, config: RunConfig) -> None:
    outcome = benchmark.run(config, INVOCATION)
    assert script.seen[:3] == ["warmup-0-c-t0-r0-0", "warmup-1-b-t0-r0-0", "a-t0-r0"]
    assert script.seen[2:6] == ["a-t0-r0", "a-t1-r0", "a-t2-r0", "b-t0-r0"], "one client, one conversation at a time"
    assert said(script)["b-t2-r0"] == ["b0", ANSWER, "b1", ANSWER, "b2"]
    assert outcome.metrics is not None and outcome.metrics["requests"]["completed"] == 9
    by_turn = outcome.metrics["acceptance"]["by_turn"]
    assert [(bucket["bucket"], bucket["requests"]) for bucket in by_turn] == [("0", 3), ("1", 3), ("2", 3)]


def test_repeats_have_conversations_of_their_own(script: Script, config: RunConfig) -> None:
    benchmark.run(replace(config, load=replace(config.load, repeats=2)), INVOCATION)
    assert said(script)["a-t1-r1"] == ["a0", ANSWER, "a1"] and len(said(script)) == 18


def test_a_failed_turn_takes_the_rest_of_its_conversation_along(script: Script, config: RunConfig) -> None:
    script.failing = {"b-t1-r0"}
    outcome = benchmark.run(config, INVOCATION)
    assert outcome.exit_code == 1 and outcome.metrics is not None and outcome.directory is not None
    assert outcome.metrics["requests"]["failed"] == 2 and outcome.metrics["requests"]["completed"] == 7
    requests = {one.request_id: one for one in RunDirectory.open(outcome.directory).read_event_log().requests}
    assert "b-t1-r0, failed" in (requests["b-t2-r0"].error or "")


@pytest.mark.parametrize("num_done", [1, 2, 3, 4])
def test_a_conversation_resumes_where_it_broke_off(script: Script, config: RunConfig, num_done: int) -> None:
    script.num_left = num_done
    with pytest.raises(KeyboardInterrupt):
        benchmark.run(config, INVOCATION)
    script.num_left = -1
    script.asked.clear()
    path = next(Path(config.output_root).rglob("run.json")).parent
    outcome = benchmark.resume(path)
    assert outcome.metrics is not None and outcome.metrics["requests"]["completed"] == 9
    assert len(said(script)) == 9 - num_done, "nothing runs again"
    assert said(script)["a-t2-r0" if num_done < 3 else "b-t2-r0"][1::2] == [ANSWER, ANSWER]
    assert said(script)["c-t1-r0"] == ["c0", ANSWER, "c1"]
