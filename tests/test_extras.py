"""What readers are told to install is there, under the name that every pip knows it by."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from specbench.cli import PLUGIN_EXTRAS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
TEXTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "specbench").rglob("*.py")])
INSTALLED_EXTRAS = re.compile(r"pip install [^`\n]*?\[([^\]{]+)\]")


def _normal_form(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_is_spelt_as_it_is_in_the_metadata(extra: str) -> None:
    # pip before 23.3 compares the names as they are written.
    assert extra == _normal_form(extra)


def test_texts_name_extras_that_exist() -> None:
    named = {
        extra
        for path in TEXTS
        for names in INSTALLED_EXTRAS.findall(path.read_text("utf-8"))
        for extra in names.split(",")
    }
    assert "lm-eval" in named
    assert named | set(PLUGIN_EXTRAS.values()) <= set(EXTRAS)


def test_no_text_installs_another_package_of_this_name() -> None:
    # The name on the package index belongs to somebody else's package: extras are installed from the folder.
    installs_by_name = re.compile(r"pip install ['\"]?specbench|specbench\[[a-z{]")
    assert not [path for path in TEXTS if installs_by_name.search(path.read_text("utf-8"))]
