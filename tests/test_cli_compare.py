"""`specbench compare` on run directories: what it prints, where, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbench.cli import main
from specbench.run_directory import EventLog, RunDirectory
from tests.reports.event_logs import make_run, simulate


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
