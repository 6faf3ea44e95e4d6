"""One step's tensors, gathered from the persistent rows through `rows` (batch index -> persistent row).

Belongs here: index maps of a step and the gathers made with them. Does not belong here: anything that outlives a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from specbench.engine.execution.request_state import RequestState
from specbench.engine.sampling.sampler import SamplingRows
from specbench.engine.scheduling.step import DECODE, PARTIAL_CHUNK, SchedulerOutput


@dataclass(frozen=True, slots=True)
class StepIndices:
    """Index maps that depend on the step's shape alone, so that steps of one shape share them."""

    # [num_requests + 1] on the host
    query_start_loc_np: tuple[int, ...]
    # [num_tokens] int64: token row -> batch index
    request_of_row: torch.Tensor
    # [num_logits] int64: logits row -> token row (the last row of a final chunk, every row of a decode)
    token_row_of_logits: torch.Tensor
    # [num_logits] int64: logits row -> batch index
    request_of_logits: torch.Tensor
    # [num_requests, k + 1] int64: verify column -> logits row; any row where a request has fewer
    logits_row_of_column: torch.Tensor
    # [num_requests] int64: rows as laid out; drafts to verify; tokens sampled beyond accepted drafts (0 or 1)
    num_rows: torch.Tensor
    num_drafts: torch.Tensor
    samples: torch.Tensor


@lru_cache(maxsize=256)
def step_indices(num_tokens: tuple[int, ...], modes: tuple[int, ...], k: int, device: torch.device) -> StepIndices:
    """Indices of a step with these row counts and modes, at most k drafts a request."""
    starts = np.concatenate([[0], np.cumsum(num_tokens)])
    token_rows: list[int] = []
    requests: list[int] = []
    columns = np.zeros((len(num_tokens), k + 1), dtype=np.int64)
    for index, (count, mode) in enumerate(zip(num_tokens, modes, strict=True)):
        num_logits = {PARTIAL_CHUNK: 0, DECODE: count}.get(mode, 1)
        columns[index, :num_logits] = np.arange(len(token_rows), len(token_rows) + num_logits)
        end = int(starts[index + 1])
        token_rows.extend(range(end - num_logits, end))
        requests.extend([index] * num_logits)

    def to_device(values: object) -> torch.Tensor:
        return torch.tensor(np.asarray(values, dtype=np.int64), device=device)

    return StepIndices(
        query_start_loc_np=tuple(int(start) for start in starts),
        request_of_row=to_device(np.repeat(np.arange(len(num_tokens)), num_tokens)),
        token_row_of_logits=to_device(token_rows),
        request_of_logits=to_device(requests),
        logits_row_of_column=to_device(columns),
        num_rows=to_device(num_tokens),
        num_drafts=to_device([n - 1 if mode == DECODE else 0 for n, mode in zip(num_tokens, modes, strict=True)]),
        samples=to_device([mode != PARTIAL_CHUNK for mode in modes]),
    )


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The requests of one step."""

    indices: StepIndices
    # [num_requests] int64: batch index -> persistent row
    rows: torch.Tensor
    # [num_requests] int64: position of each request's first row
    first_position: torch.Tensor
    # [num_requests] int64: committed tokens before this step
    num_tokens: torch.Tensor
    # [num_groups, num_requests, num_columns] int32
    block_tables: torch.Tensor

    @classmethod
    def gather(cls, output: SchedulerOutput, state: RequestState, k: int) -> InputBatch:
        rows = torch.tensor(output.rows, dtype=torch.int64).to(state.device, non_blocking=True)
        return cls(
            indices=step_indices(tuple(output.num_tokens), tuple(output.modes), k, state.device),
            rows=rows,
            first_position=state.num_computed[rows],
            num_tokens=state.num_tokens[rows],
            block_tables=state.block_tables[:, rows],
        )

    def token_ids(self, state: RequestState, positions: torch.Tensor) -> torch.Tensor:
        """Input ids of every row, [num_tokens]: committed tokens, then drafts. A missing draft (-1) reads as id 0."""
        return state.token_pool[self.rows[self.indices.request_of_row], positions].clamp_min(0)

    def draft_ids(self, state: RequestState, k: int) -> torch.Tensor:
        """The drafts under verification, [num_requests, k]; -1 where there is none."""
        columns = self.num_tokens[:, None] + torch.arange(k, device=state.device)
        return state.token_pool[self.rows[:, None], columns]

    def sampling_rows(self, state: RequestState, output: SchedulerOutput, positions: torch.Tensor) -> SamplingRows | None:
        """Sampling parameters of the logits rows; None when every request of the batch is greedy."""
        rows_np = np.asarray(output.rows)
        if not state.is_sampled_np[rows_np].any():
            return None
        rows = self.rows[self.indices.request_of_logits]
        return SamplingRows(
            temperature=state.temperature[rows],
            top_k=state.top_k[rows],
            top_p=state.top_p[rows],
            keys=state.key[rows],
            positions=positions[self.indices.token_row_of_logits] + 1,
            any_top_k=bool(state.has_top_k_np[rows_np].any()),
            any_top_p=bool(state.has_top_p_np[rows_np].any()),
        )
