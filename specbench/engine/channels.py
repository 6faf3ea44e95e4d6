"""Which part of an output is the answer, and which is reasoning.

Belongs here: reading Inkling's typed blocks, and the `<think>` of other models, off the output's token ids. Does not
belong here: writing such blocks (chat.py).

A block is opened by `<|content_thinking|>` (reasoning), `<|content_text|>` (the answer) or another content token
(neither: tool calls), and closed by `<|end_message|>`. What stands before the first content token is an answer: a
plain completion has no blocks. Where generation goes on past the end of the model's turn (end-of-sequence ignored), the
rest is neither. The answer is what is scored; an output that was cut while still thinking has the answer
"". A tokenizer without these tokens has one channel, the answer.

Where a vocabulary has the tokens `<think>` and `</think>`, what they enclose is reasoning. Some templates open it in
the prompt, so an output begins in the reasoning when the prompt's last marker opens it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

ANSWER, REASONING, NEITHER = "answer", "reasoning", "neither"
#: No channel: what follows belongs to another turn.
TURN_END = "turn end"

#: The token that moves to a channel -> the channel.
CHANNEL_MARKERS = {
    "<|content_text|>": ANSWER,
    "<|content_thinking|>": REASONING,
    "<|content_invoke_tool_json|>": NEITHER,
    "<|content_invoke_tool_text|>": NEITHER,
    "<|content_xml|>": NEITHER,
    "<|content_tool_error|>": NEITHER,
    "<|message_model|>": NEITHER,
    "<|message_tool|>": NEITHER,
    "<|end_message|>": NEITHER,
    "<|message_user|>": TURN_END,
    "<|message_system|>": TURN_END,
    "<|content_model_end_sampling|>": TURN_END,
}
#: The same, in vocabularies that have all of these.
THINK_MARKERS = {"<think>": REASONING, "</think>": ANSWER}


@dataclass(frozen=True, slots=True)
class Channels:
    """An output, split."""

    answer_token_ids: list[int]
    answer_text: str
    reasoning_text: str


def split_channels(
    token_ids: Sequence[int],
    channel_of: dict[int, str],
    decode: Callable[[Sequence[int]], str],
    num_cut_chars: int,
    prompt_token_ids: Sequence[int],
) -> Channels:
    """Split an output; `channel_of` gives the channel that a marker id opens, `num_cut_chars` falls off the end."""
    last_marker = next((token for token in reversed(prompt_token_ids) if token in channel_of), None)
    is_reasoning = last_marker is not None and channel_of[last_marker] == REASONING
    labelled = _label(token_ids, channel_of, REASONING if is_reasoning else ANSWER)
    blocks = [(channel, [token for _, token in group]) for channel, group in groupby(labelled, lambda pair: pair[0])]
    texts = _cut_end([decode(ids) for _, ids in blocks], num_cut_chars)

    def text_of(wanted: str) -> str:
        return "".join(text for (channel, _), text in zip(blocks, texts, strict=True) if channel == wanted)

    answer_token_ids = [token for channel, ids in blocks if channel == ANSWER for token in ids]
    return Channels(answer_token_ids, text_of(ANSWER), text_of(REASONING))


def _label(token_ids: Sequence[int], channel_of: dict[int, str], channel: str) -> list[tuple[str, int]]:
    """Each token that is not a marker, with the channel that it is in; `channel` is the first one's."""
    labelled = []
    for token_id in token_ids:
        if token_id in channel_of:
            channel = TURN_END if channel == TURN_END else channel_of[token_id]
        else:
            labelled.append((channel, token_id))
    return labelled


def _cut_end(texts: list[str], num_chars: int) -> list[str]:
    """`texts` without their last `num_chars` characters, counted over all of them."""
    kept = []
    for text in reversed(texts):
        num_cut = min(num_chars, len(text))
        kept.append(text[: len(text) - num_cut])
        num_chars -= num_cut
    return kept[::-1]
