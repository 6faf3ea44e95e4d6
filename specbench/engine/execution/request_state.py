"""The truth on the device: one persistent row a request, kept from admission to release.

Belongs here: counts, the token pool, block tables; sampling parameters in an object of their own. Does not belong here:
per-step tensors (input_batch.py), what a proposer remembers (its own buffers).
"""

from __future__ import annotations

import torch

from specbench.engine.config import EngineConfig
from specbench.engine.layers.metadata import num_table_columns
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
        #: First column of the area that drafts of partial chunks are written to and nobody reads.
        self.spill_column = max_model_len + k + 1
        # [max_num_seqs, max_model_len + 2k + 2] int64: committed tokens, then drafts (-1: none)
        self.token_pool = torch.zeros(max_num_seqs, self.spill_column + k + 1, dtype=torch.int64, device=device)
        # [2, max_num_seqs] int64: committed tokens, and those of them whose caches are written
        self.counts = torch.zeros(2, max_num_seqs, dtype=torch.int64, device=device)
        # [k + 1] int64: 0 .. k
        self.columns = torch.arange(k + 1, device=device)
        self.sampling = SamplingState(max_num_seqs, vocab_size, device)
        # [num_groups, max_num_seqs, num_columns] int32: column 0 is the null block, logical block j is column j + 1
        num_columns = num_table_columns(self.spill_column, block_size)
        self.block_tables = torch.zeros(num_groups, max_num_seqs, num_columns, dtype=torch.int32, device=device)

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
        for request in output.new_requests:
            self._add(request)
        for blocks in output.new_blocks:
            self._append(blocks)

    def _add(self, request: NewRequest) -> None:
        row = request.row
        num_tokens = len(request.token_ids)
        self.token_pool[row, :num_tokens] = torch.tensor(request.token_ids, dtype=torch.int64)
        # Drafts of an earlier occupant must not be taken for this request's.
        self.token_pool[row, num_tokens:] = -1
        self.block_tables[:, row] = 0
        self.counts[0, row] = num_tokens
        self.counts[1, row] = request.num_computed_tokens
        self.sampling.add(row, request.sampling)

    def _append(self, blocks: NewBlocks) -> None:
        first_column = blocks.start + 1
        columns = slice(first_column, first_column + len(blocks.block_ids))
        self.block_tables[blocks.group, blocks.row, columns] = torch.tensor(blocks.block_ids, dtype=torch.int32)

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
