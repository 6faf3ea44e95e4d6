"""A tiny checkpoint, built once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny_inkling import build_tiny_inkling


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three modules, of which module 1 is global."""
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"))
