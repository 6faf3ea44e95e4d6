"""Aligned markdown tables that read well as plain text too."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 1) -> str:
    """A table whose first `num_text_columns` columns are flush left and whose others, numbers, are flush right."""
    cells = [[_escape(cell) for cell in row] for row in [header, *rows]]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rules = ["-" * w if column < num_text_columns else "-" * (w - 1) + ":" for column, w in enumerate(widths)]
    lines = [_line(row, widths, num_text_columns) for row in [cells[0], rules, *cells[1:]]]
    return "\n".join(lines)


def _escape(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def _line(row: Sequence[str], widths: Sequence[int], num_text_columns: int) -> str:
    padded = [
        cell.ljust(width) if column < num_text_columns else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"
