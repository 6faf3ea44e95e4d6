"""How a run ended: what benchmark.py hands to whoever started it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    #: "finished", "failed" or "skipped".
    status: str
    exit_code: int
    directory: Path | None
    metrics: dict | None = None
    #: None for a plain run.
    job_name: str | None = None
    #: Why a job failed; None where it did not.
    error: str | None = None
