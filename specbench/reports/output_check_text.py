"""The output check in words: the same sentence in the verdict, beside speed figures and on the terminal."""

from __future__ import annotations

from specbench.records import OutputCheck
from specbench.reports.number_format import NOT_MEASURED, count
from specbench.reports.table import Cell, ReportTable

_NAMES = {
    "identical": "identical",
    "near_ties": "identical but for near ties",
    "mismatch": "MISMATCH",
    "not_checked": "not checked",
    "not_applicable": "not applicable",
}


def check_sentence(check: OutputCheck | None) -> str:
    """Status, counts of requests, margins and reason, on one line."""
    if check is None:
        return "**not checked**"
    parts = [f"**{_NAMES[check.status]}**"]
    if check.compared:
        parts.append(_counts(check))
    if check.largest_margin is not None:
        allowed = "" if check.allowed_margin is None else f" (a near tie up to {check.allowed_margin:.3g})"
        parts.append(f"largest margin of a differing token {check.largest_margin:.3g}{allowed}")
    if check.max_logit_difference is not None:
        parts.append(f"largest logit difference between verify rows and single rows {check.max_logit_difference:.3g}")
    if check.reason:
        parts.append(check.reason)
    return "; ".join(parts)


def check_differences(check: OutputCheck | None) -> list[ReportTable]:
    """The first differing tokens as one table; none where nothing differs."""
    if check is None or not check.differences:
        return []
    names = list(dict.fromkeys(name for difference in check.differences for name in difference))
    rows = tuple(tuple(_cell(difference.get(name)) for name in names) for difference in check.differences)
    header = tuple(name.replace("_", " ").capitalize() for name in names)
    return [ReportTable("output_differences", "First differing tokens", header, rows)]


def _counts(check: OutputCheck) -> str:
    return (
        f"{count(check.identical)} identical, {count(check.near_ties)} with near ties, "
        f"{count(check.mismatches)} different of {count(check.compared)} requests replayed without speculation"
    )


def _cell(value: float | int | str | None) -> Cell:
    if value is None:
        return Cell(None, NOT_MEASURED)
    return Cell(value, f"{value:.3g}" if isinstance(value, float) else str(value))
