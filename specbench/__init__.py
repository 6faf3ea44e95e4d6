"""specbench: the instrument that proves a change to speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from os import PathLike

    from specbench.reports.frames import LoadedRun

__version__ = "0.1.0"


def load(directory: str | PathLike[str]) -> LoadedRun:
    """A run directory as pandas frames, with its metrics: `.run`, `.metrics`, `.requests`, `.verify_steps`, …"""
    from pathlib import Path

    from specbench.reports.frames import load

    return load(Path(directory))
