"""Sweeps on the command line: what they leave, what becomes of jobs that fail, launchers and sweepers of other make."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from specbench import benchmark
from specbench.cli import Composer, main
from specbench.reports import report_files
from tests.fake_engine import Script

SWEEP = ("-m", "+model=inkling_nano", "eval.num_samples=4")
K = "spec.num_speculative_tokens"
OPTUNA = (*SWEEP, "spec=mtp_multi", "hydra/sweeper=optuna", "hydra.sweeper.direction=maximize")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    monkeypatch.setattr(report_files, "run_plots", lambda *_: [])  # they take seconds, and have tests of their own
    monkeypatch.chdir(tmp_path)
    return script


def sweep_folders() -> list[Path]:
    return sorted(path.parent for path in Path("outputs").rglob("sweep.md"))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_a_sweep_ends_with_a_report_of_every_job(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SWEEP, "spec=mtp_multi", f"{K}=1,9,2"]) == 2
    (folder,) = sweep_folders()
    assert folder.parent == Path("outputs", "sweeps")
    found = rows(folder)
    assert [(row[K], row["status"], row["exit_code"]) for row in found] == [
        ("1", "finished", "0"),
        ("9", "failed", "2"),
        ("2", "finished", "0"),
    ]
    assert "9 drafts need 9 MTP modules" in found[1]["error"] and found[1]["acceptance_rate"] == ""
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"report: {folder.absolute() / 'sweep.md'}"
    assert f"{K}=9\tfailed: {K}: 9 drafts need" in out
    assert f"| {K}=9 | failed: " in (folder / "sweep.md").read_text()


def test_a_job_that_fails_in_its_checks_is_named_by_what_would_have_run(script: Script) -> None:
    main([*SWEEP, "spec=mtp_multi", f"{K}=9"])
    (error,) = Path("outputs").rglob("error.json")
    assert error.parts[:4] == ("outputs", "sweeps", "inkling-nano", "nano_problems")


def test_skipped_jobs_are_rows_with_date_and_commit(script: Script) -> None:
    assert main([*SWEEP, "spec=none,mtp2"]) == 0
    assert main([*SWEEP, "spec=none,mtp2,mtp4"]) == 0
    first, second = sweep_folders()
    assert [row["status"] for row in rows(first)] == ["finished", "finished"]
    again = rows(second)
    assert [row["status"] for row in again] == ["skipped", "skipped", "finished"]
    assert again[0]["finished_at"] == rows(first)[0]["finished_at"]
    text = (second / "sweep.md").read_text()
    assert text.count("skipped: finished at 20") == 2 and ("commit " in text or "outside git" in text)
    assert again[1]["output_token_per_s"] == rows(first)[1]["output_token_per_s"]


def test_a_later_failure_is_forgotten_when_the_finished_job_is_skipped(script: Script, tmp_path: Path) -> None:
    """The data that a job names is gone for one sweep and back for the next."""
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "one"}\n')
    argv = [*SWEEP[:2], "eval=prompts", f"eval.data={data}", "spec=none,mtp2"]
    assert main(argv) == 0
    data.rename(tmp_path / "elsewhere")
    assert main(argv) == 2
    (tmp_path / "elsewhere").rename(data)
    assert main(argv) == 0
    assert [row["status"] for row in rows(sweep_folders()[-1])] == ["skipped", "skipped"]


def test_an_interrupted_sweep_reports_what_has_ended(script: Script) -> None:
    script.num_left = 6
    assert main([*SWEEP, "spec=none,mtp2,mtp4"]) == 130
    (folder,) = sweep_folders()
    assert [row["status"] for row in rows(folder)] == ["finished", "lost", "lost"]


def test_the_report_of_a_sweep_can_be_made_again(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    script.num_left = 6
    assert main([*SWEEP, "spec=none,mtp2,mtp4"]) == 130
    (folder,) = sweep_folders()
    before = {path.name: path.read_text() for path in folder.glob("sweep.*")}
    for name in ("sweep.md", "sweep.csv"):
        (folder / name).unlink()
    capsys.readouterr()
    assert main(["report", str(folder)]) == 1, "two jobs left no word"
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {folder / 'sweep.md'}"
    assert {path.name: path.read_text() for path in folder.glob("sweep.*")} == before
    assert main(["report", str(folder), "--format", "html"]) == 2
    (folder / "sweep.json").write_text("{")
    assert main(["report", str(folder)]) == 2
    assert "run the sweep again, finished jobs are skipped" in capsys.readouterr().err


def test_the_sweep_s_directory_can_be_named(script: Script, tmp_path: Path) -> None:
    assert main([*SWEEP, "spec=none,mtp2", "hydra.sweep.dir=it's here"]) == 2, "Hydra reads no such value"
    assert main([*SWEEP, "spec=none,mtp2", "hydra.sweep.dir='a, (b)'"]) == 0
    assert (tmp_path / "a, (b)" / "sweep.md").is_file()


def test_an_output_root_of_any_name(script: Script) -> None:
    assert main([*SWEEP, "spec=none,mtp2", "output_root='o, it\\'s {1}'"]) == 0
    assert [path.name for path in Path("o, it's {1}", "sweeps").rglob("sweep.md")] == ["sweep.md"]


def test_runs_in_turns_bring_their_own_speed_up(script: Script) -> None:
    assert main([*SWEEP, "spec=mtp2,mtp4", "load.repeats=3", "report.baseline=none"]) == 0
    found = rows(sweep_folders()[0])
    assert all(float(row["speedup_low"]) <= float(row["speedup_high"]) for row in found)
    (job, _) = sorted(Path("outputs").rglob("baseline/run.json"))
    assert "report.baseline=none" in job.parent.parent.name


# ---- What a job returns


def test_the_objective_is_a_path_of_metrics_json(script: Script) -> None:
    path = "acceptance.acceptance_length"
    assert main([*SWEEP, "spec=none,mtp2,mtp4", f"report.objective={path}"]) == 0
    assert [row["objective"] for row in rows(sweep_folders()[0])] == ["", "2.0", "3.0"]
    names = {path.parent.name for path in Path("outputs").rglob("run.json")}
    assert not any("objective" in name for name in names), "an objective is no other job"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["report.objective=throughput.output_tokens"], "report.objective: throughput.output_tokens: no such path"),
        (["report.objective=eval.name"], "report.objective: eval.name: is not a number"),
        (["hydra/launcher=jobli"], "hydra/launcher"),
    ],
)
def test_what_cannot_be_begins_no_job(
    script: Script, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    assert main([*SWEEP, "spec=mtp1,mtp2", *argv]) == 2
    assert says in capsys.readouterr().err
    assert not script.started


def test_a_plugin_that_is_missing_names_its_extra(
    script: Script, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra.core.config_store import ConfigStore

    monkeypatch.setattr(ConfigStore, "list", lambda self, path: [])
    assert main([*SWEEP, "spec=mtp1,mtp2", "hydra/launcher=submitit_slurm"]) == 2
    assert "not installed; say pip install -e '.[submitit]'" in capsys.readouterr().err


# ---- Sweepers and launchers of other make


def test_optuna_is_given_the_objective(script: Script) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    argv = [*OPTUNA, f"{K}=choice(1,2,9)", "hydra.sweeper.n_trials=8", "hydra.sweeper.n_jobs=1"]
    argv += ["hydra/sweeper/sampler=random", "hydra.sweeper.sampler.seed=1"]
    assert main([*argv, "report.objective=acceptance.acceptance_length"]) == 2
    (folder,) = sweep_folders()
    found = rows(folder)
    assert {(row[K], row["objective"]) for row in found} == {("1", "1.0"), ("2", "2.0"), ("9", "")}
    assert len(found) == 8, "a job that fails stops no other"
    assert "best_value: 2.0" in (folder / "optimization_results.yaml").read_text()
    assert {row["status"] for row in found if row[K] == "9"} == {"failed"}


def test_optuna_needs_an_objective(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    assert main([*OPTUNA, f"{K}=choice(1,2)"]) == 2
    assert "report.objective: unset, and hydra/sweeper searches" in capsys.readouterr().err


def test_joblib_s_jobs_are_reported_from_other_processes(script: Script) -> None:
    """They fail in their checks: a run needs the engine, and other processes know no fake one."""
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    assert main([*SWEEP, "spec=mtp_multi", f"{K}=9,10", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]) == 2
    found = rows(sweep_folders()[0])
    assert [row["error"][len(K) + 2 :][:14].strip() for row in found] == ["9 drafts need", "10 drafts need"]


@pytest.mark.parametrize(
    ("sweep", "first"),
    [("choice(3,1)", 3), ("range(2,5)", 2), ("interval(2,5)", 2), ("tag(int,interval(2,5))", 2)],
)
def test_a_search_is_checked_by_a_job_that_it_may_deal(script: Script, sweep: str, first: int) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    composer = Composer(["+model=inkling_nano", "spec=mtp_multi", f"{K}={sweep}", "hydra/sweeper=optuna"])
    (job,) = composer.jobs()
    assert composer.compose(job)[0].spec.num_speculative_tokens == first


def test_what_a_job_left_can_be_read(script: Script) -> None:
    main([*SWEEP, "spec=none"])
    (job,) = Path("outputs").rglob("jobs/0000.json")
    content = json.loads(job.read_text())
    assert content["status"] == "finished" and Path(content["directory"], "report.md").is_file()
