"""report.baseline=none: a run without speculation takes turns with the measured one, and both are whole runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specbench import benchmark
from specbench.benchmark import Invocation
from specbench.cli import job_name, main
from specbench.errors import UserError
from specbench.measuring import RunClock
from specbench.outcome import Outcome
from specbench.plan import prepare, run_plan
from specbench.reports import report_files
from specbench.run_config import RunConfig
from specbench.run_directory import RunDirectory
from tests.fake_engine import FakeEngine, Script
from tests.test_run_config import FACTS, resolved, values

INVOCATION = Invocation("specbench", ("x=1",), "model: {}\n", job_name=None)
NUM_SAMPLES, REPEATS, WARMUP = 5, 3, 4


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    monkeypatch.setattr(report_files, "run_plots", lambda *_: [])
    return script


def configured(tmp_path: Path, **changes: object) -> RunConfig:
    changes = {"report__baseline": "none", "load__repeats": REPEATS, "eval__num_samples": NUM_SAMPLES, **changes}
    return RunConfig.from_dict(values(model__name="inkling_nano", output_root=str(tmp_path / "outputs"), **changes))


def ran(tmp_path: Path, **changes: object) -> Outcome:
    return benchmark.run(configured(tmp_path, **changes), INVOCATION)


def directories(outcome: Outcome) -> tuple[Path, Path]:
    assert outcome.directory is not None
    return outcome.directory, outcome.directory / "baseline"


def who(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """k of the engine of each call of generate."""
    seen: list[int] = []
    generate = FakeEngine.generate

    def watched(self: FakeEngine, *arguments: object) -> None:
        seen.append(self._k)
        generate(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEngine, "generate", watched)
    return seen


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call of generate takes 1 second with drafts and 100 without, between two of its requests."""
    now = [0.0]
    monkeypatch.setattr("specbench.measuring.time.perf_counter", lambda: now[0])
    generate = FakeEngine.generate

    def slow(self: FakeEngine, requests: list, *arguments: object) -> None:
        generate(self, requests[:-1], *arguments)  # type: ignore[arg-type]
        now[0] += 1 if self._k else 100
        generate(self, requests[-1:], *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FakeEngine, "generate", slow)


