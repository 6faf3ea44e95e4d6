"""The losslessness table: which test, of what, found what, and what it could have seen.

Belongs here: the section's words and its table. Does not belong here: the tests (evals/losslessness.py).
"""

from __future__ import annotations

from specbench.records import LosslessnessCell, LosslessnessCheck
from specbench.reports.number_format import NOT_MEASURED, count, percent
from specbench.reports.table import Cell, ReportTable, Section, text_cell

_STATUS_WORDS = {
    "identical": "identical",
    "near_ties": "identical but for near ties",
    "consistent": "consistent with one law",
    "mismatch": "**MISMATCH**",
    "not_checked": "not checked",
    "not_applicable": "not applicable",
}
_HEADINGS = ("Proposer", "k", "Drafts accepted by", "Sampling", "Test", "n", "Found", "p", "Would have seen")


def losslessness_sections(check: LosslessnessCheck | None) -> list[Section]:
    """One; none where no plain side ran."""
    if check is None:
        return []
    sentence = f"The same requests with and without speculation: {losslessness_sentence(check)}."
    tables = [table for table in (_cells_table(check), _differences_table(check)) if table.rows]
    return [Section("Losslessness", (sentence, *tables))]


def losslessness_sentence(check: LosslessnessCheck) -> str:
    """The worst that was found, and of how many cells."""
    if check.reason is not None:
        return f"{_STATUS_WORDS[check.status]}: {check.reason}"
    words = _STATUS_WORDS[check.status]
    return f"{words} in {count(len(check.cells))} {'test' if len(check.cells) == 1 else 'tests'}"


def losslessness_lines(check: LosslessnessCheck | None) -> list[str]:
    """One line of a verdict; none where no plain side ran."""
    return [] if check is None else [f"Losslessness: {losslessness_sentence(check)}"]


def losslessness_metrics(check: LosslessnessCheck | None) -> dict:
    """What metrics.json holds: counts over the texts compared token for token, and every cell."""
    if check is None:
        return {"status": "not_checked", "identical": None, "near_ties": None, "mismatches": None, "cells": []}
    texts = [cell for cell in check.cells if cell.identical is not None]
    counts = {
        name: sum(getattr(cell, name) for cell in texts) if texts else None
        for name in ("identical", "near_ties", "mismatches")
    }
    return {"status": check.status, **counts, "cells": [_plain(cell) for cell in check.cells]}


def _plain(cell: LosslessnessCell) -> dict:
    return {name: getattr(cell, name) for name in LosslessnessCell.__slots__}


def _cells_table(check: LosslessnessCheck) -> ReportTable:
    rows = tuple(_row(cell) for cell in check.cells)
    return ReportTable("losslessness", "Tests against plain decoding", _HEADINGS, rows, len(_HEADINGS))


def _row(cell: LosslessnessCell) -> tuple[Cell, ...]:
    return (
        text_cell(cell.proposer),
        Cell(cell.num_speculative_tokens, str(cell.num_speculative_tokens)),
        text_cell(cell.acceptance),
        text_cell(cell.sampling),
        text_cell(cell.test),
        Cell(cell.compared, count(cell.compared)),
        Cell(cell.status, _found(cell)),
        Cell(cell.p_value, NOT_MEASURED if cell.p_value is None else f"{cell.p_value:.4g}"),
        Cell(cell.detectable, _detectable(cell)),
    )


def _found(cell: LosslessnessCell) -> str:
    words = _STATUS_WORDS[cell.status]
    if cell.reason is not None:
        return f"{words}: {cell.reason}"
    if cell.identical is None:
        return words
    return f"{words} ({cell.identical} identical, {cell.near_ties} near ties, {cell.mismatches} different)"


def _detectable(cell: LosslessnessCell) -> str:
    """In words: what the test would have missed is as telling as what it found."""
    if cell.identical is not None:
        return "any token"
    if cell.p_value is None:
        return NOT_MEASURED
    if cell.detectable is None:
        return f"no {cell.detectable_unit}, with a probability of 90%"
    assert cell.detectable_unit is not None
    is_share = cell.detectable_unit.startswith("share of ")
    size = f"{percent(cell.detectable)} of" if is_share else f"{cell.detectable:.3g}"
    return f"{size} {cell.detectable_unit.removeprefix('share of ')}, with a probability of 90%"


def _differences_table(check: LosslessnessCheck) -> ReportTable:
    headings = ("First difference of", "At output token", "Speculative", "Plain", "Margin", "Rounding allows", "Is")
    rows = tuple(_difference_row(difference) for difference in check.differences)
    return ReportTable("losslessness_differences", "First differences", headings, rows, len(headings))


def _difference_row(difference: dict) -> tuple[Cell, ...]:
    return (
        text_cell(difference["request_id"]),
        Cell(difference["output_index"], str(difference["output_index"])),
        _token(difference["speculative"]),
        _token(difference["plain"]),
        _logit(difference["margin"]),
        _logit(difference["allowed"]),
        text_cell("near tie") if difference["is_near_tie"] else Cell("different", "**different**"),
    )


def _token(token_id: int | None) -> Cell:
    return Cell(token_id, "ends" if token_id is None else str(token_id))


def _logit(value: float | None) -> Cell:
    return Cell(value, NOT_MEASURED if value is None else f"{value:.3g}")
