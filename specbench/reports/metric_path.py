"""Addresses inside metrics.json: `acceptance.per_position[0]`, `eval.accuracy`.

Belongs here: reading the value at an address, and the addresses that there are. Does not belong here: what they mean.

A name may hold dots and brackets, as those of `intervals` do: `intervals.acceptance.acceptance_length[0]` is the lower
bound of that interval.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from specbench.errors import UserError

_INDEX = re.compile(r"\[(\d+)\](?:\.(?=.)|(?=\[)|$)")

#: One bound of the interval of a figure.
_INTERVAL = re.compile(r"intervals\.(.+)\[[01]\]")


class _Unknown(Exception):
    """There is no such address."""


class _Open(Exception):
    """The address leads into a mapping that has no names yet."""


def metric_at(metrics: dict, path: str) -> object:
    """The value at `path`; None behind the end of a list, below a null, and for an interval that a figure has not.

    UserError where there is no such path.
    """
    try:
        return _at(metrics, path)
    except (_Unknown, _Open):
        figure = _INTERVAL.fullmatch(path)
        if figure is None:
            raise _unknown(metrics, path) from None
        metric_at(metrics, figure[1])
        return None


def number_at(metrics: dict, path: str) -> float | None:
    """The number at `path`; UserError where there is something else."""
    value = metric_at(metrics, path)
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        inside = [known for known in leaf_paths(metrics) if known.startswith(path)]
        kind = "a truth value" if isinstance(value, bool) else "not a number"
        hint = f"; inside it: {', '.join(inside[:6])}" if inside and inside != [path] else ""
        raise UserError(f"{path}: is {kind} in metrics.json{hint}")
    return value


def check_path(skeleton: dict, path: str) -> None:
    """UserError where `path` can be no number, judging by the metrics of a run that has not begun."""
    try:
        _at(skeleton, path)
    except _Open:
        return
    except _Unknown:
        raise _unknown(skeleton, path) from None
    number_at(skeleton, path)


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


def _at(value: object, rest: str) -> object:
    """The value at `rest` below `value`."""
    if not rest or value is None:
        return value
    if isinstance(value, list):
        found = _INDEX.match(rest)
        if found is None:
            raise _Unknown
        index = int(found[1])
        return _at(value[index] if index < len(value) else None, rest[found.end() :])
    if not isinstance(value, dict):
        raise _Unknown
    if not value:
        raise _Open
    names = [name for name in value if rest == name or rest.startswith((f"{name}.", f"{name}["))]
    if not names:
        raise _Unknown
    name = max(names, key=len)
    below = rest[len(name) :]
    if below == ".":
        raise _Unknown
    return _at(value[name], below.removeprefix("."))


def _unknown(metrics: dict, path: str) -> UserError:
    """Names the nearest addresses, those with the same last name first."""
    known = [one for one in leaf_paths(metrics) if "[" not in one]
    last = path.rpartition(".")[2]
    same_end = [one for one in known if one.rpartition(".")[2] == last]
    same_end.sort(key=lambda one: -difflib.SequenceMatcher(None, path, one).ratio())
    near = list(dict.fromkeys([*same_end, *difflib.get_close_matches(path, known, n=3, cutoff=0.5)]))[:3]
    blocks = ", ".join(dict.fromkeys(one.partition(".")[0] for one in known))
    hint = f"did you mean {' or '.join(near)}?" if near else f"its blocks are {blocks}"
    return UserError(f"{path}: no such path in metrics.json; {hint}")
