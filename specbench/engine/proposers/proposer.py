"""The proposer contract: who drafts the tokens that the target verifies.

Belongs here: the methods, their one argument object, and capabilities as data. Does not belong here: any
proposer. The runner and the scheduler read what a proposer declares and never ask what it is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.layers import fusion
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.features import StepFeatures
from specbench.engine.models.target import LogitsModel, TargetModel
from specbench.engine.sampling.drafting import DraftSampling
from specbench.engine.sampling.sampler import greedy_ids

if TYPE_CHECKING:
    from specbench.engine.kernels.drafts import OpenDraft


@dataclass(frozen=True, slots=True)
class ProposerRequirements:
    """What a proposer needs of scheduling, caches and memory."""

    #: k: drafts a step.
    num_speculative_tokens: int
    cache_groups: tuple[CacheGroupSpec, ...]
    #: Prompt tokens beyond its own position that a row reads. A prompt chunk never leaves 1 .. this - 1 tokens.
    num_prompt_lookahead: int
    #: Bytes of persistent buffers outside the caches.
    fixed_bytes: int
    #: Bytes of the proposer's own weights.
    weight_bytes: int = 0
    #: Rows of drafting's first pass behind a verification, where they are not the verification's.
    num_draft_rows: int = 0
    #: Rows that it runs more than the target behind the last chunk of a prompt.
    num_rows_behind_chunk: int = 0


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request that took over a persistent row in this step, as the host knows it."""

    row: int
    #: Prompt, and on resumption the tokens generated before.
    token_ids: Sequence[int]
    #: The random stream's 64-bit key.
    key: int


