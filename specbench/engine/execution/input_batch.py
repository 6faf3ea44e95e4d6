"""One step's tensors, gathered from the persistent rows through `rows` (batch index -> persistent row).

Belongs here: index maps of a step and the gathers made with them. Does not belong here: anything that outlives a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from specbench.engine.execution.request_state import RequestState
from specbench.engine.layers.to_device import to_device
from specbench.engine.layers.token_pool import read_tokens
from specbench.engine.sampling.sampler import SamplingRows
from specbench.engine.sampling.verification import Windows
from specbench.engine.scheduling.step import DECODE, PARTIAL_CHUNK, SchedulerOutput


@dataclass(frozen=True, slots=True)
class MixedInputs:
    """What the host says of a step of any kind, where a graph reads it. The last request is always one of padding."""

    # [4, num_requests] int64: persistent rows; rows of each in this step, 0 for padding; 1 where these are a chunk of a
    # prompt; 1 where a token is sampled behind them
    packed: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        return self.packed[0]

    @property
    def num_tokens(self) -> torch.Tensor:
        return self.packed[1]

    @property
    def is_chunk(self) -> torch.Tensor:
        return self.packed[2]

    @property
    def samples(self) -> torch.Tensor:
        return self.packed[3]


@dataclass(frozen=True, slots=True)
class StepIndices:
    """Index maps that depend on a step's shape alone: who runs, how many rows each, in which mode. Steps of one shape
    share them."""

    # [num_requests] int64: batch index -> persistent row; the same on the host, without requests of padding
    rows: torch.Tensor
    rows_np: Sequence[int]
    # [num_requests + 1] on the host
    query_start_loc_np: tuple[int, ...]
    # [num_tokens] int64: token row -> persistent row
    persistent_row_of_token: torch.Tensor
    # [num_logits] int64: logits row -> token row (the last row of a final chunk, every row of a decode). None: each, in
    # order
    token_row_of_logits: torch.Tensor | None
    # [num_logits] int64: logits row -> persistent row
    persistent_row_of_logits: torch.Tensor
    # [num_requests, k + 1] int64: verify column -> logits row; any row where a request has fewer. None: the logits rows
    # in order are the columns of the requests in order
    logits_row_of_column: torch.Tensor | None
    # [num_requests] int64: rows that run whatever is accepted; drafts to verify; tokens sampled beyond accepted drafts
    num_certain_rows: torch.Tensor
    num_drafts: torch.Tensor
    samples: torch.Tensor
    num_logits: int
    # [num_requests + 1] on the host: first logits row of each request
    logits_start_loc_np: tuple[int, ...]
    # on the host: whether the request's rows are a chunk of a prompt, and whether that leaves part of the prompt
    is_chunk_np: tuple[bool, ...]
    is_partial_np: tuple[bool, ...]
    # [num_requests] int64: rows that count, of a step padded to a captured shape; 0 for a request of padding. None: all
    num_live: torch.Tensor | None = None

    @property
    def is_live(self) -> torch.Tensor | None:
        """[num_requests] int64: 0 for a request of padding, else 1. None: there is none."""
        return None if self.num_live is None else self.num_certain_rows


@lru_cache(maxsize=256)
def step_indices(
    rows: tuple[int, ...], num_tokens: tuple[int, ...], modes: tuple[int, ...], k: int, device: torch.device
) -> StepIndices:
    """Indices of a step with these persistent rows, row counts and modes, at most k drafts a request."""
    starts = np.concatenate([[0], np.cumsum(num_tokens)])
    token_rows: list[int] = []
    persistent_rows: list[int] = []
    logits_starts = [0]
    columns = np.zeros((len(rows), k + 1), dtype=np.int64)
    for index, (row, count, mode) in enumerate(zip(rows, num_tokens, modes, strict=True)):
        num_logits = {PARTIAL_CHUNK: 0, DECODE: count}.get(mode, 1)
        columns[index, :num_logits] = np.arange(len(token_rows), len(token_rows) + num_logits)
        end = int(starts[index + 1])
        token_rows.extend(range(end - num_logits, end))
        persistent_rows.extend([row] * num_logits)
        logits_starts.append(len(token_rows))
    num_drafts = np.asarray([n - 1 if mode == DECODE else 0 for n, mode in zip(num_tokens, modes, strict=True)])

    is_every_row = token_rows == list(range(int(starts[-1])))
    is_every_column = columns.flatten().tolist() == list(range(columns.size))
    is_partial = np.asarray(modes) == PARTIAL_CHUNK
    on_device = to_device(
        [
            np.asarray(rows),
            np.repeat(rows, num_tokens),
            np.asarray(token_rows),
            np.asarray(persistent_rows),
            columns,
            np.asarray(num_tokens) - num_drafts,
            num_drafts,
            ~is_partial,
        ],
        device,
    )
    return StepIndices(
        rows=on_device[0],
        rows_np=list(rows),
        query_start_loc_np=tuple(int(start) for start in starts),
        persistent_row_of_token=on_device[1],
        token_row_of_logits=None if is_every_row else on_device[2],
        persistent_row_of_logits=on_device[3],
        logits_row_of_column=None if is_every_column else on_device[4],
        num_certain_rows=on_device[5],
        num_drafts=on_device[6],
        samples=on_device[7],
        num_logits=len(token_rows),
        logits_start_loc_np=tuple(logits_starts),
        is_chunk_np=tuple(mode != DECODE for mode in modes),
        is_partial_np=tuple(is_partial.tolist()),
    )


def padded_indices(inputs: torch.Tensor, rows_np: Sequence[int], num_rows: int, k: int) -> StepIndices:
    """Indices of a step of verifications in which every request has `num_rows` rows: k + 1, or 1 where none has drafts.

    inputs: [2, num_requests] int64, persistent row of each request and how many of its rows count; 0 for a request of
    padding. Everything is computed on the device: a graph of it works for other inputs of the same shape.
    """
    rows, num_live = inputs
    num_requests = len(rows)
    starts = tuple(range(0, num_requests * num_rows + 1, num_rows))
    is_live = num_live.clamp_max(1)
    row_of_token = rows.repeat_interleave(num_rows, output_size=num_requests * num_rows)
    columns = None
    if num_rows != k + 1:
        columns = torch.arange(num_requests, device=rows.device)[:, None].expand(-1, k + 1)
    return StepIndices(
        rows=rows,
        rows_np=rows_np,
        query_start_loc_np=starts,
        persistent_row_of_token=row_of_token,
        token_row_of_logits=None,
        persistent_row_of_logits=row_of_token,
        logits_row_of_column=columns,
        num_certain_rows=is_live,
        num_drafts=num_live - is_live,
        samples=is_live,
        num_logits=num_requests * num_rows,
        logits_start_loc_np=starts,
        is_chunk_np=(False,) * num_requests,
        is_partial_np=(False,) * num_requests,
        num_live=num_live,
    )


def mixed_indices(inputs: MixedInputs, num_tokens: int, k: int) -> StepIndices:
    """Indices of a step of any kind with at most `num_tokens` rows, of which the host knows no more than that. Like
    `padded_indices` it works for other inputs, and what only the host would know is empty."""
    num_requests, ends = len(inputs.rows), inputs.num_tokens.cumsum(0)
    starts = ends - inputs.num_tokens
    is_live = inputs.num_tokens.clamp_max(1)
    num_certain_rows = torch.where(inputs.is_chunk > 0, inputs.num_tokens, is_live)
    # [num_requests, k + 1]: a chunk has one column, of its last row; behind a request's last column any row will do
    first_column = starts + num_certain_rows - is_live
    columns = first_column[:, None] + torch.arange(k + 1, device=ends.device)
    columns = torch.minimum(columns, (ends - 1).clamp_min(0)[:, None])
    # Logits of every row, or of every column, whichever are fewer.
    is_every_row = num_tokens <= columns.numel()
    request_of_row = torch.searchsorted(ends, torch.arange(num_tokens, device=ends.device), right=True)
    row_of_token = inputs.rows[request_of_row.clamp_max_(num_requests - 1)]
    return StepIndices(
        rows=inputs.rows,
        rows_np=(),
        query_start_loc_np=(),
        persistent_row_of_token=row_of_token,
        token_row_of_logits=None if is_every_row else columns.flatten(),
        persistent_row_of_logits=row_of_token if is_every_row else inputs.rows.repeat_interleave(k + 1),
        logits_row_of_column=columns if is_every_row else None,
        num_certain_rows=num_certain_rows,
        num_drafts=inputs.num_tokens - num_certain_rows,
        samples=inputs.samples,
        num_logits=num_tokens if is_every_row else columns.numel(),
        logits_start_loc_np=(),
        is_chunk_np=(),
        is_partial_np=(),
    )


@dataclass(frozen=True, slots=True)
class InputBatch:
    """The requests of one step."""

    indices: StepIndices
    # [2, num_requests] int64: committed and computed tokens before this step
    counts: torch.Tensor
    # [num_groups, num_requests, num_columns] int32
    block_tables: torch.Tensor
    # [num_requests] on the host: upper bound of the sequence length, this step's rows included
    max_seq_lens_np: Sequence[int]

    @property
    def num_requests(self) -> int:
        return len(self.indices.rows)

    @property
    def rows(self) -> torch.Tensor:
        return self.indices.rows

    @property
    def num_tokens(self) -> torch.Tensor:
        """[num_requests] int64: committed tokens before this step."""
        return self.counts[0]

    @property
    def first_position(self) -> torch.Tensor:
        """[num_requests] int64: position of each request's first row."""
        return self.counts[1]

    @classmethod
    def gather(cls, output: SchedulerOutput, state: RequestState, k: int) -> InputBatch:
        indices = step_indices(tuple(output.rows), tuple(output.num_tokens), tuple(output.modes), k, state.device)
        return cls.of(indices, state, output.max_seq_lens)

    @classmethod
    def of(cls, indices: StepIndices, state: RequestState, max_seq_lens_np: Sequence[int]) -> InputBatch:
        return cls(indices, *state.of_rows(indices.rows), max_seq_lens_np)

    def token_ids(self, state: RequestState, positions: torch.Tensor) -> torch.Tensor:
        """Input ids of every row, [num_tokens]: committed tokens, then drafts. A missing draft (-1) reads as id 0."""
        return read_tokens(state.token_pool, self.indices.persistent_row_of_token, None, positions)

    def draft_ids(self, state: RequestState, k: int) -> torch.Tensor:
        """The drafts under verification, [num_requests, k]; -1 where there is none."""
        columns = self.num_tokens[:, None] + state.columns[:k]
        return state.token_pool[self.rows[:, None], columns]

    def windows(self, state: RequestState, k: int) -> Windows:
        """The drafts under verification."""
        indices = self.indices
        return Windows(
            rows=self.rows,
            draft_ids=self.draft_ids(state, k),
            num_drafts=indices.num_drafts,
            samples=indices.samples,
            keys=state.sampling.key[self.rows],
            start=self.first_position,
        )

    def by_column(self, of_logits_rows: torch.Tensor, k: int) -> torch.Tensor:
        """[num_logits, ...] -> [num_requests, k + 1, ...]; any row's where a request has fewer."""
        columns = self.indices.logits_row_of_column
        return of_logits_rows.unflatten(0, (-1, k + 1)) if columns is None else of_logits_rows[columns]

    def sampling_rows(self, state: RequestState, positions: torch.Tensor) -> SamplingRows | None:
        """Sampling parameters of the logits rows; None when every request is greedy and asks for nothing."""
        # Rows that pad a window may lie behind the bound.
        width = max(self.max_seq_lens_np) + (0 if self.indices.num_live is None else len(state.columns))
        return state.sampling.rows(
            self.indices.rows_np,
            self.indices.logits_start_loc_np,
            self.indices.persistent_row_of_logits,
            self.sampled_positions(positions),
            state.token_pool[:, :width],
        )

    def sampled_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """[num_logits] int64: of the tokens that the logits rows give. positions: [num_tokens] int64."""
        token_row = self.indices.token_row_of_logits
        return (positions if token_row is None else positions[token_row]) + 1
