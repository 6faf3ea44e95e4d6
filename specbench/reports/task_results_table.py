"""The table of an eval that computes its own results: lm-eval's, in the columns in which it prints it.

Belongs here: cells and their order. Does not belong here: any computation; the results stand in run.json.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.records import TaskResult
from specbench.reports.number_format import NOT_MEASURED, count
from specbench.reports.table import Cell, ReportTable, text_cell

_ARROWS = {True: "↑", False: "↓", None: ""}


def task_results_tables(results: Sequence[TaskResult]) -> list[ReportTable]:
    """One table; none where the eval computed nothing itself. A column tells repeats apart where there are several."""
    if not results:
        return []
    has_repeats = any(result.repeat for result in results)
    header = ("Tasks", "Version", "Filter", "n-shot", "Metric", "Better", "Value", "Stderr", "n")
    rows = tuple(
        _row(result) + ((Cell(result.repeat, str(result.repeat)),) if has_repeats else ()) for result in results
    )
    columns = (*header, "Repeat") if has_repeats else header
    return [ReportTable("task_results", "As the eval itself gives it", columns, rows, 6)]


def _row(result: TaskResult) -> tuple[Cell, ...]:
    return (
        text_cell(result.task),
        text_cell(result.version),
        text_cell(result.filter),
        text_cell(NOT_MEASURED if result.num_fewshot is None else str(result.num_fewshot)),
        text_cell(result.metric),
        text_cell(_ARROWS[result.higher_is_better]),
        _four_digits(result.value),
        _four_digits(result.stderr),
        Cell(result.num_samples, count(result.num_samples)),
    )


def _four_digits(value: float | None) -> Cell:
    return Cell(value, NOT_MEASURED if value is None else f"{value:.4f}")
