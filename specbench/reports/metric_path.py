"""Addresses inside metrics.json: `acceptance.per_position[0]`, `eval.accuracy`.

Belongs here: reading the value at an address, and the addresses that there are. Does not belong here: what they mean.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from specbench.errors import UserError

_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def metric_at(metrics: dict, path: str) -> object:
    """The value at `path`; None behind the end of a list or below a null. UserError where there is no such path."""
    value: object = metrics
    for name, index in _steps(path):
        if value is None:
            return None
        if index is not None:
            if not isinstance(value, list):
                raise _unknown(metrics, path)
            value = value[index] if index < len(value) else None
        elif isinstance(value, dict) and name in value:
            value = value[name]
        else:
            raise _unknown(metrics, path)
    return value


def number_at(metrics: dict, path: str) -> float | None:
    """The number at `path`; UserError where there is something else."""
    value = metric_at(metrics, path)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        inside = [known for known in leaf_paths(metrics) if known.startswith(path)]
        kind = "a truth value" if isinstance(value, bool) else "not a number"
        hint = f"; inside it: {', '.join(inside[:6])}" if inside and inside != [path] else ""
        raise UserError(f"{path}: is {kind} in metrics.json{hint}")
    return value


def leaf_paths(metrics: object, prefix: str = "") -> Iterator[str]:
    """Every address that holds no container."""
    if isinstance(metrics, dict):
        for name, value in metrics.items():
            yield from leaf_paths(value, f"{prefix}.{name}" if prefix else name)
    elif isinstance(metrics, list):
        for index, value in enumerate(metrics):
            yield from leaf_paths(value, f"{prefix}[{index}]")
    else:
        yield prefix


def _steps(path: str) -> list[tuple[str, int | None]]:
    """(name, None) or ("", index) for each step of the address."""
    matches = list(_STEP.finditer(path))
    written = "".join(("." if match[1] and match.start() else "") + match[0] for match in matches)
    if written != path or not path:
        raise UserError(f"{path!r}: not an address in metrics.json; write it like acceptance.per_position[0]")
    return [(match[1] or "", None if match[2] is None else int(match[2])) for match in matches]


def _unknown(metrics: dict, path: str) -> UserError:
    """Names the nearest addresses, those with the same last name first."""
    known = [one for one in leaf_paths(metrics) if "[" not in one]
    last = path.rpartition(".")[2]
    same_end = [one for one in known if one.rpartition(".")[2] == last]
    near = list(dict.fromkeys([*same_end, *difflib.get_close_matches(path, known, n=3, cutoff=0.5)]))[:3]
    blocks = ", ".join(dict.fromkeys(one.partition(".")[0] for one in known))
    hint = f"did you mean {' or '.join(near)}?" if near else f"its blocks are {blocks}"
    return UserError(f"{path}: no such path in metrics.json; {hint}")
