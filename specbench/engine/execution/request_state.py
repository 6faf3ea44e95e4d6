"""The truth on the device: one persistent row a request, kept from admission to release.

Belongs here: counts, the token pool, block tables; sampling parameters in an object of their own. Does not belong here:
per-step tensors (input_batch.py), what a proposer remembers (its own buffers).

The row past the last is the scratch row: requests that only pad a step to a captured size have it. Its counts stay 0,
its blocks are the null block, and nothing that is written to it is read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specbench.engine.config import EngineConfig
from specbench.engine.layers import fusion
from specbench.engine.layers.metadata import num_table_columns
from specbench.engine.layers.to_device import to_device
from specbench.engine.sampling.sampling_state import SamplingState
from specbench.engine.scheduling.step import NewBlocks, NewRequest, SchedulerOutput


class RequestState:
    """Rows of running requests. `apply` takes over what the scheduler said; `commit` moves the counts."""

    def __init__(
        self,
        num_groups: int,
        max_num_seqs: int,
        max_model_len: int,
        num_speculative_tokens: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
    ):
        k = num_speculative_tokens
        self.device = device
        self.scratch_row = max_num_seqs
        num_rows = max_num_seqs + 1
        #: First column of the area that drafts of partial chunks are written to and nobody reads.
        self.spill_column = max_model_len + k + 1
        # [num_rows, max_model_len + 2k + 2] int64: committed tokens, then drafts (-1: none)
        self.token_pool = torch.zeros(num_rows, self.spill_column + k + 1, dtype=torch.int64, device=device)
        # [2, num_rows] int64: committed tokens, and those of them whose caches are written
        self.counts = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        # [k + 1] int64: 0 .. k
        self.columns = torch.arange(k + 1, device=device)
        self.sampling = SamplingState(num_rows, vocab_size, device)
        # [num_groups, num_rows, num_columns] int32: column 0 is the null block, logical block j is column j + 1
        num_columns = num_table_columns(self.spill_column, block_size)
        self.block_tables = torch.zeros(num_groups, num_rows, num_columns, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, config: EngineConfig, num_groups: int, vocab_size: int, device: torch.device) -> RequestState:
        """The rows of an engine; on the "meta" device, only their sizes."""
        return cls(
            num_groups=num_groups,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_speculative_tokens=config.num_speculative_tokens,
            block_size=config.block_size,
            vocab_size=vocab_size,
            device=device,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all its tensors."""
        own = sum(value.nbytes for value in vars(self).values() if isinstance(value, torch.Tensor))
        return own + self.sampling.num_bytes

    def apply(self, output: SchedulerOutput) -> None:
        """New requests, then new blocks: what the host says of a step goes over in one copy."""
        if output.new_requests:
            self._add(output.new_requests)
        if output.new_blocks:
            self._append(output.new_blocks)

    def _add(self, requests: Sequence[NewRequest]) -> None:
        width = self.token_pool.shape[1]
        places = [request.row * width + np.arange(len(request.token_ids)) for request in requests]
        rows, counts, where, token_ids = to_device(
            [
                np.asarray([request.row for request in requests]),
                np.asarray([[len(one.token_ids) for one in requests], [one.num_computed_tokens for one in requests]]),
                np.concatenate(places),
                np.concatenate([request.token_ids for request in requests]),
            ],
            self.device,
        )
        # Drafts of an earlier occupant must not be taken for this request's.
        self.token_pool.index_fill_(0, rows, -1)
        self.token_pool.view(-1).index_copy_(0, where, token_ids)
        self.block_tables.index_fill_(1, rows, 0)
        self.counts.index_copy_(1, rows, counts)
        self.sampling.add([request.row for request in requests], [request.sampling for request in requests])

    def _append(self, added: Sequence[NewBlocks]) -> None:
        _, num_rows, num_columns = self.block_tables.shape
        places: list[int] = []
        block_ids: list[int] = []
        for blocks in added:
            first = (blocks.group * num_rows + blocks.row) * num_columns + blocks.start + 1
            places += range(first, first + len(blocks.block_ids))
            block_ids += blocks.block_ids
        ((where, ids),) = to_device([np.asarray([places, block_ids])], self.device)
        self.block_tables.view(-1).index_copy_(0, where, ids.int())

    def of_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts [2, num_requests] and block tables [num_groups, num_requests, num_columns] of persistent rows."""
        if fusion.is_fused(rows):
            from specbench.engine.kernels.step_preparation import gather_requests

            return gather_requests(rows, self.counts, self.block_tables)
        return self.counts.index_select(1, rows), self.block_tables.index_select(1, rows)

    def commit(
        self, rows: torch.Tensor, token_ids: torch.Tensor, old_num_tokens: torch.Tensor, counts: torch.Tensor
    ) -> None:
        """Append verified tokens and move the counts.

        rows, old_num_tokens: [num_requests], persistent rows and their committed tokens so far. token_ids:
        [num_requests, k + 1]; those beyond the new count land behind it, where nothing is read before the proposer has
        written its k drafts there. counts: [2, num_requests], committed and computed tokens from now on.
        """
        self.token_pool[rows[:, None], old_num_tokens[:, None] + self.columns] = token_ids
        self.counts.index_copy_(1, rows, counts)
