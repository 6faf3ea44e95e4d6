"""A table as data: what it says unrounded and how that is written, for whichever format comes last.

Belongs here: the shape of a table and of a section, their markdown and CSV. Does not belong here: what stands in one.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass

from specbench.reports.markdown_table import markdown_table
from specbench.reports.number_format import NOT_MEASURED

Value = float | int | str | bool | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell. `value` is unrounded (a fraction, not a percentage) and None where nothing was measured."""

    value: Value
    text: str


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table with as many cells in each row as in the header."""

    #: Names the table in files: lower case, words joined by "_".
    name: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    #: Columns from the left that hold text; the others hold numbers.
    num_text_columns: int = 1
    #: Sentences that belong below the table.
    notes: tuple[str, ...] = ()
    #: Columns that files alone have, behind the others: a name and a value for each row.
    file_columns: tuple[tuple[str, tuple[Value, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A headed part of a report: paragraphs of markdown and tables in their order."""

    title: str
    blocks: tuple[str | ReportTable, ...]


def text_cell(text: str | None) -> Cell:
    """A cell whose value is its text."""
    return Cell(text, NOT_MEASURED if text is None else text)


def without_percent(name: str) -> str:
    """The name of a percentage as that of the fraction which files hold."""
    return name.replace(" (%)", "")


def label_cell(label: str) -> Cell:
    """The name of a figure: a reader sees a percentage, files hold a fraction."""
    return Cell(without_percent(label), label)


def table_markdown(table: ReportTable) -> str:
    """The table, and its notes below it."""
    rows = [[cell.text for cell in row] for row in table.rows]
    return "\n\n".join([markdown_table(table.header, rows, table.num_text_columns), *table.notes])


def section_markdown(section: Section, level: int = 2) -> str:
    """Heading and blocks. A section of several tables gives each its title as a bold line."""
    tables = [block for block in section.blocks if isinstance(block, ReportTable)]
    parts = [f"{'#' * level} {section.title}"]
    for block in section.blocks:
        if isinstance(block, str):
            parts.append(block)
            continue
        if len(tables) > 1:
            parts.append(f"**{block.title}**")
        parts.append(table_markdown(block))
    return "\n\n".join(parts)


def tables_of(sections: Iterable[Section]) -> list[ReportTable]:
    """Every table of the sections, in their order."""
    return [block for section in sections for block in section.blocks if isinstance(block, ReportTable)]


def table_csv(table: ReportTable) -> str:
    """Unrounded values below a header whose names are all different; what was not measured is empty."""
    header = [*map(without_percent, table.header), *(name for name, _ in table.file_columns)]
    names = [
        f"{name} ({header[: column + 1].count(name)})" if name in header[:column] else name
        for column, name in enumerate(header)
    ]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for index, row in enumerate(table.rows):
        writer.writerow([*(cell.value for cell in row), *(values[index] for _, values in table.file_columns)])
    return buffer.getvalue()
