"""A request's emitted tokens walked one at a time, as plain decoding would have emitted them, to the first stop.

Belongs here: which verified tokens are kept, and why a request ends. Does not belong here: how they were verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.engine.stop_strings import StopMatch, StopMatcher
from specbench.engine.tokenizer import Tokenizer
from specbench.generate import SamplingParams


class OutputStream:
    """Stop conditions of one request, kept from its first output token to its last.

    A stop goes before the cap: a token that is both ends the request with "stop". The token that completes a stop is
    kept; what was verified behind it never existed.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        stop_token_ids: Sequence[int],
        max_output_tokens: int,
        tokenizer: Tokenizer | None,
    ):
        self._stop_token_ids = frozenset(stop_token_ids)
        self._num_left = max_output_tokens
        #: Output tokens, from now on, that end nothing.
        self._num_before_stops = sampling.min_tokens
        self._matcher: StopMatcher | None = None
        if sampling.stop and tokenizer is not None:
            self._matcher = StopMatcher(sampling.stop, tokenizer.new_detokenizer(), sampling.min_tokens)
        #: Set once a stop string was found.
        self.match: StopMatch | None = None
        #: Whether the last kept token is a stop token, which is no text.
        self.ends_in_stop_token = False

    def push(self, token_ids: Sequence[int]) -> tuple[list[int], str | None]:
        """Take verified tokens; returns those that are kept, and the finish reason once there is one."""
        kept: list[int] = []
        for token_id in token_ids:
            kept.append(token_id)
            self._num_left -= 1
            if self._is_stop(token_id):
                return kept, "stop"
            if self._num_left == 0:
                return kept, "length"
        return kept, None

    def _is_stop(self, token_id: int) -> bool:
        self._num_before_stops -= 1
        self.ends_in_stop_token = self._num_before_stops < 0 and token_id in self._stop_token_ids
        if self.ends_in_stop_token:
            return True
        if self._matcher is not None:
            self.match = self._matcher.push(token_id)
        return self.match is not None
