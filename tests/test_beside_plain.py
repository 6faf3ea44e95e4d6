"""With and without speculation after the measured run: what is recorded, shown and returned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from specbench import benchmark
from specbench.benchmark import Invocation
from specbench.beside_plain import one_off_verdict
from specbench.run_config import RunConfig
from specbench.run_directory import RunDirectory
from tests.fake_engine import Script
from tests.test_run_config import values

INVOCATION = Invocation("specbench", (), "", job_name=None)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    script = Script()
    monkeypatch.setattr(benchmark, "embedded_machinery", script.machinery)
    return script


def config(tmp_path: Path, **changes: object) -> RunConfig:
    return RunConfig.from_dict(values(eval__num_samples=6, output_root=str(tmp_path / "outputs"), **changes))


def losslessness(tmp_path: Path, **changes: object) -> RunConfig:
    base = config(tmp_path, eval__name="losslessness", eval__scorer=None, **changes)
    return replace(base, eval=replace(base.eval, num_law_draws=10))


def test_the_plain_baseline_compares_texts_as_well(script: Script, tmp_path: Path) -> None:
    outcome = benchmark.run(config(tmp_path, report__plain_baseline_requests=3), INVOCATION)
    assert outcome.metrics is not None and outcome.directory is not None
    assert outcome.exit_code == 0
    found = outcome.metrics["checks"]["losslessness"]
    assert (found["status"], found["identical"], found["mismatches"]) == ("identical", 3, 0)
    record = RunDirectory.open(outcome.directory).read_run()
    assert record.losslessness is not None and record.losslessness.cells[0].compared == 3
    report = (outcome.directory / "report.md").read_text()
    assert "## Losslessness" in report and "mtp_multi" in report


def test_a_baseline_of_which_every_request_fails_is_none(script: Script, tmp_path: Path) -> None:
    asked = config(tmp_path, report__plain_baseline_requests=3)
    script.failing = {f"nano_problems-{index:04}-t0-r0" for index in range(6)}
    outcome = benchmark.run(asked, INVOCATION)
    assert outcome.exit_code == 1 and outcome.directory is not None
    notices = RunDirectory.open(outcome.directory).read_run().notices
    assert "No plain baseline was measured: none of its requests gave a token." in notices


def test_the_eval_compares_every_sample(script: Script, tmp_path: Path) -> None:
    outcome = benchmark.run(losslessness(tmp_path), INVOCATION)
    assert outcome.metrics is not None and outcome.directory is not None
    assert outcome.exit_code == 0
    (cell,) = outcome.metrics["checks"]["losslessness"]["cells"]
    assert (cell["test"], cell["status"], cell["compared"]) == ("token for token", "identical", 6)
    assert [engine.num_speculative_tokens for engine in script.started] == [4, 0]
    assert len(script.seen) == 4 + 6 + 6, "warmed up, measured, and once plainly"
    assert "made-up problems, not GSM8K" in (outcome.directory / "report.md").read_text()


@pytest.mark.parametrize("is_eval", [True, False])
def test_another_text_fails_the_run(
    script: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_eval: bool
) -> None:
    script.tokens_by_k[0] = 7
    run = losslessness(tmp_path) if is_eval else config(tmp_path, report__plain_baseline_requests=3)
    outcome = benchmark.run(run, INVOCATION)
    assert outcome.exit_code == 1 and outcome.directory is not None
    assert "speculation is not lossless" in capsys.readouterr().err
    report = (outcome.directory / "report.md").read_text()
    assert "**MISMATCH**" in report and "First difference of" in report


def test_nothing_is_compared_where_nothing_is_drafted(script: Script, tmp_path: Path) -> None:
    plain = losslessness(tmp_path, spec__method="none", spec__num_speculative_tokens=None)
    outcome = benchmark.run(plain, INVOCATION)
    assert outcome.metrics is not None and outcome.directory is not None
    assert outcome.metrics["checks"]["losslessness"]["status"] == "not_applicable"
    assert "nothing is drafted" in (outcome.directory / "report.md").read_text()
    outcome = benchmark.run(config(tmp_path), INVOCATION)
    assert outcome.metrics is not None and outcome.directory is not None
    assert RunDirectory.open(outcome.directory).read_run().losslessness is None
    assert outcome.metrics["checks"]["losslessness"]["status"] == "not_checked"


@pytest.mark.parametrize(
    ("speedup", "verdict"),
    [
        (1.001, "no clear difference (within 5%)"),
        (0.951, "no clear difference (within 5%)"),
        (1.06, "speculation gains here"),
        (0.94, "speculation loses here"),
    ],
)
def test_one_run_each_way_claims_no_small_effect(speedup: float, verdict: str) -> None:
    assert one_off_verdict(speedup) == verdict
