"""A proposer is one line of the table, its file, its option and its test; nobody else knows its name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from specbench.conf_folder import conf_dir
from specbench.engine.proposer_table import PROPOSERS

PACKAGE = Path(__file__).resolve().parents[3] / "specbench"
METHODS = ("requirements", "load", "propose", "release")


@pytest.mark.parametrize("name", PROPOSERS)
def test_each_has_its_file_its_option_and_its_test(name: str) -> None:
    line = PROPOSERS[name]
    file, _, class_name = line.implementation.partition(".")
    proposer = getattr(importlib.import_module(f"specbench.engine.proposers.{file}"), class_name)
    assert all(callable(getattr(proposer, method)) for method in METHODS)
    assert f"method: {line.method}\n" in (conf_dir() / "spec" / f"{name}.yaml").read_text()
    assert (Path(__file__).parent / f"test_{name}.py").is_file()


def test_running_and_scheduling_know_no_proposer_by_name() -> None:
    names = "|".join([*PROPOSERS, *(line.implementation.partition(".")[2] for line in PROPOSERS.values())])
    for folder in ("execution", "scheduling", "sampling", "layers"):
        for path in (PACKAGE / "engine" / folder).glob("*.py"):
            assert not re.search(rf"\b({names})\b", path.read_text(encoding="utf-8")), path
