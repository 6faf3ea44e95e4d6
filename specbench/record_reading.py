"""Records out of plain values, as JSON has them: a value of another type than its field's is told by the field's name.

Does not belong here: files (run_directory.py), tables, whose columns have types (record_tables.py).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Record = TypeVar("Record")
#: What JSON has in place of these.
_IN_JSON: dict[Any, tuple[type, ...]] = {float: (float, int), Sequence: (list,), tuple: (list,)}
#: Of records that were read before: field -> types.
_KINDS: dict[type, dict[str, tuple[type, ...]]] = {}


def read_record(cls: type[Record], values: Mapping[str, Any]) -> Record:
    """An instance of the dataclass `cls`. TypeError for a key that is unknown or missing, or a value of another type;
    what is inside of lists and objects is not looked at."""
    if cls not in _KINDS:
        _KINDS[cls] = _kinds(cls)
    for name, kinds in _KINDS[cls].items():
        if name in values and not isinstance(values[name], kinds):
            raise TypeError(f"{name} is {values[name]!r}")
    return cls(**values)


def _kinds(cls: type) -> dict[str, tuple[type, ...]]:
    """Field -> the types that its value may have. A field that is a record has been read by then."""
    kinds = {}
    for name, hint in typing.get_type_hints(cls).items():
        parts = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
        origins = [typing.get_origin(part) or part for part in parts]
        kinds[name] = tuple(kind for origin in origins for kind in _IN_JSON.get(origin, (origin,)))
    return kinds
