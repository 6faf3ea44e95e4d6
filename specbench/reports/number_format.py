"""How a number is written for a reader: units, decimals, n/a.

Belongs here: one function a kind of number, the same for report and terminal. Does not belong here: layout.

"Not measured" is n/a, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence

NOT_MEASURED = "n/a"


def percent(fraction: float | None) -> str:
    """A fraction as a percentage with two decimals."""
    return NOT_MEASURED if fraction is None else f"{100 * fraction:.2f}%"


def decimal(value: float | None, digits: int = 2) -> str:
    return NOT_MEASURED if value is None else f"{value:,.{digits}f}"


def percent_range(interval: Sequence[float] | None) -> str:
    """`94.19% to 96.45%`"""
    return NOT_MEASURED if interval is None else f"{percent(interval[0])} to {percent(interval[1])}"


def points(fraction: float | None) -> str:
    """`-9.16 pts`: a difference of two fractions."""
    return NOT_MEASURED if fraction is None else f"{100 * fraction:+.2f} pts"


def points_range(interval: Sequence[float] | None) -> str:
    """`-9.61 to -8.70 pts`"""
    return NOT_MEASURED if interval is None else f"{100 * interval[0]:+.2f} to {100 * interval[1]:+.2f} pts"


def p_value(p: float | None) -> str:
    """`0.0312`, `< 0.0001`"""
    if p is None:
        return NOT_MEASURED
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def decimal_range(interval: Sequence[float] | None, digits: int = 2) -> str:
    """`4.35 to 4.46`"""
    return NOT_MEASURED if interval is None else f"{decimal(interval[0], digits)} to {decimal(interval[1], digits)}"


def count(value: float | None) -> str:
    """A count, with separators; a sum of partial scores keeps two decimals."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,}" if float(value).is_integer() else f"{value:,.2f}"


def percent_of(part: float | None, whole: float | None) -> str:
    """`12.00% (3/25)`"""
    if part is None or not whole:
        return NOT_MEASURED
    return f"{percent(part / whole)} ({count(part)}/{count(whole)})"


def slash_joined(fractions: list[float | None]) -> str:
    """`75.6 / 60.1 / 49.8`: percentages with one decimal, one a position."""
    return " / ".join(NOT_MEASURED if one is None else f"{100 * one:.1f}" for one in fractions)