@dataclass(frozen=True, slots=True)
class MixedRows:
    """The rows of a recorded step with chunks of prompts, whose counts the device alone knows."""

    #: Rows that a pass over all requests lays out, those that are left over at its end.
    num_rows: int
    # [num_requests] int64: rows of each request in the target's layout, where they follow each other
    num_target_rows: torch.Tensor
    # [num_requests] bool: a chunk of a prompt rather than a verification
    is_chunk: torch.Tensor
    # [num_requests] int64: 1 where the step sampled a token behind the request's rows
    samples: torch.Tensor

    @property
    def target_start(self) -> torch.Tensor:
        """[num_requests] int64: first row of each request in the target's layout."""
        return self.num_target_rows.cumsum(0) - self.num_target_rows


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """One verified and committed step, as a proposer sees it. Tensors over requests are in batch order.

    A request's committed tokens and, behind them, its drafts are one row of the token pool.
    """

    # [num_requests] int64: persistent rows; the same on the host, empty while a graph is recorded
    rows: torch.Tensor
    rows_np: Sequence[int]
    #: None where the host knows how many rows each request has, as below; else these fields are empty, and the last
    #: request is one of padding.
    mixed: MixedRows | None
    # [num_requests + 1]: rows of the target's layout, on the host
    query_start_loc_np: tuple[int, ...]
    # [num_requests] int64: position of each request's first row
    first_position: torch.Tensor
    # [num_requests] int64: rows that survived verification
    num_valid: torch.Tensor
    # [num_requests] int64: 0 for a request that only pads the batch, which has no valid row, else 1. None: none does
    is_live: torch.Tensor | None
    # [num_requests] int64: accepted drafts of the verification just done; 0 for chunks
    num_accepted: torch.Tensor
    # on the host, by request: whether its rows are a chunk of a prompt rather than a verification, and whether that
    # leaves part of the prompt, so that nobody reads its drafts
    is_chunk_np: tuple[bool, ...]
    is_partial_np: tuple[bool, ...]
    # on the host, by request: upper bound of the sequence length, this step's rows included
    max_seq_lens_np: Sequence[int]
    # [num_tokens, hidden]: the target's hidden after its final norm, every row
    hidden_states: torch.Tensor
    # [num_tokens, hidden]: the same before the final norm
    residual: torch.Tensor
    # [max_num_seqs, width] int64
    token_pool: torch.Tensor
    # [num_requests] int64: pool column of each request's first draft; a column that nobody reads for a partial chunk
    draft_columns: torch.Tensor
    # [num_draft_groups, num_requests, num_columns] int32: this batch's block tables of the proposer's own groups
    block_tables: torch.Tensor
    # group name -> cache: the proposer's own groups among them
    caches: Mapping[str, CachePool]
    #: What placeholders of audio and images stand for; None where no row of this pass reads one.
    features: StepFeatures | None
    # requests that are new to their row, whether or not they have rows in this step
    admitted: Sequence[AdmittedRequest]
    #: How drafts are drawn; None where each is the argmax.
    sampling: DraftSampling | None

    @property
    def is_read(self) -> bool:
        """Whether anybody reads a draft of this batch, as far as the host knows."""
        return self.mixed is not None or not all(self.is_partial_np)

    def sample_draft(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """Choose draft `index` of every request from fp32 logits [num_requests, vocab], write it and return it,
        [num_requests] int64: the argmax (ties: lowest id), or a draw whose probabilities verification will find."""
        token_ids = greedy_ids(logits) if self.sampling is None else self.sampling.draw(index, logits)
        self.write_draft(index, token_ids)
        return token_ids

    def sample_draft_from(self, index: int, model: LogitsModel, hidden: torch.Tensor) -> torch.Tensor:
        """The same from what the model's head makes of hidden states [num_requests, hidden]. Where ranks share the
        vocabulary, an argmax gathers no logits."""
        if self.sampling is None and model.vocabulary.is_whole and fusion.is_fused(hidden):
            from specbench.engine.kernels.drafts import close_draft

            return close_draft(self.open_draft(index, model, hidden), self.token_pool, self.rows)
        if self.sampling is not None or model.vocabulary.is_whole:
            return self.sample_draft(index, model.compute_logits(hidden))
        if fusion.is_fused(hidden):
            token_ids = model.vocabulary.ids_of_bests(model.compute_bests(hidden))
        else:
            token_ids = model.vocabulary.argmax(model.compute_own_logits(hidden))
        self.write_draft(index, token_ids)
        return token_ids

    def open_draft(self, index: int, model: LogitsModel, hidden: torch.Tensor) -> OpenDraft:
        """On a GPU: what an argmax leaves to be done, by `close_draft` or by who reads the pool (PoolTokens)."""
        from specbench.engine.kernels.drafts import OpenDraft

        return OpenDraft(model.compute_bests(hidden), model.vocabulary.size, self.draft_columns, index)

    def write_draft(self, index: int, token_ids: torch.Tensor) -> None:
        """Leave draft `index` of every request ([num_requests] int64; -1: none) behind its committed tokens."""
        if fusion.is_fused(token_ids):
            from specbench.engine.kernels.drafts import store_draft

            store_draft(self.token_pool, self.rows, self.draft_columns, index, token_ids)
        else:
            self.token_pool[self.rows, self.draft_columns + index] = token_ids

    def write_drafts(self, token_ids: torch.Tensor) -> None:
        """Leave all k drafts of every request at once: [num_requests, k] int64. Those behind a -1 are not read."""
        columns = torch.arange(token_ids.shape[1], device=token_ids.device)
        self.token_pool[self.rows[:, None], self.draft_columns[:, None] + columns] = token_ids


class Proposer(Protocol):
    """Methods in the order of time."""

    #: Whether drafting behind a verification depends on the batch's shape and tensors alone, with nothing asked of the
    #: host and nothing waited for: then it can be recorded once and replayed.
    is_capturable: bool
    #: Whether the same holds behind steps with chunks of prompts, where `DraftBatch.mixed` says which rows there are.
    is_capturable_mixed: bool
    #: Whether drafting makes features of its own of a step's audio and images, which no graph holds.
    encodes_content: bool

    def requirements(self) -> ProposerRequirements:
        """Known before anything is loaded or allocated."""
        ...

    def load(self, target: TargetModel) -> None:
        """Read weights and allocate buffers."""
        ...

    def propose(self, batch: DraftBatch) -> None:
        """Write k drafts a request by `batch.write_draft`, -1 from the first that is missing on. Called every step,
        partial chunks included."""
        ...

    def release(self, rows: list[int]) -> None:
        """The requests of these persistent rows have left."""
        ...
