"""Cells of tables, one function a kind of number: unrounded for files, as number_format.py writes it for readers.

Belongs here: pairing a value with its text. Does not belong here: how a number is written, what stands in a table.

What is no single number, an interval or a rate for each position, has a JSON list as its value.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from specbench.reports.number_format import (
    count,
    decimal,
    decimal_range,
    percent,
    percent_of,
    percent_range,
    points_range,
    slash_joined,
)
from specbench.reports.table import Cell


def percent_cell(fraction: float | None) -> Cell:
    return Cell(fraction, percent(fraction))


def decimal_cell(value: float | None, digits: int = 2) -> Cell:
    return Cell(value, decimal(value, digits))


def count_cell(value: float | None) -> Cell:
    return Cell(value, count(value))


def percent_of_cell(part: float | None, whole: float | None) -> Cell:
    """The value is the fraction; the text has both counts."""
    return Cell(None if part is None or not whole else part / whole, percent_of(part, whole))


def percent_range_cell(interval: Sequence[float] | None) -> Cell:
    return Cell(_list(interval), percent_range(interval))


def points_range_cell(interval: Sequence[float] | None) -> Cell:
    return Cell(_list(interval), points_range(interval))


def decimal_range_cell(interval: Sequence[float] | None) -> Cell:
    return Cell(_list(interval), decimal_range(interval))


def slash_joined_cell(fractions: list[float | None]) -> Cell:
    return Cell(_list(fractions), slash_joined(fractions))


def list_cell(values: Sequence[float | None], text: str) -> Cell:
    """Several numbers that a reader sees as one text."""
    return Cell(_list(values), text)


#: For a row of which a column says nothing, unlike one that was not measured.
EMPTY = Cell(None, "")


def _list(values: Sequence[float | None] | None) -> str | None:
    return None if values is None else json.dumps(list(values))
