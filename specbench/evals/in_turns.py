"""The first samples of a file whose kinds stand one behind the other.

Belongs here: the order in which samples are taken. Does not belong here: what their kinds are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def in_turns(items: Iterable[Item], kind_of: Callable[[Item], str]) -> list[Item]:
    """The kinds in turn, each in its own order: so the first n are of all kinds, whatever the order of the file."""
    place: Counter[str] = Counter()
    keyed: list[tuple[int, int, Item]] = []
    for index, item in enumerate(items):
        kind = kind_of(item)
        keyed.append((place[kind], index, item))
        place[kind] += 1
    return [item for _, _, item in sorted(keyed, key=lambda entry: entry[:2])]
