"""Single-module MTP: one module drafts k tokens by running again on its own drafts, positions advancing.

A first pass covers the target's rows: row p takes token x_(p+1) and the target's hidden at p, and the last row P gives
draft 0, a guess for x_(P+2). Then k - 1 passes of one row a request: row P+i takes draft i-1 and the module's own
hidden at P+i-1, and gives draft i. These rows lie past the newest computed token, in slots that the first pass of a
later step writes again once the target has been there: an accepted draft's entry is always recomputed from the target's
hidden before anything committed is built on it, so no entry is ever stale and nothing is remembered between steps.

Belongs here: the order of passes. Does not belong here: the module's layers (models/), what single and multi share
(mtp_modules.py).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.layers.metadata import AttentionMetadata, DeviceLayout, RowLayout
from specbench.engine.models.registry import module_cache_groups, module_weight_bytes
from specbench.engine.models.target import TargetModel
from specbench.engine.proposers.mtp_modules import DraftModules
from specbench.engine.proposers.proposer import DraftBatch, MixedRows, ProposerRequirements
from specbench.engine.proposers.row_indices import row_indices

#: A checkpoint with several modules drafts with its first.
MODULE = 0


class SingleModuleMTP:
    """The proposer."""

    is_capturable = True
    is_capturable_mixed = True
    encodes_content = False

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.config = config
        self.checkpoint = checkpoint
        self.k = config.num_speculative_tokens

    def requirements(self) -> ProposerRequirements:
        specs, _ = module_cache_groups(self.checkpoint, self.config.dtype, num_modules=1, shard=self.config.shard)
        return ProposerRequirements(
            num_speculative_tokens=self.k,
            cache_groups=tuple(replace(spec, num_draft_slots=self.k - 1) for spec in specs),
            num_prompt_lookahead=1,
            fixed_bytes=0,
            weight_bytes=module_weight_bytes(self.checkpoint, self.config.dtype, 1, self.config.shard),
        )

    def load(self, target: TargetModel) -> None:
        self.device = target.device
        self.modules = DraftModules(self.config, self.checkpoint, target, num_modules=1)

    def propose(self, batch: DraftBatch) -> None:
        hidden = self._follow(batch) if batch.mixed is None else self._follow_mixed(batch, batch.mixed)
        if not batch.is_read:
            return
        self.modules.draft(0, batch, hidden)
        num_requests = len(batch.rows)
        single_rows = tuple(range(num_requests + 1))
        newest = batch.first_position + batch.num_valid - 1
        for index in range(1, self.k):
            position = newest + index
            max_seq_lens = [bound + index for bound in batch.max_seq_lens_np]
            metadata = self.modules.metadata_builder.build(
                batch.block_tables, RowLayout(single_rows, position, batch.is_live, max_seq_lens)
            )
            requests = row_indices(single_rows, self.device).request_of_row
            hidden, _ = self.modules.run(MODULE, batch, requests, metadata, hidden, lookahead=1)
            self.modules.draft(index, batch, hidden)

    def _follow(self, batch: DraftBatch) -> Tensor:
        """The first pass: the module's hidden at each request's last valid row, [num_requests, hidden]."""
        indices = row_indices(batch.query_start_loc_np, self.device)
        layout = RowLayout(batch.query_start_loc_np, batch.first_position, batch.num_valid, batch.max_seq_lens_np)
        metadata = self.modules.metadata_builder.build(batch.block_tables, layout)
        last_rows = indices.query_start + batch.num_valid - 1
        return self._run_rows(batch, indices.request_of_row, metadata, last_rows)

    def _follow_mixed(self, batch: DraftBatch, rows: MixedRows) -> Tensor:
        """The same where the device alone knows how many rows each request has."""
        layout = DeviceLayout.of(
            rows.num_target_rows, batch.first_position, rows.num_rows, max(batch.max_seq_lens_np), batch.num_valid
        )
        metadata = self.modules.metadata_builder.build_on_device(batch.block_tables, layout)
        last_rows = (rows.target_start + batch.num_valid - 1).clamp_min_(0)
        return self._run_rows(batch, layout.request_of_row, metadata, last_rows)

    def _run_rows(
        self, batch: DraftBatch, request_of_row: Tensor, metadata: AttentionMetadata, last_rows: Tensor
    ) -> Tensor:
        _, hidden = self.modules.run(
            MODULE, batch, request_of_row, metadata, batch.hidden_states, lookahead=1, last_rows=last_rows
        )
        return hidden

    def release(self, rows: list[int]) -> None:
        """Nothing was kept."""
