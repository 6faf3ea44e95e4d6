"""`specbench compare` on run directories: what it prints, where, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from specbench.cli import main
from specbench.records import LosslessnessCheck, OutputCheck
from specbench.run_directory import EventLog, RunDirectory
from tests.reports.event_logs import make_run, make_sample, simulate


def run_directory(path: Path, log: EventLog | None = None, **changes: object) -> str:
    directory = RunDirectory.create(path)
    directory.write_tables(simulate(1, num_requests=40) if log is None else log)
    directory.write_run(make_run(4, **changes))
    return str(path)


def test_compare_prints_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = (run_directory(tmp_path / name) for name in ("base", "new"))
    before = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert main(["compare", base, new]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# mtp4 #2 against mtp4 #1\n")
    assert f"| {new} " in text
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == before, "nothing is written into a run"


def test_compare_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = run_directory(tmp_path / "base")
    assert main(["compare", base, base, "-o", str(tmp_path / "out.md")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out.md")
    assert (tmp_path / "out.md").read_text(encoding="utf-8").startswith("# mtp4 #2 against mtp4 #1\n")


def test_a_missing_directory_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = run_directory(tmp_path / "base")
    assert main(["compare", base, str(tmp_path / "gone")]) == 2
    error = capsys.readouterr().err
    assert error == f"specbench: {tmp_path / 'gone'}: not a run directory, it has no run.json\n"


def test_compare_gives_plain_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, new = (run_directory(tmp_path / name) for name in ("base", "new"))
    assert main(["compare", base, new, "--format", "json", "--gate", "acceptance.drafts > 0"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["label"] for run in data["runs"]] == ["mtp4 #1", "mtp4 #2"]
    change = next(one for one in data["pairs"][0]["changes"] if one["path"] == "acceptance.acceptance_length")
    assert change["base"] == change["new"] and change["verdict"] == "no difference visible"
    assert data["gates"][0]["outcome"] == "pass"
    benchmark = next(table for table in data["tables"] if table["name"] == "benchmark")
    assert benchmark["header"] == ["Metric", "mtp4 #1", "mtp4 #2", "Δ"]
    row = next(index for index, texts in enumerate(benchmark["texts"]) if texts[0] == "Acceptance rate (%)")
    assert benchmark["texts"][row][1] == f"{100 * benchmark['values'][row][1]:.2f}"


@pytest.mark.parametrize(
    ("gates", "exit_code"),
    [
        (["acceptance.acceptance_length >= 1"], 0),
        (["acceptance.acceptance_length >= 0.9 * baseline"], 0),
        (["latency.ttft_ms.p50 <= baseline"], 4),
        (["latency.ttft_ms.p50 <= baseline undecided=pass"], 0),
        (["latency.ttft_ms.p50 <= baseline", "acceptance.acceptance_length >= 9"], 3),
        (["acceptance.acceptance_length >= 9", "acceptance.length >= 1"], 2),
        (["acceptance.acceptance_length => 9"], 2),
    ],
)
def test_gates_decide_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gates: list[str], exit_code: int
) -> None:
    base = run_directory(tmp_path / "base")
    flags = [flag for gate in gates for flag in ("--gate", gate)]
    assert main(["compare", base, base, *flags]) == exit_code
    error = capsys.readouterr().err
    assert error.count("\n") == (exit_code != 0) + (exit_code == 3 and len(gates) > 1)
    assert main(["compare", base, base, "--undecided", "pass", *flags]) == (0 if exit_code == 4 else exit_code)


def broken_log() -> EventLog:
    """With one token more than the steps emitted."""
    log = simulate(1, num_requests=40)
    log.requests[5] = dataclasses.replace(log.requests[5], num_output_tokens=log.requests[5].num_output_tokens + 1)
    return log


BROKEN = "identities broken (generated_tokens, tokens_of_each_request)"
TRUST = "trust no figure of such a run"


def test_a_run_that_cannot_be_trusted_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = run_directory(tmp_path / "good")
    broken = run_directory(tmp_path / "broken", broken_log())
    wrong = run_directory(tmp_path / "wrong", output_check=OutputCheck("mismatch", 4, 3, 0, 1))
    lossy = run_directory(tmp_path / "lossy", losslessness=LosslessnessCheck("mismatch"))
    for argv, said in (
        (["compare", broken, good], f"mtp4 #1: {BROKEN}"),
        (["compare", good, wrong], "mtp4 #2: the output check failed"),
        (["compare", good, wrong, broken], f"mtp4 #2: the output check failed; mtp4 #3: {BROKEN}"),
        (["compare", good, lossy], "mtp4 #2: speculation is not lossless"),
        (["report", broken], f"mtp4: {BROKEN}"),
        (["report", wrong, "--format", "json"], "mtp4: the output check failed"),
        (["report", good, "--baseline", broken], f"mtp4 #1: {BROKEN}"),
        (["report", wrong, "--format", "html", "-o", str(tmp_path / "r.html")], "mtp4: the output check failed"),
    ):
        assert main(argv) == 1
        streams = capsys.readouterr()
        assert streams.err == f"specbench: {said}; {TRUST}\n"
        assert streams.out, "the figures are there all the same"
    assert main(["report", good]) == 0
    assert main(["compare", good, good]) == 0


def test_a_run_with_failed_requests_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = simulate(1, num_requests=40)
    good = run_directory(tmp_path / "good", log)
    for index in (3, 5):
        log.requests[index] = dataclasses.replace(log.requests[index], finish_reason="error", error="lost")
    failed = run_directory(tmp_path / "failed", log)
    for argv, label in ((["compare", good, failed], "mtp4 #2"), (["report", failed], "mtp4")):
        assert main(argv) == 1
        assert capsys.readouterr().err == f"specbench: {label}: 2 requests failed; speed is that of the others\n"


def test_acceptance_that_depends_on_the_layout_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = simulate(1, num_requests=40)
    # Of a request that is no warm-up.
    place = max(i for i, step in enumerate(log.verify_steps) if step.num_drafted > 1 > step.num_accepted)
    steps = list(log.verify_steps)
    steps[place] = dataclasses.replace(steps[place], num_drafted=steps[place].num_drafted - 1)

    def layout(name: str, size: int, dtype: str, events: EventLog) -> str:
        record = make_run(4)
        parallel = dict(record.config["parallel"]) | {"name": f"tp{size}", "tensor_parallel_size": size}
        config = record.config | {"parallel": parallel, "model": dict(record.config["model"]) | {"dtype": dtype}}
        directory = RunDirectory.create(tmp_path / name)
        directory.write_tables(events)
        directory.write_run(dataclasses.replace(record, config=config))
        return str(directory.path)

    other = EventLog(log.requests, steps)
    for dtype, events, exit_code in (("float32", log, 0), ("float32", other, 1), ("bfloat16", other, 0)):
        case = f"{dtype}{exit_code}{events is log}"
        runs = [layout(f"{case}{size}", size, dtype, log if size == 1 else events) for size in (1, 2)]
        assert main(["compare", *runs]) == exit_code
        error = capsys.readouterr().err
        assert ("it must not depend on how the model is spread" in error) == bool(exit_code)
        assert main(["report", runs[1], "--baseline", runs[0]]) == exit_code
        assert capsys.readouterr().err.count("it must not depend on how the model is spread") == exit_code


def test_exit_code_1_goes_before_gates_and_behind_mistakes(tmp_path: Path) -> None:
    broken = run_directory(tmp_path / "broken", broken_log())
    for gate, exit_code in (
        ("acceptance.acceptance_length >= 9", 1),
        ("latency.ttft_ms.p50 <= baseline", 1),
        ("acceptance.length >= 1", 2),
    ):
        assert main(["compare", broken, broken, "--gate", gate]) == exit_code


def test_texts_that_differ_between_two_identical_checks_are_said_and_no_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check = OutputCheck("identical", 4, 4, 0, 0)
    directories = []
    for name, tokens in (("base", [1, 2]), ("new", [1, 3])):
        log = simulate(1, num_requests=40)
        log.samples = [make_sample(request.sample_id, None, output_token_ids=tokens) for request in log.requests]
        directories.append(run_directory(tmp_path / name, log, output_check=check))
    assert main(["compare", *directories]) == 0
    assert "although both output checks are identical, over 4 and 4 outputs" in capsys.readouterr().out
    assert main(["compare", directories[0], directories[0]]) == 0
    assert "although" not in capsys.readouterr().out
