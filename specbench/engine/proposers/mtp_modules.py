"""What both MTP proposers share: a module's rows run over a pass, and a draft chosen from the hidden it leaves.

Belongs here: from pool columns to embeddings, to a module's hidden, to a draft. Does not belong here: which rows a pass
has, which module runs next and what hidden it gets: there the two proposers have nothing in common.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.kernels.step_rows import PoolTokens
from specbench.engine.layers import fusion
from specbench.engine.layers.metadata import AttentionMetadata
from specbench.engine.layers.metadata_builder import AttentionMetadataBuilder
from specbench.engine.layers.token_pool import read_tokens
from specbench.engine.models.registry import build_modules
from specbench.engine.models.target import MTPModules, TargetModel
from specbench.engine.proposers.proposer import DraftBatch

if TYPE_CHECKING:
    from specbench.engine.kernels.drafts import OpenDraft


class DraftModules:
    """The first `num_modules` MTP modules of the target's checkpoint."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, target: TargetModel, num_modules: int):
        self.modules: MTPModules = build_modules(checkpoint, target, num_modules, config.faults)
        self.metadata_builder = AttentionMetadataBuilder(
            self.modules.cache_groups(),
            config.block_size,
            self.modules.relative_extents,
            target.device,
            target.attention.needs_segments,
        )
        self._is_deaf = "deaf_modules" in config.faults
        self._is_raw = "raw_embedding" in config.faults
        self._embed = target.embed_raw if self._is_raw else target.embed

    def run(
        self,
        module: int,
        batch: DraftBatch,
        request_of_row: Tensor,
        metadata: AttentionMetadata,
        hidden: Tensor,
        lookahead: int,
        last_rows: Tensor | None = None,
        draft: OpenDraft | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The module over one pass: hidden [num_rows, hidden] -> [num_rows, hidden], and its rows last_rows
        [num_requests], one of each (None: all). draft: what `open_draft` left of the module before.

        Row p takes the token at p + lookahead of its request's pool: committed tokens, then drafts; where that is a
        placeholder of audio or an image, its feature.
        """
        if self._takes_tokens(batch, metadata, hidden):
            tokens = PoolTokens(batch.token_pool, batch.rows, request_of_row, metadata.positions, lookahead, draft)
            return self.modules.forward_module_on_tokens(module, tokens, hidden, metadata, batch.caches, last_rows)
        assert draft is None
        token_ids = read_tokens(batch.token_pool, batch.rows, request_of_row, metadata.positions, lookahead)
        embeds = self._embed(token_ids)
        if batch.features is not None and not self._is_deaf:
            embeds = batch.features.merge(embeds, request_of_row, metadata.positions + lookahead)
        output = self.modules.forward_module(module, embeds, hidden, metadata, batch.caches)
        return output, output if last_rows is None else output[last_rows]

    def _takes_tokens(self, batch: DraftBatch, metadata: AttentionMetadata, hidden: Tensor) -> bool:
        """Whether a module reads the pool by itself, in steps that are all alike."""
        vocabulary = self.modules.vocabulary
        has_table = vocabulary.is_whole or vocabulary.own_ids(len(hidden), hidden) is not None
        is_plain = batch.features is None and not self._is_raw and has_table
        is_uniform = metadata.paged.step_rows.is_uniform(metadata.num_tokens)
        return is_plain and is_uniform and fusion.is_fused(batch.token_pool)

    def draft(self, index: int, batch: DraftBatch, hidden: Tensor) -> None:
        """Choose draft `index` of every request from a module's hidden at its last row, [num_requests, hidden]."""
        batch.sample_draft_from(index, self.modules, hidden)

    def open_draft(
        self, index: int, batch: DraftBatch, metadata: AttentionMetadata, hidden: Tensor
    ) -> OpenDraft | None:
        """The same, but for what the next module's pass does by the way, or `close_draft`. None: there is nothing."""
        is_whole = self.modules.vocabulary.is_whole
        if batch.sampling is not None or not is_whole or not self._takes_tokens(batch, metadata, hidden):
            self.draft(index, batch, hidden)
            return None
        return batch.open_draft(index, self.modules, hidden)

    def close_draft(self, batch: DraftBatch, draft: OpenDraft | None) -> None:
        """Leave it behind the committed tokens."""
        if draft is not None:
            from specbench.engine.kernels.drafts import close_draft

            close_draft(draft, batch.token_pool, batch.rows)
