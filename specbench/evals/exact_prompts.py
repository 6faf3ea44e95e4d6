"""Prompts of an exact number of tokens, by the model's own tokenizer and chat template.

Belongs here: cutting text so that template, text and a last instruction have the wanted length together. Does not
belong here: which text (fixed_length.py, speed_bench.py).

The length is made in token ids, not in text: text that is cut between two tokens may be read as other tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.errors import UserError
from specbench.evals.task import EvalModel, PromptTokenizer


@dataclass(frozen=True, slots=True)
class PromptFrame:
    """What stands before and behind a user's text, as token ids."""

    before: tuple[int, ...]
    behind: tuple[int, ...]
    tokenizer: PromptTokenizer
    is_chat: bool

    @classmethod
    def of(cls, tokenizer: PromptTokenizer, protocol: str | None) -> PromptFrame:
        """The chat template of one user turn; without a chat, what the tokenizer puts in front of any text."""
        if protocol == "completion":
            return cls(tuple(tokenizer.encode("")), (), tokenizer, is_chat=False)
        one, other = (
            tokenizer.encode_chat([{"role": "user", "content": content}]).token_ids for content in ("apple", "7 ways")
        )
        num_before = _num_common(one, other)
        num_behind = _num_common(one[num_before:][::-1], other[num_before:][::-1])
        return cls(tuple(one[:num_before]), tuple(one[len(one) - num_behind :]), tokenizer, is_chat=True)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a user's text. In a chat it may spell a special token, which then is plain text."""
        if not self.is_chat:
            return self.tokenizer.encode(text, add_special_tokens=False)
        ids = self.tokenizer.encode_chat([{"role": "user", "content": text}]).token_ids
        return ids[len(self.before) : len(ids) - len(self.behind)]

    def exactly(self, num_tokens: int, text_ids: Sequence[int], ending_ids: Sequence[int] = ()) -> tuple[int, ...]:
        """The beginning of `text_ids` and all of `ending_ids` in the frame: `num_tokens` in all.

        `text_ids` must be long enough; UserError where not even the rest fits.
        """
        num_text = num_tokens - len(self.before) - len(ending_ids) - len(self.behind)
        if num_text < 1:
            raise UserError(
                f"eval.isl: {num_tokens} tokens are too few: template and instruction take {num_tokens - num_text}"
            )
        assert len(text_ids) >= num_text
        return (*self.before, *text_ids[:num_text], *ending_ids, *self.behind)

    def num_tokens(self, text_ids: Sequence[int]) -> int:
        """Of the whole text in the frame."""
        return len(self.before) + len(text_ids) + len(self.behind)


def check_room(isl: int, osl: int, model: EvalModel) -> None:
    """UserError where input and output do not fit into the context together: the output would be cut short."""
    if isl + osl > model.max_model_len:
        raise UserError(
            f"eval.isl: {isl} tokens and {osl} of output (eval.osl) are more than the context of "
            f"{model.max_model_len}; lower them or raise model.max_model_len"
        )


def _num_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))
