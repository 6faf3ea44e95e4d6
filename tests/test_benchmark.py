"""The story of a run around a fake engine: what is written, when, and how it ends."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specbench import benchmark
from specbench.benchmark import Invocation
from specbench.errors import UserError
from specbench.plan import prepare
from specbench.records import OutputCheck
from specbench.reports.report_files import recompute
from specbench.run_config import RunConfig
from specbench.run_directory import RunDirectory
from tests.fake_engine import Script
from tests.test_run_config import values

INVOCATION = Invocation("specbench +model=inkling", ("+model=inkling",), "model: {}\n", job_name=None)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    return script


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig.from_dict(values(eval__num_samples=10, output_root=str(tmp_path / "outputs")))


def test_a_run_leaves_everything_that_the_report_needs(script: Script, config: RunConfig) -> None:
    outcome = benchmark.run(config, INVOCATION)
    assert (outcome.status, outcome.exit_code) == ("finished", 0)
    assert outcome.directory is not None
    names = {path.name for path in outcome.directory.iterdir()}
    assert names >= {
        "run.json",
        "journal.jsonl",
        "requests.parquet",
        "samples.parquet",
        "metrics.json",
        "report.md",
        ".hydra",
    }
    assert outcome.directory.parts[-4:-1] == ("inkling-nano", "mtp4", "nano_problems")
    assert (outcome.directory / ".hydra" / "overrides.yaml").read_text() == '- "+model=inkling"\n'
    record = RunDirectory.open(outcome.directory).read_run()
    assert record.status == "finished"
    assert record.model.packaged and record.data.packaged
    assert (record.model.requested, record.model.ran, record.data.name) == ("inkling", "inkling-nano", "nano_problems")
    assert set(record.hardware) >= {"cpu", "cores", "memory_bytes", "at_start", "at_end"}
    assert "not Inkling" in record.notices[0]


def test_warm_up_comes_first_is_marked_and_left_out(script: Script, config: RunConfig) -> None:
    outcome = benchmark.run(config, INVOCATION)
    assert outcome.directory is not None and outcome.metrics is not None
    assert [request_id.startswith("warmup") for request_id in script.seen[:5]] == [True] * 4 + [False]
    assert outcome.metrics["requests"] == {"completed": 10, "failed": 0, "aborted": 0, "warmup": 4, "warmup_failed": 0}
    log = RunDirectory.open(outcome.directory).read_event_log()
    assert sum(request.is_warmup for request in log.requests) == 4
    assert len(log.samples) == 10


def test_repeats_run_every_sample_again(script: Script, config: RunConfig) -> None:
    outcome = benchmark.run(replace(config, load=replace(config.load, repeats=3)), INVOCATION)
    assert outcome.metrics is not None
    assert outcome.metrics["requests"]["completed"] == 30


def test_neither_warm_up_nor_a_repeat_warms_the_next(script: Script, config: RunConfig) -> None:
    benchmark.run(replace(config, load=replace(config.load, repeats=3)), INVOCATION)
    assert script.seen_at_reset == [4, 14, 24]  # behind four warm-up requests, and behind ten and twenty of the samples
    script.seen_at_reset.clear()
    benchmark.run(replace(config, load=replace(config.load, repeats=3, reset_cache=False)), INVOCATION)
    assert script.seen_at_reset == []


def test_two_runs_never_share_a_directory(script: Script, config: RunConfig) -> None:
    assert benchmark.run(config, INVOCATION).directory != benchmark.run(config, INVOCATION).directory


def test_failed_requests_are_records_and_exit_one(
    script: Script, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    script.failing = {"nano_problems-0003-t0-r0"}
    outcome = benchmark.run(config, INVOCATION)
    assert outcome.exit_code == 1 and outcome.metrics is not None and outcome.directory is not None
    assert outcome.metrics["requests"]["failed"] == 1
    assert "1 requests failed" in capsys.readouterr().err
    assert RunDirectory.open(outcome.directory).read_run().status == "finished"


def interrupted(script: Script, config: RunConfig, num_done: int, ending: BaseException) -> Path:
    """A run that ended after `num_done` measured requests."""
    script.num_left, script.ending = num_done, ending
    with pytest.raises(type(ending)):
        benchmark.run(config, INVOCATION)
    script.num_left = -1
    return next(Path(config.output_root).rglob("run.json")).parent


def test_an_interrupt_keeps_the_journal_and_says_how_to_go_on(
    script: Script, config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    path = interrupted(script, config, 4, KeyboardInterrupt())
    record = RunDirectory.open(path).read_run()
    assert (record.status, record.error) == ("failed", "interrupted, after 4 of 10 requests")
    assert f"specbench resume {path}" in capsys.readouterr().err
    assert len(RunDirectory.open(path).read_journal().samples) == 4


def test_a_crash_of_the_engine_is_in_run_json(script: Script, config: RunConfig) -> None:
    path = interrupted(script, config, 2, RuntimeError("out of memory"))
    assert RunDirectory.open(path).read_run().error == "RuntimeError: out of memory, after 2 of 10 requests"


def test_resume_runs_only_what_is_missing(script: Script, config: RunConfig) -> None:
    path = interrupted(script, config, 4, KeyboardInterrupt())
    first = [name for name in script.seen if not name.startswith("warmup")]
    script.seen.clear()
    outcome = benchmark.resume(path)
    second = [name for name in script.seen if not name.startswith("warmup")]
    assert (outcome.status, outcome.directory) == ("finished", path)
    assert len(first) == 4 and len(second) == 6 and not set(first) & set(second)
    log = RunDirectory.open(path).read_event_log()
    assert len({request.request_id for request in log.requests}) == len(log.requests) == 10 + 2 * 4
    steps = [step.engine_step for step in log.engine_steps]
    assert steps == list(range(len(steps)))
    record = RunDirectory.open(path).read_run()
    assert record.status == "finished" and record.error is None
    assert any(notice.startswith("Resumed") and "throughput are not given" in notice for notice in record.notices)
    assert outcome.metrics is not None
    assert record.num_segments == 2
    assert set(outcome.metrics["throughput"].values()) == {None}
    assert record.output_check is not None and record.output_check.compared == 8, "earlier segments are checked too"
    assert all(check["holds"] is not False for check in outcome.metrics["checks"]["identities"].values())


def test_resume_with_nothing_left_still_checks_the_output(script: Script, config: RunConfig) -> None:
    path = interrupted(script, config, 4, KeyboardInterrupt())
    benchmark.resume(path)
    directory = RunDirectory.open(path)
    record = directory.read_run()
    record.status, record.output_check = "running", None
    directory.write_run(record)
    script.seen.clear()
    benchmark.resume(path)
    check = directory.read_run().output_check
    assert check is not None and (check.status, check.compared) == ("identical", 8)
    assert script.seen == [], "nothing is left to run, so nothing warms up"


@pytest.mark.parametrize("status", ["mismatch", "identical"])
def test_wrong_text_fails_the_run(
    script: Script, config: RunConfig, monkeypatch: pytest.MonkeyPatch, status: str
) -> None:
    machinery = script.machinery()
    checked = replace(machinery, check_output=lambda engine, results, limit: OutputCheck(status, 1))
    monkeypatch.setattr(benchmark, "embedded_machinery", lambda: checked)
    assert benchmark.run(config, INVOCATION).exit_code == (1 if status == "mismatch" else 0)


def test_resume_after_a_kill_that_tore_the_last_line(script: Script, config: RunConfig) -> None:
    path = interrupted(script, config, 4, KeyboardInterrupt())
    journal = path / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    outcome = benchmark.resume(path)
    assert outcome.metrics is not None
    assert outcome.metrics["requests"]["completed"] == 10


def test_resume_refuses_a_finished_run(script: Script, config: RunConfig) -> None:
    path = benchmark.run(config, INVOCATION).directory
    assert path is not None
    with pytest.raises(UserError, match="nothing is left to run"):
        benchmark.resume(path)


@pytest.mark.parametrize("part", ["config", "checkpoint", "data", "code", "hardware"])
def test_resume_refuses_what_has_changed(script: Script, config: RunConfig, part: str) -> None:
    path = interrupted(script, config, 4, KeyboardInterrupt())
    stored = json.loads((path / "fingerprint.json").read_text())
    (path / "fingerprint.json").write_text(json.dumps(stored | {part: "another"}))
    with pytest.raises(UserError, match=f"{part} changed since the run began"):
        benchmark.resume(path)


def test_output_check_is_off_or_does_not_apply(script: Script, config: RunConfig) -> None:
    off = replace(config, report=replace(config.report, output_check_requests=0))
    outcome = benchmark.run(off, INVOCATION)
    assert outcome.metrics is not None and outcome.metrics["checks"]["output"]["status"] == "not_checked"
    sampled = replace(config, sampling=replace(config.sampling, temperature=1.0))
    outcome = benchmark.run(sampled, INVOCATION)
    assert outcome.metrics is not None and outcome.metrics["checks"]["output"]["status"] == "not_applicable"


def test_plain_baseline_runs_beside_and_leaves_no_record(script: Script, config: RunConfig) -> None:
    outcome = benchmark.run(replace(config, report=replace(config.report, plain_baseline_requests=3)), INVOCATION)
    assert outcome.metrics is not None and outcome.directory is not None
    assert [engine.num_speculative_tokens for engine in script.started] == [4, 0]
    assert outcome.metrics["requests"]["completed"] == 10
    notices = RunDirectory.open(outcome.directory).read_run().notices
    assert any("times plain decoding" in notice and "concurrency 4" in notice for notice in notices)


def test_score_again_changes_the_headline_only(script: Script, config: RunConfig) -> None:
    path = benchmark.run(config, INVOCATION).directory
    assert path is not None
    before = RunDirectory.open(path).read_event_log()
    outcome = benchmark.score_again(path, "boxed")
    assert outcome.metrics is not None and outcome.metrics["eval"]["scorer"] == "boxed"
    assert RunDirectory.open(path).read_event_log().requests == before.requests
    with pytest.raises(UserError, match="did you mean 'boxed'"):
        benchmark.score_again(path, "boxd")


def test_report_comes_from_the_event_log(script: Script, config: RunConfig) -> None:
    """To the last digit, in every format of figures; no file that a report wrote is read again."""
    formats = replace(config, report=replace(config.report, formats=("pr", "csv")))
    path = benchmark.run(formats, INVOCATION).directory
    assert path is not None
    names = ["metrics.json", "report.md", "report_pr.md", *(f"tables/{one.name}" for one in path.glob("tables/*"))]
    before = {name: (path / name).read_bytes() for name in names}
    assert len(before) > 10
    for name in [*names, "journal.jsonl"]:
        (path / name).unlink()
    assert recompute(path).metrics == json.loads(before["metrics.json"])
    assert {name: (path / name).read_bytes() for name in names} == before


@pytest.mark.parametrize("name", ["inkling", "inkling_nano"])
def test_strict_refuses_what_was_not_asked_for(script: Script, config: RunConfig, name: str) -> None:
    strict = replace(config, strict=True, model=replace(config.model, name=name))
    if name == "inkling_nano":
        assert benchmark.run(strict, INVOCATION).exit_code == 0
        return
    with pytest.raises(UserError, match="strict=true refuses"):
        benchmark.run(strict, INVOCATION)
    assert not script.started


def test_an_output_root_that_cannot_be_written(script: Script, config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        benchmark.run(replace(config, output_root=str(tmp_path / "file")), INVOCATION)
    assert not script.started


def test_audio_that_does_not_fit_is_named_and_the_others_run(script: Script, config: RunConfig, tmp_path: Path) -> None:
    import soundfile

    for name, seconds in (("short", 1), ("long", 120), ("endless", 601)):
        soundfile.write(tmp_path / f"{name}.wav", np.zeros(100 * seconds), 100)
    rows = tmp_path / "rows.jsonl"
    clips = ["short", "long", "long", "long", "long", "endless"]
    rows.write_text("".join(json.dumps({"prompt": "a", "audio": [f"{clip}.wav"]}) + "\n" for clip in clips))
    heard = replace(
        config,
        eval=replace(config.eval, name="prompts", data=str(rows), protocol=None, scorer=None, instruction=None),
    )
    notices = prepare(heard, is_sweep=False).notices
    (beyond,) = [notice for notice in notices if "will fail: raise model.max_model_len" in notice]
    assert beyond.startswith("4 requests have a prompt whose audio leaves no room") and beyond.endswith("and 1 more).")
    (endless,) = [notice for notice in notices if "will fail: cut it" in notice]
    assert endless.startswith("1 request has a clip of over 12,000 tokens (10 minutes)")


def test_a_prompt_longer_than_the_context(script: Script, config: RunConfig, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt_token_ids": [1] * 50}) + "\n")
    short = replace(
        config,
        model=replace(config.model, max_model_len=48),
        eval=replace(config.eval, name="prompts", data=str(rows), protocol=None, scorer=None, instruction=None),
    )
    with pytest.raises(UserError, match=r"has 50 tokens and leaves no room in a context of 48"):
        benchmark.run(short, INVOCATION)
    assert not script.started


def test_a_prompt_without_tokens(script: Script, config: RunConfig, tmp_path: Path) -> None:
    template = tmp_path / "nothing.jinja"
    template.write_text("{# nothing #}")
    silent = replace(config, model=replace(config.model, chat_template=str(template)))
    with pytest.raises(
        UserError, match=r"^eval\.data: the prompt of .* has no tokens; correct it, or model\.chat_template"
    ):
        benchmark.run(silent, INVOCATION)
    assert not script.started


def test_the_engine_hears_how_ranks_are_laid_out(config: RunConfig) -> None:
    parallel = dataclasses.replace(
        config.parallel, tensor_parallel_size=6, ranks_per_gpu=2, all_reduce="one_shot", timeout_s=7.0, start="spawn"
    )
    engine = dataclasses.replace(config.engine, device="cuda")
    planned = dataclasses.replace(config, parallel=parallel, engine=engine, dry_run=True)
    found = prepare(planned, is_sweep=False).engine_config
    assert (found.shard.size, found.ranks_per_gpu, found.rank_all_reduce) == (6, 2, "one_shot")
    assert (found.rank_timeout_s, found.rank_start) == (7.0, "spawn")


def test_a_run_on_one_rank_is_not_run_by_each_of_several(
    script: Script, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun starts it twice: without a word, both would run all of it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"parallel\.tensor_parallel_size: 1, and 2 ranks were started"):
        benchmark.run(config, INVOCATION)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UserError, match="WORLD_SIZE: must be a whole number, not 'two'"):
        benchmark.run(config, INVOCATION)
    spawning = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, start="spawn"))
    assert benchmark.run(spawning, INVOCATION).status == "finished"
