"""Typed values out of plain ones: every key known, every value of its type and in its range, or one line that says not.

Belongs here: ranges, and reading a dataclass. Does not belong here: any key (run_config.py).
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from specbench.errors import UserError, near_name


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The number may not be smaller."""

    minimum: float

    def complaint(self, value: Any) -> str | None:
        return None if value >= self.minimum else f"must be at least {self.minimum:g}, not {value}"


@dataclass(frozen=True, slots=True)
class Above:
    """The number must be larger."""

    limit: float

    def complaint(self, value: Any) -> str | None:
        return None if value > self.limit else f"must be above {self.limit:g}, not {value}"


@dataclass(frozen=True, slots=True)
class Between:
    """The number lies between two others, or is one of them."""

    low: float
    high: float

    def complaint(self, value: Any) -> str | None:
        good = self.low <= value <= self.high
        return None if good else f"must be from {self.low:g} to {self.high:g}, not {value}"


@dataclass(frozen=True, slots=True)
class Counted:
    """How many there are: at least `low`, and at most `high`, beyond which laying them out would never end."""

    low: int
    high: int = 10**9

    def complaint(self, value: Any) -> str | None:
        if value < self.low:
            return f"must be at least {self.low}, not {value}"
        return None if value <= self.high else f"must be at most {self.high:,}, not {value}"


@dataclass(frozen=True, slots=True)
class Within:
    """The number lies above `low` and at most at `high`."""

    low: float
    high: float

    def complaint(self, value: Any) -> str | None:
        good = self.low < value <= self.high
        return None if good else f"must be above {self.low:g} and at most {self.high:g}, not {value}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The value is one of a few names."""

    names: tuple[str, ...]

    def complaint(self, value: Any) -> str | None:
        return None if value in self.names else f"unknown value {value!r}; {near_name(str(value), self.names)}"


def build_config(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the dataclass `cls` from plain values, every key known and every value of its type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in values:
        if key not in hints:
            raise UserError(f"{prefix}{key}: unknown key; {near_name(str(key), hints)}")
    arguments = {}
    optional = {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
    for key, hint in hints.items():
        if key not in values:
            if key in optional:  # a value that the other options of its group have no use for
                continue
            raise UserError(_missing(prefix + key, hint))
        arguments[key] = _value(values[key], hint, prefix + key)
    return cls(**arguments)


def _missing(path: str, hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return f"{path}: none was chosen; say +{path}=NAME (`specbench list {path}` shows them)"
    return f"{path}: missing; say +{path}=VALUE"


def _value(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type hint wants it."""
    if value == "???":
        raise UserError(f"{path}: has no default; say {path}=VALUE")
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, Mapping):
            raise UserError(f"{path}: a config group, not a value; say {path}.KEY=VALUE")
        return build_config(hint, value, prefix=path + ".")
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(hint) if part is not types.NoneType]
        assert len(inner) == 1
        return None if value is None else _value(value, inner[0], path)
    if origin is Annotated:
        base, rule = typing.get_args(hint)
        # Names are asked for by name, also where a value of another type was given.
        checked = value if isinstance(rule, OneOf) else _value(value, base, path)
        if complaint := rule.complaint(checked):
            raise UserError(f"{path}: {complaint}")
        return checked
    if origin is tuple:
        return _list(value, typing.get_args(hint)[0], path)
    return _scalar(value, hint, path)


def _list(value: Any, item_hint: type, path: str) -> tuple:
    example = {str: "texts such as [a,b]", float: "numbers such as [0.8,0.6]", int: "whole numbers such as [1,2]"}
    try:
        if not isinstance(value, list | tuple):
            raise UserError("")
        return tuple(_scalar(item, item_hint, path) for item in value)
    except UserError:
        raise UserError(f"{path}: must be a list of {example[item_hint]}, not {value!r}") from None


def _scalar(value: Any, hint: type, path: str) -> Any:
    """A bool, int, float or str; an int is a float too, and nothing else is anything else."""
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        # No setting means anything at infinity, and a whole number can be larger than any other.
        if not abs(value) <= sys.float_info.max:
            raise UserError(f"{path}: must be a finite number, not {value!r}")
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    raise UserError(f"{path}: must be {names[hint]}, not {value!r}")
