"""The health of a run in words: the section of report.md, the line in the verdict and on the terminal.

Belongs here: text from the `health` block of metrics.json. Does not belong here: any check.
"""

from __future__ import annotations

from specbench.reports.health_check import FAILED, NOT_CHECKED, OK, WARNING
from specbench.reports.table import Cell, ReportTable, Section, text_cell

_STATUS = {OK: "ok", WARNING: "**warning**", FAILED: "**FAILED**", NOT_CHECKED: "not checked"}

#: What stands below the table for raised checks only, and in files for all.
_ADVICE = {"name": "Name", "threshold": "Threshold", "why": "Why it matters", "where": "Where to look"}


def raised(health: list[dict]) -> list[dict]:
    """Checks that a reader must see: failed ones, then warnings."""
    return [check for status in (FAILED, WARNING) for check in health if check["status"] == status]


def health_sentence(health: list[dict]) -> str:
    """`**warning**: p99_requests, near_zero; 12 ok, 2 not checked`"""
    named = {status: [one["name"] for one in health if one["status"] == status] for status in _STATUS}
    alarms = [f"{_STATUS[status]}: {', '.join(named[status])}" for status in (FAILED, WARNING) if named[status]]
    return "; ".join([*alarms, f"{len(named[OK])} ok, {len(named[NOT_CHECKED])} not checked"])


def health_section(health: list[dict]) -> Section:
    """All checks as one table, then what to do about those that were raised."""
    rows = tuple(
        (text_cell(one["title"]), Cell(one["status"], _STATUS[one["status"]]), text_cell(one["seen"])) for one in health
    )
    header = ("Check", "Status", "Seen, or why it was not checked")
    advice = tuple((title, tuple(one[key] for one in health)) for key, title in _ADVICE.items())
    table = ReportTable("health", "Health checks", header, rows, 3, file_columns=advice)
    return Section("Health", (table, *(_advice(one) for one in raised(health))))


def _advice(check: dict) -> str:
    return (
        f"**{check['title']}** ({check['status']}, `{check['name']}`): {check['seen']}. Threshold: "
        f"{check['threshold']}. Why it matters: {check['why']}. Where to look: {check['where']}."
    )
