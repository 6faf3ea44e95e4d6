"""From token ids to text, a few tokens at a time.

Belongs here: holding back what is not yet text, so that the pieces of a stream, joined, equal the decoded whole. Does
not belong here: where a text ends (stop_strings.py), which part of it is the answer (channels.py).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

#: Emitted tokens that a window decodes again for what depends on neighbours, such as a leading space.
_CONTEXT_TOKENS = 4


class IncrementalDetokenizer(Protocol):
    """One request's stream of text. Special tokens and ids outside the vocabulary are no text."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; an incomplete character is held back."""
        ...

    def flush(self) -> str:
        """What is still held back, as the whole decode would show it. Nothing may be pushed afterwards."""
        ...


class TokenBytes:
    """Token id -> bytes, for a byte-level vocabulary. Shared by all requests."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._bytes: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        if token_id not in self._bytes:
            self._bytes[token_id] = self._look_up(token_id)
        return self._bytes[token_id]

    def _look_up(self, token_id: int) -> bytes:
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        if token is None:
            return b""
        # An added token may hold characters that stand for no byte, such as a space: it is then its own text.
        if all(character in _BYTE_OF_CHARACTER for character in token):
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        return token.encode()


class ByteLevelDetokenizer:
    """For byte-level vocabularies: exact, and each token is looked at once."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        return self._utf8.decode(b"".join(self._token_bytes[token_id] for token_id in token_ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDetokenizer:
    """For other vocabularies (SentencePiece and the like): decodes a short window again at each token.

    A run of byte tokens is decoded as one, and one invalid byte spoils the run, so a run is held until it ends.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join(self._push_one(token_id) for token_id in token_ids)

    def flush(self) -> str:
        return self._release() if self._held else ""

    def _push_one(self, token_id: int) -> str:
        token = None if token_id in self._special_ids else self._backend.id_to_token(token_id)
        if token is None:
            return ""
        self._held.append(token_id)
        return "" if _BYTE_TOKEN.fullmatch(token) else self._release()

    def _release(self) -> str:
        window = self._context + self._held
        text = self._backend.decode(window)[len(self._backend.decode(self._context)) :]
        self._context, self._held = window[-_CONTEXT_TOKENS:], []
        return text


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others: Sequence[int] = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHARACTER = _byte_of_character()