def test_the_two_take_turns_repeat_by_repeat(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = who(monkeypatch)
    assert ran(tmp_path).exit_code == 0
    assert turns == [0, 4] * (1 + REPEATS), "warm-up, then A B A B A B, without speculation first"
    repeats = [name.rpartition("-r")[2] for name in script.seen if not name.startswith("warmup")]
    assert repeats == [str(repeat) for repeat in range(REPEATS) for _ in range(2 * NUM_SAMPLES)]


def test_both_are_run_directories_of_their_own(script: Script, tmp_path: Path) -> None:
    main_run, baseline = (RunDirectory.open(path) for path in directories(ran(tmp_path)))
    for directory, spec in ((main_run, "mtp4"), (baseline, "none")):
        record, log = directory.read_run(), directory.read_event_log()
        assert (record.status, record.config["spec"]["name"]) == ("finished", spec)
        assert len(log.samples) == REPEATS * NUM_SAMPLES
        assert sum(request.is_warmup for request in log.requests) == WARMUP
        assert record.output_check is not None and record.output_check.status == "identical"
        assert (directory.path / "report.md").is_file()
    assert baseline.read_run().config["report"]["baseline"] is None
    assert main(["compare", str(baseline.path), str(main_run.path)]) == 0


def test_the_report_says_speed_up_interval_and_texts(script: Script, tmp_path: Path) -> None:
    outcome = ran(tmp_path)
    text = (directories(outcome)[0] / "report.md").read_text()
    assert "# mtp4 against none" in text and "took turns with this one" in text
    assert "No plain baseline was measured" not in text
    assert "times plain decoding (95% interval " in text
    assert outcome.metrics is not None
    found = outcome.metrics["checks"]["losslessness"]
    assert (found["status"], found["identical"]) == ("identical", REPEATS * NUM_SAMPLES)


def test_another_text_fails_the_run(script: Script, tmp_path: Path) -> None:
    script.tokens_by_k = {0: 6}
    assert ran(tmp_path).exit_code == 1


def test_gates_can_name_the_baseline(script: Script, tmp_path: Path, timed: None) -> None:
    gate = "throughput.output_token_per_s >= {} * baseline"
    assert ran(tmp_path, report__gates=[gate.format(50)]).exit_code == 0
    slow = ran(tmp_path, report__gates=[gate.format(150)])
    assert slow.exit_code == 3
    text = (directories(slow)[0] / "report.md").read_text()
    assert "**FAIL**" in text and "95% interval of the margin" in text


def test_a_clock_stands_while_the_other_has_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("specbench.measuring.time.perf_counter", lambda: now[0])
    clock = RunClock(from_s=5.0)
    now[0] += 2
    with clock.standing():
        now[0] += 100
        assert clock() == 7.0
    now[0] += 1
    assert clock() == 8.0


def test_neither_s_time_holds_the_turns_of_the_other(script: Script, tmp_path: Path, timed: None) -> None:
    paths = directories(ran(tmp_path))
    seconds = [json.loads((path / "metrics.json").read_text())["throughput"]["duration_s"] for path in paths]
    assert [round(one) for one in seconds] == [REPEATS, 100 * REPEATS]


def test_what_is_interrupted_goes_on_on_both_sides(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.num_left = 3 * NUM_SAMPLES + 2  # in the second turn of the run with drafts
    with pytest.raises(KeyboardInterrupt):
        ran(tmp_path)
    assert capsys.readouterr().err.count("go on with: specbench resume") == 1
    (baseline,) = (tmp_path / "outputs").rglob("baseline/run.json")
    path = baseline.parent.parent
    for directory, num_done in ((path, NUM_SAMPLES + 2), (baseline.parent, 2 * NUM_SAMPLES)):
        record = RunDirectory.open(directory).read_run()
        assert record.status == "failed" and f"after {num_done} of 15 requests" in str(record.error)
    script.num_left = -1
    before = len(script.seen)
    assert main(["resume", str(path)]) == 0
    measured = [name for name in script.seen[before:] if not name.startswith("warmup")]
    assert len(measured) == 2 * REPEATS * NUM_SAMPLES - (3 * NUM_SAMPLES + 2)
    for directory in (path, baseline.parent):
        opened = RunDirectory.open(directory)
        assert opened.read_run().status == "finished"
        assert len(opened.read_event_log().samples) == REPEATS * NUM_SAMPLES


def test_without_drafts_there_is_nothing_to_take_turns_with(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none takes turns with a run without speculation"):
        configured(tmp_path, spec__method="none", spec__num_speculative_tokens=None)


def test_two_engines_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = prepare(configured(tmp_path), is_sweep=False).plan_memory().total_bytes
    monkeypatch.setattr(run_plan, "free_bytes", lambda device, *ranks: int(1.5 * needed / 0.5))
    prepare(configured(tmp_path, report__baseline=None), is_sweep=False)
    with pytest.raises(UserError, match=r"report\.baseline: none loads two engines"):
        prepare(configured(tmp_path), is_sweep=False)


def test_taking_turns_makes_another_job(script: Script, tmp_path: Path) -> None:
    assert job_name(["spec=mtp1", "report.baseline=none"]) == "report.baseline=none,spec=mtp1"
    job = Invocation("specbench -m", (), "model: {}\n", job_name="job")
    alone = configured(tmp_path, report__baseline=None)
    assert benchmark.run_sweep_job(alone, job).status == "finished"
    assert benchmark.run_sweep_job(configured(tmp_path), job).status == "finished"
    skipped = benchmark.run_sweep_job(configured(tmp_path, report__gates=["requests.failed <= 0"]), job)
    assert (skipped.status, skipped.exit_code) == ("skipped", 0)


def test_the_small_plain_baseline_gives_way() -> None:
    unset = {"report__plain_baseline_requests": None}
    packaged = replace(FACTS, packaged=True)
    assert resolved(packaged, **unset).report.plain_baseline_requests
    assert resolved(packaged, report__baseline="none", **unset).report.plain_baseline_requests == 0


# ---- The interval of a run's own speed


def test_three_repeats_give_a_run_s_speed_an_interval(script: Script, tmp_path: Path) -> None:
    outcome = ran(tmp_path, report__baseline=None)
    assert outcome.metrics is not None and outcome.directory is not None
    low, high = outcome.metrics["intervals"]["throughput.output_token_per_s"]
    assert low < high
    report = (outcome.directory / "report.md").read_text()
    assert "| 95% over repeats |" in " ".join(report.split())
    assert json.loads((outcome.directory / "metrics.json").read_text()) == outcome.metrics


def test_two_repeats_give_none(script: Script, tmp_path: Path) -> None:
    outcome = ran(tmp_path, report__baseline=None, load__repeats=2)
    assert outcome.metrics is not None and outcome.directory is not None
    assert not [path for path in outcome.metrics["intervals"] if path.startswith("throughput.")]
    assert "repeats" not in (outcome.directory / "report.md").read_text().partition("## Speed")[2].partition("\n## ")[0]
