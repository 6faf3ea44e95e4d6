"""Reading fields of another tool's JSON, where any of them may be missing or not what it should be.

Belongs here: one function a kind of value; each names file and key of what it can't take. Does not belong here: what a
field means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import UserError


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and where it is from."""

    source: str
    values: Mapping[str, Any]

    def has(self, *keys: str) -> bool:
        return all(key in self.values for key in keys)

    def number(self, key: str) -> float | None:
        """A finite number; None where it is missing, null, or text that is none ("inf")."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self._wrong(key, "a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        return float(value) if math.isfinite(value) else None

    def count(self, key: str) -> int | None:
        """A whole number, not below 0."""
        value = self.number(key)
        if value is None:
            return None
        if value < 0 or not value.is_integer():
            raise self._wrong(key, "a whole number, 0 or more")
        return int(value)

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value or None
        raise self._wrong(key, "a text")

    def numbers(self, key: str, length: int | None = None) -> list[float] | None:
        """A list of finite numbers, of `length` entries where that is known; None where it is missing or null."""
        values = self.list(key, length)
        if values is not None and not all(_is_number(value) for value in values):
            raise self._wrong(key, "a list of numbers")
        return values

    def counts(self, key: str, length: int | None = None) -> list[int] | None:
        """A list of whole numbers, none below 0."""
        values = self.list(key, length)
        if values is not None and not all(type(value) is int and value >= 0 for value in values):
            raise self._wrong(key, "a list of whole numbers, 0 or more")
        return values

    def number_lists(self, key: str, length: int | None = None) -> list[list[float]] | None:
        """A list of lists of finite numbers."""
        values = self.list(key, length)
        for inner in values or ():
            if not isinstance(inner, list) or not all(_is_number(value) for value in inner):
                raise self._wrong(key, "a list of lists of numbers")
        return values

    def list(self, key: str, length: int | None = None) -> list | None:
        """A list, of `length` entries where that is known."""
        values = self.values.get(key)
        if values is None:
            return None
        if not isinstance(values, list):
            raise self._wrong(key, "a list")
        if length is not None and len(values) != length:
            raise UserError(f"{self.source}: {key} has {len(values)} entries where other lists have {length}")
        return values

    def inner(self, key: str) -> Fields:
        """An object inside, empty where it is missing."""
        values = self.values.get(key)
        if values is None:
            values = {}
        if not isinstance(values, dict):
            raise self._wrong(key, "an object")
        return Fields(f"{self.source}: {key}", values)

    def _wrong(self, key: str, wanted: str) -> UserError:
        text = repr(self.values[key])
        return UserError(f"{self.source}: {key} must be {wanted}, not {text if len(text) < 60 else text[:57] + '...'}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
