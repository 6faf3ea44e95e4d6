"""A tokenizer of one token a letter, for tests that count tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.generate import Message

BOS, USER, END = 1, 2, 3
_FIRST = 10


@dataclass(frozen=True, slots=True)
class Rendered:
    token_ids: list[int]
    text: str | None


class LetterTokenizer:
    bos_token_id = BOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [_FIRST + ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(token - _FIRST) for token in token_ids if token >= _FIRST)

    def encode_chat(self, messages: Sequence[Message]) -> Rendered:
        ids = [BOS]
        text = ""
        for message in messages:
            ids += [USER, *self.encode(message["content"], add_special_tokens=False), END]
            text += f"<{message['role']}>{message['content']}<end>"
        return Rendered(ids, text)
