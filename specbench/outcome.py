"""How a run ended: what benchmark.py hands to whoever started it, and the exit code of several."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from specbench.signals import TERMINATED_EXIT_CODE

INTERRUPTED = 130
#: Which exit code wins when several apply.
EXIT_CODES_BY_WEIGHT = (TERMINATED_EXIT_CODE, INTERRUPTED, 2, 1, 3, 4, 0)


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


def heaviest(exit_codes: Iterable[int]) -> int:
    """0 where there are none."""
    return min(exit_codes, key=EXIT_CODES_BY_WEIGHT.index, default=0)
