"""Secrets out of what is written to disk.

Belongs here: which keys and which pieces of text are secret. Does not belong here: any file. Numbers are never
secret, so `num_speculative_tokens` and `stop_token_ids` pass whatever their names.
"""

from __future__ import annotations

import re

REDACTED = "[redacted]"

_SECRET_KEY = re.compile(
    r"(?:^|[_\-.])(?:token|key|apikey|password|passwd|secret|credentials?|authorization)$", re.IGNORECASE
)
_SECRET_ASSIGNMENT = re.compile(
    r"((?:^|[\s_\-.+])(?:token|key|apikey|password|passwd|secret|credentials?|authorization)[=:]\s*)(?:\"[^\"]*\"|'[^']*'|[^\s,}]+)",
    re.IGNORECASE,
)
_BEARER = re.compile(r"\b(Bearer\s+)[\w\-.~+/=]+", re.IGNORECASE)
_URL_USER = re.compile(r"(://)[^/@\s]+@")


def redact(value: object) -> object:
    """`value`, made of plain containers, with every secret string in it replaced."""
    if isinstance(value, dict):
        return {key: _redact_entry(str(key), entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redact(entry) for entry in value]
    if isinstance(value, str):
        return redact_text(value)
    return value


def redact_text(text: str) -> str:
    """`text` without what follows `…key=`, `…token=` and the like, after `Bearer`, or before the @ of an address."""
    text = _BEARER.sub(rf"\1{REDACTED}", text)
    text = _SECRET_ASSIGNMENT.sub(rf"\1{REDACTED}", text)
    return _URL_USER.sub(rf"\1{REDACTED}@", text)


def _redact_entry(key: str, value: object) -> object:
    if isinstance(value, str) and value and _SECRET_KEY.search(key):
        return REDACTED
    return redact(value)
