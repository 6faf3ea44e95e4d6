"""Under which key a block is found: what its content was computed from, and nothing else.

Belongs here: the chain over a request's tokens and its audio or image content. Does not belong here: when a block may
be published (cache_rules.py), where it is (block_pool.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

#: 128 bits: among 10^9 blocks the odds of one collision are below 10^-20.
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Placeholder tokens [start, end) that stand for audio or an image, which `digest` identifies."""

    start: int
    end: int
    digest: bytes


class PrefixKeys:
    """The keys of one request's blocks.

    The chain's digest of block i covers every token through the block's end. A drafter's block is computed from more:
    its last row reads tokens behind the block, so its key covers as many of these as the group's lookahead says.
    """

    def __init__(
        self, block_size: int, prompt: Sequence[int], output: Sequence[int], content: Sequence[ContentSpan] = ()
    ):
        self._block_size = block_size
        self._prompt = prompt
        #: The request's own list: it grows, and what is in it stays.
        self._output = output
        self._content = content
        self._chain = [b""]

    def key(self, index: int, num_lookahead: int) -> bytes | None:
        """Key of block `index` for a group whose rows read `num_lookahead` tokens ahead; None while these tokens are
        not known."""
        end = (index + 1) * self._block_size
        if end + num_lookahead > len(self._prompt) + len(self._output):
            return None
        while len(self._chain) <= index + 1:
            start = (len(self._chain) - 1) * self._block_size
            self._chain.append(self._digest(self._chain[-1], start, start + self._block_size))
        chained = self._chain[index + 1]
        return chained if num_lookahead == 0 else self._digest(chained, end, end + num_lookahead)

    def _digest(self, parent: bytes, start: int, end: int) -> bytes:
        num_prompt = len(self._prompt)
        if end <= num_prompt:
            tokens = self._prompt[start:end]
        else:
            tokens = [*self._prompt[start:], *self._output[max(start - num_prompt, 0) : end - num_prompt]]
        digest = hashlib.blake2b(parent, digest_size=_DIGEST_BYTES)
        digest.update(array("q", tokens).tobytes())
        for span in self._content:
            if span.start < end and span.end > start:
                # A placeholder says nothing of what it stands for; where the block cuts the span does.
                digest.update(array("q", (span.start - start, span.end - start)).tobytes() + span.digest)
        return digest.digest()
