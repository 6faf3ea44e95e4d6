"""Gates that a run's own configuration names: checked before it starts, judged when it ends, in its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbench import benchmark
from specbench.benchmark import Invocation
from specbench.cli import job_name, main
from specbench.errors import UserError
from specbench.outcome import Outcome
from specbench.plan import describe, prepare
from specbench.run_config import RunConfig
from specbench.run_directory import RunDirectory
from tests.fake_engine import Script
from tests.test_run_config import resolved, values

INVOCATION = Invocation("specbench +model=inkling_nano", (), "model: {}\n", job_name=None)
#: The fake engine accepts 2 of 4 at every step.
GOOD, BAD = "acceptance.acceptance_length >= 3", "acceptance.acceptance_length >= 3.1"
UNDECIDED = "latency.ttft_ms.p50 <= baseline"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    return script


def configured(tmp_path: Path, *gates: str, **changes: Any) -> RunConfig:
    changes = {"model__name": "inkling_nano", "eval__num_samples": 24, "report__gates": list(gates), **changes}
    return RunConfig.from_dict(values(output_root=str(tmp_path / "outputs"), **changes))


def ran(tmp_path: Path, *gates: str, **changes: Any) -> Outcome:
    return benchmark.run(configured(tmp_path, *gates, **changes), INVOCATION)


def report(outcome: Outcome) -> str:
    assert outcome.directory is not None
    return (outcome.directory / "report.md").read_text(encoding="utf-8")


def test_gates_decide_the_exit_code_of_a_run(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ran(tmp_path, GOOD)
    assert base.exit_code == 0
    assert "| acceptance.acceptance_length >= 3 | mtp4 | pass    | 3 against 3 |" in report(base)
    against = {"report__baseline": str(base.directory)}
    assert ran(tmp_path, "acceptance.acceptance_length >= baseline", **against).exit_code == 0
    assert ran(tmp_path, UNDECIDED, **against).exit_code == 4
    assert ran(tmp_path, f"{UNDECIDED} undecided=pass", **against).exit_code == 0
    capsys.readouterr()
    failed = ran(tmp_path, UNDECIDED, BAD, GOOD, **against)
    assert failed.exit_code == 3
    assert capsys.readouterr().err.count("gate ") == 2, "what stops the build is said, and nothing else"
    assert "**FAIL**" in report(failed) and "# mtp4 #2 against mtp4 #1" in report(failed)


def test_failed_requests_go_before_failed_gates(script: Script, tmp_path: Path) -> None:
    script.failing = {"nano_problems-0003-t0-r0"}
    assert ran(tmp_path, BAD).exit_code == 1


def test_a_report_made_again_says_the_same(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ran(tmp_path)
    new = ran(tmp_path, GOOD, "eval.accuracy >= baseline", report__baseline=str(base.directory))
    before = report(new)
    assert main(["report", str(new.directory)]) == 0
    assert report(new) == before


def test_a_report_can_name_a_baseline(script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = ran(tmp_path), ran(tmp_path)
    capsys.readouterr()
    assert main(["report", str(new.directory), "--baseline", str(base.directory)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# inkling-nano") and "\n# mtp4 #2 against mtp4 #1\n" in text
    assert main(["report", str(new.directory), "--baseline", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("gate", "complaint"),
    [
        ("rubbish", "not PATH OPERATOR NUMBER"),
        ("acceptance.length >= 3", "did you mean"),
        ("eval.name >= 3", "not a number"),
        ("eval.accuracy >= baseline", "say report.baseline=DIR"),
        ("eval.by.category.music.accuracy >= 0.5", "accuracy on nano_problems is given by no dimension"),
    ],
)
def test_a_gate_that_cannot_be_judged_stops_before_the_run(
    script: Script, tmp_path: Path, gate: str, complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint):
        ran(tmp_path, gate)
    assert script.seen == []


@pytest.mark.parametrize(
    "gate",
    [
        "acceptance.per_position[7] >= 0.1",
        "acceptance.by_category.music.acceptance_length >= 2",
        "acceptance.by_previous[2].per_position[0] >= 0.1",
        "intervals.acceptance.acceptance_length[0] >= 2",
        "throughput.output_token_per_s_per_user >= 2",
        "requests.failed <= 0",
    ],
)
def test_every_figure_can_be_a_gate(tmp_path: Path, gate: str) -> None:
    prepare(configured(tmp_path, gate), is_sweep=False)


def test_gates_on_a_part_of_the_samples_name_one_that_there_is(tmp_path: Path) -> None:
    changes = {"eval__name": "mmau", "eval__num_samples": 24, "eval__scorer": "choice_parse"}
    prepare(configured(tmp_path, "eval.by.task.music.accuracy >= 0.5", **changes), is_sweep=False)
    with pytest.raises(UserError, match=r"did you mean eval\.by\.task\.music\.accuracy"):
        prepare(configured(tmp_path, "eval.by.task.musik.accuracy >= 0.5", **changes), is_sweep=False)


def test_the_lower_bound_of_an_interval_can_be_a_gate(script: Script, tmp_path: Path) -> None:
    gate = "intervals.acceptance.acceptance_length[0] >= 3"
    assert "not measured" in report(ran(tmp_path, gate)), "all samples are alike, which gives no interval"


def test_a_baseline_must_be_a_finished_run(script: Script, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a run directory"):
        ran(tmp_path, report__baseline=str(tmp_path / "gone"))
    base = ran(tmp_path)
    assert base.directory is not None
    directory = RunDirectory.open(base.directory)
    record = directory.read_run()
    record.status = "failed"
    directory.write_run(record)
    with pytest.raises(UserError, match="has not finished"):
        ran(tmp_path, report__baseline=str(base.directory))


def test_a_baseline_is_found_from_anywhere(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ran(tmp_path)
    assert base.directory is not None
    monkeypatch.chdir(base.directory.parent)
    new = ran(tmp_path, "eval.accuracy >= baseline", report__baseline=base.directory.name)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(new.directory)]) == 0


def test_a_report_is_not_lost_with_its_baseline(script: Script, tmp_path: Path) -> None:
    base = ran(tmp_path)
    assert base.directory is not None
    new = ran(tmp_path, GOOD, "eval.accuracy >= baseline", report__baseline=str(base.directory))
    base.directory.rename(tmp_path / "moved")
    assert main(["report", str(new.directory)]) == 0
    text = report(new)
    assert "the base run cannot be read" in text and "| pass " in text
    assert f"cannot be read: {base.directory}: not a run directory" in text


def test_gates_are_strict_unless_the_packaged_model_is_named() -> None:
    gates = {"report__gates": [GOOD]}
    assert resolved(**gates).strict is True
    assert resolved(model__name="inkling_nano", **gates).strict is False
    assert resolved(strict=False, **gates).strict is False
    assert resolved().strict is False


def test_gates_name_no_job() -> None:
    assert job_name(["spec=mtp1", 'report.gates=["eval.accuracy > 0"]', "report.baseline=x"]) == "spec=mtp1"


def test_a_skipped_job_is_judged_by_the_gates_of_today(script: Script, tmp_path: Path) -> None:
    job = Invocation("specbench -m", (), "model: {}\n", job_name="job")
    assert benchmark.run_sweep_job(configured(tmp_path), job).exit_code == 0
    skipped = benchmark.run_sweep_job(configured(tmp_path, BAD), job)
    assert (skipped.status, skipped.exit_code) == ("skipped", 3)
    assert "**FAIL**" in report(skipped)
    assert benchmark.run_sweep_job(configured(tmp_path, GOOD), job).exit_code == 0


def test_a_dry_run_names_the_gates(tmp_path: Path) -> None:
    assert "gates       2" in describe(prepare(configured(tmp_path, GOOD, BAD), is_sweep=False))
