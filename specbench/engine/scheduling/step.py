"""The messages that cross the boundary between scheduling and execution, one pair a step.

SchedulerOutput goes down: which rows run, how many tokens each, which blocks were added. It carries no positions,
lengths or slots: those are computed on the device from RequestState. StepOutput comes up.

Does not belong here: how ranks are told (execution/step_message.py), records (records.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specbench.engine.content.placement import ContentPiece
from specbench.engine.sampling.parameters import RequestSampling
from specbench.generate import TokenLogprob

#: A request of a batch is one of these.
PARTIAL_CHUNK, FINAL_CHUNK, DECODE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the device learns of a request on (re)admission."""

    row: int
    #: Prompt, and on resumption the tokens generated before.
    token_ids: list[int]
    #: Tokens whose caches exist already (a prefix hit); 0 otherwise.
    num_computed_tokens: int
    sampling: RequestSampling


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to one row's table of one cache group."""

    group: int
    row: int
    #: Index in the block table of the first of `block_ids`.
    start: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ContentWindow:
    """Positions of one request that this step's rows can read, drafting's own included, and what the placeholders among
    them stand for. It carries no more of a clip than these rows need: every rank gets a copy of it."""

    #: Batch index.
    request: int
    start: int
    end: int
    pieces: tuple[ContentPiece, ...]


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. Lists over requests are in batch order."""

    step: int
    new_requests: list[NewRequest] = field(default_factory=list)
    new_blocks: list[NewBlocks] = field(default_factory=list)
    #: Rows whose request has left, or was preempted, since the last step.
    finished_rows: list[int] = field(default_factory=list)
    #: Per scheduled request: identity, persistent row, PARTIAL_CHUNK / FINAL_CHUNK / DECODE.
    request_ids: list[str] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    modes: list[int] = field(default_factory=list)
    #: Tokens to run: a chunk's length, or 1 + drafts.
    num_tokens: list[int] = field(default_factory=list)
    #: Upper bound of the sequence length once these tokens are in the caches.
    max_seq_lens: list[int] = field(default_factory=list)
    #: Requests whose rows read features of audio or images in this step. Empty: all rows are token ids.
    content: list[ContentWindow] = field(default_factory=list)
    #: Requests that lost their blocks since the last step.
    num_preempted: int = 0
    #: Blocks that lost their key, and what could be found in them, to a new holder since the last step.
    num_evicted_blocks: int = 0

    @property
    def num_requests(self) -> int:
        return len(self.rows)

    def is_decode(self, index: int) -> bool:
        return self.modes[index] == DECODE

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(n for n, mode in zip(self.num_tokens, self.modes, strict=True) if mode != DECODE)

    @property
    def num_decode_requests(self) -> int:
        return sum(mode == DECODE for mode in self.modes)


@dataclass(slots=True)
class StepOutput:
    """One step's results, on the host, in the batch order of its SchedulerOutput."""

    #: [num_requests, k + 1]: emitted tokens, of which the first num_sampled count.
    token_ids: np.ndarray
    #: [num_requests]: 0 for a partial chunk, otherwise accepted drafts + 1.
    num_sampled: np.ndarray
    #: [num_requests]: draft ids >= 0 that were verified.
    num_drafted: np.ndarray
    #: [num_requests]: drafts that the proposer left for the next step.
    num_proposed: np.ndarray
    #: Batch index -> log-probabilities of its tokens in order, of which the first num_sampled count. Only requests that
    #: ask.
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    #: Batch index -> log-probabilities of the prompt tokens behind those of this chunk, and the first one's position.
    prompt_logprobs: dict[int, tuple[int, list[TokenLogprob]]] = field(default_factory=dict)
    #: Durations in seconds; None where they were not measured.
    target_s: float | None = None
    verify_s: float | None = None
    draft_s: float | None = None
    #: Before the step's work, since that of the step before.
    idle_s: float | None = None
