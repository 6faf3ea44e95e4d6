"""Rows of JSON lines, with the line that each came from.

Belongs here: reading a file so that any fault in it can be named by file and line. Does not belong here: what the keys
mean (gsm8k.py, prompts.py).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import UserError


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it stands, for messages: "FILE line N"."""

    where: str
    value: dict[str, Any]

    def text(self, key: str) -> str:
        """The text under `key`, which must be there and not be blank."""
        if key not in self.value:
            raise UserError(f'{self.where}: no "{key}": each row needs it')
        value = self.value[key]
        if not isinstance(value, str) or not value.strip():
            raise UserError(f'{self.where}: "{key}" must be a text that is not blank')
        return self.checked(value)

    def checked(self, text: str) -> str:
        """`text`, if it can be encoded: JSON may spell half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{self.where}: the text holds half of a surrogate pair, which is no character") from error
        return text


@dataclass(frozen=True, slots=True)
class RowFile:
    """The rows of one file, in order, and the file's hash."""

    path: Path
    sha256: str
    rows: tuple[Row, ...]


def read_rows(path: str | Path, key: str) -> RowFile:
    """Read a file of JSON lines; `key` is the setting that named it, for messages.

    A byte order mark, CRLF line ends and blank lines are read over. Lines end at line feeds only: a text may hold other
    separators.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{key}: {path} does not exist; give a file of JSON lines") from error
    except OSError as error:
        raise UserError(f"{key}: can't read {path}: {error.strerror}: give a file of JSON lines") from error
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rows = tuple(_read_row(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip())
    if not rows:
        raise UserError(f"{key}: {path} holds no rows; give a file with one JSON object a line")
    return RowFile(path, hashlib.sha256(content).hexdigest(), rows)


def read_json_rows(path: str | Path, key: str) -> RowFile:
    """The same of a file that may also be one JSON array of rows."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError:  # said by read_rows
        return read_rows(path, key)
    if not content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        return read_rows(path, key)
    try:
        values = json.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{key}: {path} is not JSON ({error}); give a JSON array of rows, or JSON lines") from error
    rows = tuple(_checked_row(value, f"{path} row {number}") for number, value in enumerate(values, start=1))
    if not rows:
        raise UserError(f"{key}: {path} holds no rows; give a JSON array of rows, or JSON lines")
    return RowFile(path, hashlib.sha256(content).hexdigest(), rows)


def _read_row(line: bytes, where: str) -> Row:
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text; save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error}); correct or remove the line") from error
    return _checked_row(value, where)


def _checked_row(value: object, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(f"{where}: not a JSON object: each row is one, such as {{...}}")
    return Row(where, value)
