"""The table of gates, the same in a run's report and in a comparison."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reports.gates import GateResult
from specbench.reports.table import Cell, ReportTable, Section, text_cell

_OUTCOMES = {"pass": "pass", "fail": "**FAIL**", "undecided": "**UNDECIDED**"}


def gate_section(gates: Sequence[GateResult]) -> Section:
    """A row for each gate and run; without blocks where there are no gates."""
    if not gates:
        return Section("Gates", ())
    rows = [
        (
            text_cell(one.gate.text),
            text_cell(one.label),
            Cell(one.outcome, _OUTCOMES[one.outcome]),
            text_cell(one.reason),
        )
        for one in gates
    ]
    return Section("Gates", (ReportTable("gates", "Gates", ("Gate", "Run", "Outcome", "Why"), tuple(rows), 4),))
