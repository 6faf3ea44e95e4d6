"""A request as the host sees it: what was asked, what has been confirmed, what is in flight.

Belongs here: counts and the properties derived from them. Does not belong here: who may run (scheduling/), what the
tokens mean (tokenizer.py), device state (execution/request_state.py).
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from specbench.engine.content.placement import PlacedContent
from specbench.engine.prefix_keys import PrefixKeys
from specbench.engine.sampling.parameters import RequestSampling
from specbench.generate import GenerateRequest, SamplingParams


def request_key(seed: int, sample_id: str, turn: int) -> int:
    """64-bit key of a request's random stream: from what it is, never from when it arrived."""
    digest = hashlib.blake2b(f"{seed}\0{sample_id}\0{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


class InFlight(NamedTuple):
    """What one outstanding step does to a request."""

    #: Rows that it computes: a chunk's length, or 1 + drafts.
    num_rows: int
    #: The most tokens that it may commit: 0 for a partial chunk, 1 for a final one, its rows for a decode step.
    max_committed: int


@dataclass(slots=True, eq=False)
class Request:
    """One request from admission to its last token.

    `num_computed_tokens` counts committed tokens whose caches are written; it trails `num_tokens` by at least one once
    the prompt is done, since the newest token has not been through the model. Counts are confirmed: they are moved by
    `Scheduler.settle` alone. What outstanding steps may add is held apart, as upper bounds.
    """

    source: GenerateRequest
    prompt_token_ids: list[int]
    #: The caller's cap, or less where the context ends before.
    max_output_tokens: int
    arrival_s: float
    #: Tells this request's results from those of an earlier occupant of the same row.
    generation: int
    #: Ids that end the request.
    stop_token_ids: tuple[int, ...] = ()
    #: Token sequences that are not generated.
    bad_words: tuple[tuple[int, ...], ...] = ()
    #: The persistent row in RequestState; -1 before admission.
    row: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    #: num_tokens at (re)admission: what a chunk of a prompt counts as prompt, generated tokens included.
    prefill_end: int = 0
    #: Drafts that the proposer left for the next step.
    num_draft_tokens: int = 0
    #: Steps scheduled and not yet settled, oldest first, and their sums.
    in_flight: deque[InFlight] = field(default_factory=deque)
    num_rows_in_flight: int = 0
    max_committed_in_flight: int = 0
    #: Out of blocks while a step was outstanding: back to the queue when that step settles.
    is_preempted: bool = False
    finish_reason: str | None = None
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_preemptions: int = 0
    #: Audio or images among the prompt's tokens.
    content: tuple[PlacedContent, ...] = ()
    #: Prompt tokens found in the prefix cache at the first admission; None when it was not asked.
    num_cached_prompt_tokens: int | None = None
    #: Keys of its blocks, kept over preemptions; None without prefix caching.
    prefix_keys: PrefixKeys | None = None

    def begin_step(self, step: InFlight) -> None:
        self.in_flight.append(step)
        self.num_rows_in_flight += step.num_rows
        self.max_committed_in_flight += step.max_committed

    def end_step(self) -> InFlight:
        """The oldest outstanding step settles."""
        step = self.in_flight.popleft()
        self.num_rows_in_flight -= step.num_rows
        self.max_committed_in_flight -= step.max_committed
        return step

    @property
    def request_id(self) -> str:
        return self.source.request_id

    @property
    def sampling(self) -> SamplingParams:
        return self.source.sampling

    @property
    def key(self) -> int:
        return request_key(self.sampling.seed, self.source.sample_id, self.source.turn)

    @property
    def resolved_sampling(self) -> RequestSampling:
        """What the device is told on (re)admission."""
        return RequestSampling(self.sampling, self.key, self.num_prompt_tokens, self.stop_token_ids, self.bad_words)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether every prompt token has to go through the model: no prefix hit may stand in for it."""
        return self.sampling.prompt_logprobs is not None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def max_tokens(self) -> int:
        """Prompt and output when every allowed token has been generated."""
        return len(self.prompt_token_ids) + self.max_output_tokens

    @property
    def num_tokens_upper(self) -> int:
        """The most tokens that can be committed once every outstanding step has settled."""
        return self.num_tokens + self.max_committed_in_flight

    @property
    def num_tokens_lower(self) -> int:
        """The fewest: a step that samples commits one token at least."""
        return self.num_tokens + sum(step.max_committed > 0 for step in self.in_flight)

    @property
    def num_computed_upper(self) -> int:
        return self.num_computed_tokens + self.num_rows_in_flight

    @property
    def num_computed_lower(self) -> int:
        """The fewest tokens that are computed once every outstanding step has settled."""
        certain = (step.num_rows if step.max_committed <= 1 else 1 for step in self.in_flight)
        return self.num_computed_tokens + sum(certain)

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is still to be scheduled."""
        return self.num_computed_upper < self.prefill_end

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None
