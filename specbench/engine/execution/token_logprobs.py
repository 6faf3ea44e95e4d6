"""Log-probabilities of one step, for the requests that ask: which rows are theirs, and how much is made at once.

Belongs here: rows and chunks. Does not belong here: what a log-probability is (sampling/logprobs.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.engine.execution.input_batch import InputBatch
from specbench.engine.execution.request_state import RequestState
from specbench.engine.models.target import TargetModel
from specbench.engine.sampling.logprobs import LogprobTensors
from specbench.engine.sampling.verification import Verdict
from specbench.engine.scheduling.step import DECODE, PARTIAL_CHUNK, SchedulerOutput
from specbench.generate import TokenLogprob

#: Logits of prompt rows that are made at once (128 MiB in fp32): a long prompt has more than memory does.
_MAX_PROMPT_LOGITS = 1 << 25


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Logits of every column of some requests' windows, kept until it is known which tokens are emitted."""

    #: Batch indices.
    requests: list[int]
    #: How many of the likeliest ids each of them wants.
    num_top: list[int]
    # [num_requests * (k + 1), vocab] fp32
    logits: torch.Tensor

    @classmethod
    def keep(
        cls,
        logits: torch.Tensor,
        output: SchedulerOutput,
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
            for index, row in enumerate(output.rows)
            if wanted[row] >= 0 and processed[row] == is_processed and output.modes[index] != PARTIAL_CHUNK
        ]
        if not requests:
            return None
        rows = batch.by_column(torch.arange(len(logits), device=logits.device), k)[requests]
        return cls(requests, [int(wanted[output.rows[index]]) for index in requests], logits[rows.flatten()])

    def of_tokens(self, verdict: Verdict) -> dict[int, list[TokenLogprob]]:
        """Batch index -> one for each column; those behind the emitted tokens mean nothing."""
        num_columns = verdict.token_ids.shape[1]
        token_ids = verdict.token_ids[self.requests].clamp_min(0).flatten()
        tensors = LogprobTensors.gather(self.logits, token_ids, max(self.num_top))
        rows = tensors.to_host([count for count in self.num_top for _ in range(num_columns)])
        return {
            request: rows[place * num_columns : (place + 1) * num_columns]
            for place, request in enumerate(self.requests)
        }


def prompt_logprobs(
    model: TargetModel, state: RequestState, output: SchedulerOutput, batch: InputBatch, hidden_states: torch.Tensor
) -> dict[int, tuple[int, list[TokenLogprob]]]:
    """Batch index -> position of the first prompt token that this chunk's rows predict, and what they make of it and
    those behind it. hidden_states: [num_tokens, hidden], after the final norm."""
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
            found[index] = (first, _in_chunks(model, hidden_states[start : start + count], token_ids, num_top))
    return found


def _in_chunks(
    model: TargetModel, hidden_states: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> list[TokenLogprob]:
    size = max(1, _MAX_PROMPT_LOGITS // model.vocab_size)
    rows: list[TokenLogprob] = []
    for hidden, ids in zip(hidden_states.split(size), token_ids.split(size), strict=True):
        rows += LogprobTensors.gather(model.compute_logits(hidden), ids, num_top).to_host([num_top] * len(ids))
    return rows
