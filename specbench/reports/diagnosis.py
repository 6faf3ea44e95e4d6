"""The health of a run: every check, in the order that a reader should take them.

Belongs here: the order, and the `health` block of metrics.json. Does not belong here: any check itself, text of the
report (health_section.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from specbench.records import RunRecord, SampleRecord
from specbench.reports import drafting_checks, measurement_checks, text_checks
from specbench.reports.health_check import Evidence, HealthCheck
from specbench.reports.step_columns import StepColumns

#: Without sound counters and the right text nothing else matters, so those come first.
CHECKS: tuple[HealthCheck, ...] = (*measurement_checks.CHECKS, *text_checks.CHECKS, *drafting_checks.CHECKS)


def health_checks(run: RunRecord, columns: StepColumns, metrics: dict, samples: Sequence[SampleRecord]) -> list[dict]:
    """The `health` block: a mapping for each check. `metrics` are the other blocks of metrics.json."""
    evidence = Evidence.of(run, columns, metrics, samples)
    return [_looked(check, evidence) for check in CHECKS]


def _looked(check: HealthCheck, evidence: Evidence) -> dict:
    finding = check.look(evidence)
    return {
        "name": check.name,
        "title": check.title,
        "status": finding.status,
        "seen": finding.text,
        "numbers": {name: _finite(value) for name, value in finding.numbers.items()},
        "threshold": check.threshold,
        "why": check.why,
        "where": check.where,
    }


def _finite(value: float | None) -> float | None:
    """None for an infinity, which JSON does not have: so many standard errors where there is no spread at all."""
    return value if value is not None and isfinite(value) else None
