"""Where a stop string ends a request.

Belongs here: finding the first stop in generated text, token by token. Does not belong here: end-of-sequence ids and
length caps, which the engine tests on ids.

Rules. The text is what the detokenizer gives: generated tokens only, special tokens skipped, reasoning included. Tokens
are pushed one at a time in the order of emission, so a verified chunk stops exactly where one-token decoding would. Of
the stops that one token completes, the one that begins first wins; of those that begin together, the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specbench.engine.detokenizer import IncrementalDetokenizer
from specbench.errors import UserError


@dataclass(frozen=True, slots=True)
class StopMatch:
    """The end of a request by a stop string."""

    stop: str
    #: Kept tokens: the one that completes the match is the last.
    num_tokens: int
    #: All text before the stop string.
    text: str
    #: Characters of the kept tokens' text from the stop string's first onwards.
    num_cut_chars: int


class StopMatcher:
    """Watches one request, from its first output token to its last."""

    def __init__(self, stops: Sequence[str], detokenizer: IncrementalDetokenizer, num_before_stops: int = 0) -> None:
        """num_before_stops: tokens at the start that complete no match, whatever their text."""
        if "" in stops:
            raise UserError("an empty stop string would end every answer at once: leave it out of `stop`")
        self._stops = tuple(stops)
        self._detokenizer = detokenizer
        self._num_before_stops = num_before_stops
        self._num_overlap = max((len(stop) for stop in stops), default=1) - 1
        self._num_tokens = 0
        self._pieces: list[str] = []
        #: The last characters seen: what a match that is completed later can begin with.
        self._tail = ""

    def push(self, token_id: int) -> StopMatch | None:
        """The match that this token completes, if any. Nothing may be pushed after a match."""
        self._num_tokens += 1
        new_text = self._detokenizer.push((token_id,))
        if not new_text:
            return None
        self._pieces.append(new_text)
        window = self._tail + new_text
        found = self._first_stop(window, len(self._tail))
        if found is None or self._num_tokens <= self._num_before_stops:
            self._tail = window[len(window) - min(self._num_overlap, len(window)) :]
            return None
        start, stop = found
        return self._match(stop, len(window) - start)

    def _first_stop(self, window: str, num_old: int) -> tuple[int, str] | None:
        """Where the first stop begins in `window`, and which it is. It ends behind the first `num_old` characters: one
        that ended there was seen before, and did not count."""
        hits = [
            (start, -len(stop), stop)
            for stop in self._stops
            if (start := window.find(stop, max(0, num_old - len(stop) + 1))) >= 0
        ]
        if not hits:
            return None
        start, _, stop = min(hits)
        return start, stop

    def _match(self, stop: str, num_chars_from_start: int) -> StopMatch:
        text = "".join(self._pieces)
        # Bytes that the detokenizer still holds show as replacement characters in a decode of the kept tokens.
        num_held_chars = len(self._detokenizer.flush())
        return StopMatch(
            stop=stop,
            num_tokens=self._num_tokens,
            text=text[: len(text) - num_chars_from_start],
            num_cut_chars=num_chars_from_start + num_held_chars,
        )
