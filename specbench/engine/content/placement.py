"""Where audio and images stand in a prompt: from markers to spans of placeholder tokens.

Belongs here: putting a clip's placeholders behind its marker, and what identifies it. Does not belong here: decoding
(hearing.py), chat formats (chat.py), embeddings (layers/features.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specbench.engine.content.content_tokens import ContentTokens
from specbench.engine.prefix_keys import ContentSpan
from specbench.errors import UserError


@dataclass(frozen=True, slots=True)
class Content:
    """One clip or image, as a model's tower takes it."""

    #: AUDIO or IMAGE.
    kind: str
    # [num_tokens, ...]: of audio the bins of each token [80] uint8, of an image the normalised pixels of each patch
    # [moments, rows, columns, channels] fp32
    rows: np.ndarray = field(repr=False)

    @property
    def digest(self) -> bytes:
        """Equal for content that no model could tell apart."""
        description = f"{self.kind} {self.rows.shape} ".encode()
        return hashlib.blake2b(description + np.ascontiguousarray(self.rows).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class PlacedContent:
    """Content, and the tokens of a prompt that stand for it."""

    span: ContentSpan
    content: Content


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """What placeholders in a row stand for, from position `start` on."""

    kind: str
    start: int
    # [num_positions, ...], as in Content
    rows: np.ndarray = field(repr=False)

    @property
    def end(self) -> int:
        return self.start + len(self.rows)


def content_between(content: Sequence[PlacedContent], start: int, end: int) -> tuple[ContentPiece, ...]:
    """What the placeholders in [start, end) stand for."""
    pieces = []
    for placed in content:
        span, rows = placed.span, placed.content.rows
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            pieces.append(ContentPiece(placed.content.kind, first, rows[first - span.start : last - span.start]))
    return tuple(pieces)


def place(
    token_ids: Sequence[int], contents: Sequence[Content], tokens: ContentTokens
) -> tuple[list[int], tuple[PlacedContent, ...]]:
    """Give every marker in the prompt its placeholders, in order, and say where they are.

    A prompt that has them already, from an earlier call, stays as it is. UserError where markers and contents don't
    match in number, or a marker's placeholders in theirs.
    """
    num_markers = sum(token_id == tokens.marker_id for token_id in token_ids)
    if num_markers != len(contents):
        raise UserError(
            f"{len(contents)} clips and {num_markers} markers (token id {tokens.marker_id}) in the prompt: give as "
            "many as there are markers; in a chat the template has to write one for each part of type audio"
        )
    waiting = iter(contents)
    placed_ids: list[int] = []
    placed: list[PlacedContent] = []
    index = 0
    while index < len(token_ids):
        placed_ids.append(token_ids[index])
        index += 1
        if token_ids[index - 1] == tokens.marker_id:
            content = next(waiting)
            index += _num_placeholders(token_ids, index, len(content.rows), tokens)
            span = ContentSpan(len(placed_ids), len(placed_ids) + len(content.rows), content.digest)
            placed.append(PlacedContent(span, content))
            placed_ids += [tokens.placeholder_id] * len(content.rows)
    return placed_ids, tuple(placed)


def _num_placeholders(token_ids: Sequence[int], start: int, expected: int, tokens: ContentTokens) -> int:
    """Placeholders that the prompt has from `start` on: none, or the expected number."""
    end = start
    while end < len(token_ids) and token_ids[end] == tokens.placeholder_id:
        end += 1
    if end - start not in (0, expected):
        raise UserError(
            f"{end - start} placeholders (token id {tokens.placeholder_id}) behind a marker, and a clip of {expected} "
            "tokens for them: leave them out, or give the clip that belongs there"
        )
    return end - start
