"""Timestamps of a recorded load.

Belongs here: reading a trace and refusing one that can't be replayed. Does not belong here: what becomes of the times
(arrivals.py).

A trace is a text file with a line for each request, in the order of arrival: a number of seconds, or a JSON object with
one under "timestamp" (its other keys are read over). Blank lines are left out.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

from specbench.errors import UserError


def read_trace(path: str | Path) -> list[float]:
    """Seconds, as they stand in the file, never falling. UserError naming file and line otherwise."""
    path, advice = Path(path), "name a file with a timestamp a line"
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError as error:
        raise UserError(f"load.trace: {path} does not exist; {advice}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"load.trace: cannot read {path} ({error}); {advice}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"load.trace: {path} holds no timestamps; {advice}")
    times_s = [_timestamp(line, f"{path} line {number}") for number, line in numbered]
    for index, (before_s, time_s) in enumerate(pairwise(times_s)):
        if time_s < before_s:
            (earlier, _), (later, _) = numbered[index : index + 2]
            raise UserError(
                f"{path} line {later}: time goes backwards, from {before_s:g} s in line {earlier} to {time_s:g} s; "
                "sort the trace by its timestamps"
            )
    return times_s


def _timestamp(line: str, where: str) -> float:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(
            f"{where}: neither a number nor JSON; give seconds, or an object with them as timestamp"
        ) from None
    if isinstance(value, dict):
        if "timestamp" not in value:
            raise UserError(f'{where}: no "timestamp"; each row of a trace needs one, in seconds')
        value = value["timestamp"]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # A whole number can be larger than any other.
    if not is_number or not abs(value) <= sys.float_info.max:
        raise UserError(f"{where}: the timestamp must be a number of seconds, not {value!r}")
    return float(value)
