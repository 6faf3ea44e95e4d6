"""What a user did that cannot work, said in one line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend: the message says what, where (file and key) and what to do. Exit code 2."""


def near_name(name: str, known: Iterable[str]) -> str:
    """A hint to append to an unknown name: the nearest known one, else the known ones."""
    known = sorted(known)
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if nearest:
        return f"did you mean {nearest[0]!r}?"
    return "known: " + ", ".join(known)
