"""Log-probabilities of one step, for the requests that ask: which rows are theirs, and how much is made at once.

Belongs here: rows and chunks; what is copied to the host, to be read when the step has settled. Does not belong here:
what a log-probability is (sampling/logprobs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specbench.engine.execution.input_batch import InputBatch
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.to_host import copy_to_host
from specbench.engine.layers.to_device import to_device
from specbench.engine.models.target import TargetModel
from specbench.engine.sampling.logprobs import LogprobTensors
from specbench.engine.scheduling.step import DECODE, SchedulerOutput
from specbench.generate import TokenLogprob

#: Logits of prompt rows that are made at once (128 MiB in fp32): a long prompt has more than memory does.
_MAX_PROMPT_LOGITS = 1 << 25


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of some requests' tokens on their way to the host."""

    #: Batch indices.
    requests: Sequence[int]
    #: How many of the likeliest ids each of them wants.
    num_top: Sequence[int]
    num_columns: int
    # [num_requests * num_columns, ...] on the host
    tensors: LogprobTensors

    def read(self) -> dict[int, list[TokenLogprob]]:
        """Batch index -> one for each column; those behind the emitted tokens mean nothing."""
        rows = self.tensors.read([count for count in self.num_top for _ in range(self.num_columns)])
        return {
            request: rows[place * self.num_columns : (place + 1) * self.num_columns]
            for place, request in enumerate(self.requests)
        }


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logits of every column of some requests' windows, kept until it is known which tokens are emitted."""

    #: Batch indices, on the host and as [num_requests] int64.
    requests: list[int]
    request_indices: torch.Tensor
    num_top: list[int]
    # [num_requests * (k + 1), vocab] fp32
    logits: torch.Tensor

    @classmethod
    def keep(
        cls,
        logits: torch.Tensor,
        batch: InputBatch,
        state: RequestState,
        k: int,
        *,
        is_processed: bool,
    ) -> LogprobRows | None:
        """Rows of the requests that want logprobs of this kind; None where there are none. They are copied: passes
        change logits in place."""
        wanted, processed = state.sampling.num_logprobs_np, state.sampling.has_processed_logprobs_np
        requests = [
            index
            for index, row in enumerate(batch.indices.rows_np)
            if wanted[row] >= 0 and processed[row] == is_processed and not batch.indices.is_partial_np[index]
        ]
        if not requests:
            return None
        (request_indices,) = to_device([np.asarray(requests)], logits.device)
        rows = batch.by_column(torch.arange(len(logits), device=logits.device), k)[request_indices]
        num_top = [int(wanted[batch.indices.rows_np[index]]) for index in requests]
        return cls(requests, request_indices, num_top, logits[rows.flatten()])

    def of_tokens(self, token_ids: torch.Tensor) -> TokenLogprobs:
        """token_ids: [num_requests, k + 1] of all requests, in batch order."""
        own = token_ids[self.request_indices].clamp_min(0).flatten()
        tensors = LogprobTensors.gather(self.logits, own, max(self.num_top))
        return TokenLogprobs(self.requests, self.num_top, token_ids.shape[1], tensors.map(copy_to_host))


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a request's next prompt tokens on their way to the host."""

    #: Position of the first of them.
    first: int
    num_top: int
    #: On the host, chunk by chunk.
    chunks: Sequence[LogprobTensors]

    def read(self) -> tuple[int, list[TokenLogprob]]:
        rows: list[TokenLogprob] = []
        for tensors in self.chunks:
            rows += tensors.read([self.num_top] * len(tensors.token_ids))
        return self.first, rows


def prompt_logprobs(
    model: TargetModel, state: RequestState, output: SchedulerOutput, batch: InputBatch, hidden_states: torch.Tensor
) -> dict[int, PromptLogprobs]:
    """Batch index -> what this chunk's rows make of the prompt tokens that they predict. hidden_states:
    [num_tokens, hidden], after the final norm."""
    found = {}
    for index, row in enumerate(output.rows):
        num_top = int(state.sampling.num_prompt_logprobs_np[row])
        if num_top < 0 or output.modes[index] == DECODE:
            continue
        # While a prompt is being computed its upper bounds are exact.
        first = output.max_seq_lens[index] - output.num_tokens[index] + 1
        count = min(output.num_tokens[index], int(state.sampling.num_prompt_tokens_np[row]) - first)
        if count > 0:
            start = batch.indices.query_start_loc_np[index]
            token_ids = state.token_pool[row, first : first + count]
            chunks = _in_chunks(model, hidden_states[start : start + count], token_ids, num_top)
            found[index] = PromptLogprobs(first, num_top, chunks)
    return found


def _in_chunks(
    model: TargetModel, hidden_states: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> list[LogprobTensors]:
    size = max(1, _MAX_PROMPT_LOGITS // model.vocab_size)
    return [
        LogprobTensors.gather(model.compute_logits(hidden), ids, num_top).map(copy_to_host)
        for hidden, ids in zip(hidden_states.split(size), token_ids.split(size), strict=True)
    ]
