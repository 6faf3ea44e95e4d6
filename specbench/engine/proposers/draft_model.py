"""A draft model: a second checkpoint of the same vocabulary continues the text by itself.

It keeps keys and values of its own, in cache groups of its own, for the same tokens at the same positions. A chunk of a
prompt goes through it as it goes through the target. A verification is followed by a pass over the tokens that its
caches lack, then by k - 1 passes of one row: row T-1+i takes token T-1+i (the newest committed one, then drafts) and
gives draft i.

How many tokens its caches hold follows from the step alone, so nothing is remembered that could go stale: behind T
committed tokens the passes of the step before left entries for T + k - 1, of which the accepted drafts' are good. After
A < k of k drafts were accepted the newest token alone is missing; after all k the last draft, which was never fed, too.

Belongs here: its passes, and which drafts fit which target. Does not belong here: its layers (models/), sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.features import StepFeatures
from specbench.engine.layers.metadata import AttentionMetadata, DeviceLayout, RowLayout
from specbench.engine.layers.metadata_builder import AttentionMetadataBuilder
from specbench.engine.layers.to_device import to_device
from specbench.engine.layers.token_pool import read_tokens
from specbench.engine.models.registry import (
    build_model,
    content_tokens,
    load_model_config,
    open_checkpoint,
    target_cache_groups,
    target_weight_bytes,
)
from specbench.engine.models.target import ContentEncoder, TargetModel
from specbench.engine.proposers.proposer import DraftBatch, MixedRows, ProposerRequirements
from specbench.engine.proposers.row_indices import RowIndices, row_indices
from specbench.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
#: Rows of a verification's pass: the newest token, and the last draft where all were accepted.
_MAX_MISSING = 2


@dataclass(frozen=True, slots=True)
class CatchUpLayout:
    """Rows of the pass over the tokens that the draft's caches lack; depends on the step's shape alone."""

    # [num_requests + 1] on the host
    query_start_loc_np: tuple[int, ...]
    indices: RowIndices
    # [num_requests] bool: a chunk of a prompt rather than a verification
    is_chunk: Tensor
    # [num_requests] int64: tokens that the step itself committed behind its rows: 0 for a partial chunk, else 1
    num_sampled: Tensor


def catch_up_layout(
    target_start_loc: tuple[int, ...], is_chunk: tuple[bool, ...], is_partial: tuple[bool, ...], device: torch.device
) -> CatchUpLayout:
    """Steps of one shape share it; that of verifications alone, which is the same whatever rows the target had, is kept
    for good, since graphs go on reading it."""
    if any(is_chunk):
        return _mixed_layout(target_start_loc, is_chunk, is_partial, device)
    return _verification_layout(len(is_chunk), device)


@cache
def _verification_layout(num_requests: int, device: torch.device) -> CatchUpLayout:
    nobody = (False,) * num_requests
    return _make_layout(tuple(range(num_requests + 1)), nobody, nobody, device)


@lru_cache(maxsize=256)
def _mixed_layout(
    target_start_loc: tuple[int, ...], is_chunk: tuple[bool, ...], is_partial: tuple[bool, ...], device: torch.device
) -> CatchUpLayout:
    return _make_layout(target_start_loc, is_chunk, is_partial, device)


def _make_layout(
    target_start_loc: tuple[int, ...], is_chunk: tuple[bool, ...], is_partial: tuple[bool, ...], device: torch.device
) -> CatchUpLayout:
    num_sampled = 1 - np.asarray(is_partial, dtype=np.int64)
    counts = np.where(is_chunk, np.diff(target_start_loc) + num_sampled, _MAX_MISSING)
    starts = tuple(np.concatenate([[0], np.cumsum(counts)]).tolist())
    chunks, sampled = to_device([np.asarray(is_chunk), num_sampled], device)
    return CatchUpLayout(
        query_start_loc_np=starts,
        indices=row_indices(starts, device),
        is_chunk=chunks.bool(),
        num_sampled=sampled,
    )


class DraftModel:
    """The proposer."""

    is_capturable = True
    is_capturable_mixed = True

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        assert config.draft_checkpoint is not None
        self.config = config
        self.k = config.num_speculative_tokens
        self.checkpoint = open_checkpoint(config.draft_checkpoint, config.load)
        self.model_config = load_model_config(self.checkpoint)
        check_same_vocabulary(target=checkpoint, draft=self.checkpoint)
        self._target_config = load_model_config(checkpoint)
        #: Tokens from here on are not drafted: the draft was not made for more, or the context ends.
        self.limit = min(config.max_model_len, self.model_config.max_model_len)

    def requirements(self) -> ProposerRequirements:
        own_groups = target_cache_groups(self.checkpoint, self.config.dtype, self.config.shard)
        return ProposerRequirements(
            num_speculative_tokens=self.k,
            cache_groups=tuple(
                replace(group, name=draft_name(group), owner="draft", num_draft_slots=self.k) for group in own_groups
            ),
            num_prompt_lookahead=0,
            fixed_bytes=0,
            num_draft_rows=_MAX_MISSING,
            num_rows_behind_chunk=1,
            weight_bytes=target_weight_bytes(self.checkpoint, self.config.dtype, self.config.device, self.config.shard),
        )

    def load(self, target: TargetModel) -> None:
        self.device = target.device
        self.model = build_model(
            self.checkpoint, self.model_config, target.dtype, target.device, target.attention, target.parallel
        )
        # Without towers of its own for all that the target hears and sees, it reads placeholders as tokens.
        kinds = content_tokens(self.model_config).keys()
        hears = bool(kinds) and kinds >= content_tokens(self._target_config).keys()
        self._encoder = cast(ContentEncoder, self.model) if hears else None
        self.encodes_content = hears
        self.groups = self.model.cache_groups()
        self.metadata_builder = AttentionMetadataBuilder(
            self.groups,
            self.config.block_size,
            self.model.relative_extents,
            target.device,
            target.attention.needs_segments,
        )

    def propose(self, batch: DraftBatch) -> None:
        if batch.mixed is None:
            layout = catch_up_layout(batch.query_start_loc_np, batch.is_chunk_np, batch.is_partial_np, self.device)
            num_sampled = layout.num_sampled if batch.is_live is None else layout.num_sampled * batch.is_live
            hidden = self._catch_up(batch, layout, num_sampled)
        else:
            num_sampled = batch.mixed.samples
            hidden = self._catch_up_mixed(batch, batch.mixed)
        if not batch.is_read:
            return
        # [num_requests]: of the row that gives the first draft; -1 for a request of padding
        position = batch.first_position + batch.num_valid + num_sampled - 1
        self._draft(0, batch, hidden, position)
        single_rows = tuple(range(len(batch.rows) + 1))
        requests = row_indices(single_rows, self.device).request_of_row
        for index in range(1, self.k):
            position = position + 1
            is_live = (position < self.limit).long()
            if batch.is_live is not None:
                is_live = is_live * batch.is_live
            bounds = [bound + 1 + index for bound in batch.max_seq_lens_np]
            metadata = self.metadata_builder.build(
                batch.block_tables, RowLayout(single_rows, position, is_live, bounds)
            )
            self._draft(index, batch, self._run(batch, requests, metadata), position)

    def _catch_up(self, batch: DraftBatch, layout: CatchUpLayout, num_sampled: Tensor) -> Tensor:
        """Run the tokens that the caches lack: the hidden of each request's newest token, [num_requests, hidden]."""
        first_position, num_live = self._missing(batch, layout.is_chunk, num_sampled)
        bounds = [bound + _MAX_MISSING for bound in batch.max_seq_lens_np]
        metadata = self.metadata_builder.build(
            batch.block_tables, RowLayout(layout.query_start_loc_np, first_position, num_live, bounds)
        )
        hidden = self._run(batch, layout.indices.request_of_row, metadata, self._features(batch))
        return hidden[layout.indices.query_start + (num_live - 1).clamp_min(0)]

    def _catch_up_mixed(self, batch: DraftBatch, rows: MixedRows) -> Tensor:
        """The same where the device alone knows how many rows each request has."""
        first_position, num_live = self._missing(batch, rows.is_chunk, rows.samples)
        num_rows = torch.where(rows.is_chunk, rows.num_target_rows + rows.samples, _MAX_MISSING)
        num_rows = num_rows * (rows.num_target_rows > 0)  # padding has none
        max_seq_len = max(batch.max_seq_lens_np) + _MAX_MISSING
        layout = DeviceLayout.of(num_rows, first_position, rows.num_rows, max_seq_len, num_live)
        metadata = self.metadata_builder.build_on_device(batch.block_tables, layout)
        hidden = self._run(batch, layout.request_of_row, metadata, self._features(batch))
        return hidden[(num_rows.cumsum(0) - num_rows + num_live - 1).clamp_min_(0)]

    def _missing(self, batch: DraftBatch, is_chunk: Tensor, num_sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Position of the first token that the caches lack, and how many they lack, [num_requests] each."""
        # [num_requests]: of the tokens from the target's first row on, those whose entries are good already
        num_good = batch.num_valid.clamp_max(self.k).masked_fill(is_chunk, 0)
        first_position = batch.first_position + num_good
        num_live = batch.num_valid + num_sampled - num_good
        return first_position, torch.minimum(num_live, self.limit - first_position).clamp_min(0)

    def _features(self, batch: DraftBatch) -> StepFeatures | None:
        """The step's audio and images by the draft's own towers."""
        if batch.features is None or self._encoder is None:
            return None
        return batch.features.content.encode(self._encoder.encode_content)

    def release(self, rows: list[int]) -> None:
        """Nothing was kept."""

    def _run(
        self,
        batch: DraftBatch,
        request_of_row: Tensor,
        metadata: AttentionMetadata,
        features: StepFeatures | None = None,
    ) -> Tensor:
        """The model over one pass: [num_rows, hidden] after its final norm. features: of placeholders in its rows."""
        token_ids = read_tokens(batch.token_pool, batch.rows, request_of_row, metadata.positions)
        embeds = self.model.embed(token_ids)
        if features is not None:
            embeds = features.merge(embeds, request_of_row, metadata.positions)
        return self.model.forward(embeds, metadata, self._own_caches(batch.caches)).hidden_states

    def _own_caches(self, caches: Mapping[str, CachePool]) -> dict[str, CachePool]:
        """The pools under the names by which the model knows them: it does not know that it drafts."""
        return {group.name: caches[draft_name(group)] for group in self.groups}

    def _draft(self, index: int, batch: DraftBatch, hidden: Tensor, position: Tensor) -> None:
        """Choose draft `index` from each request's row at `position`; none where that row lies past the limit."""
        token_ids = batch.sample_draft_from(index, self.model, hidden)
        if self.limit < self.config.max_model_len:
            batch.write_draft(index, torch.where(position < self.limit, token_ids, -1))


def draft_name(group: CacheGroupSpec) -> str:
    """What one of the model's own cache groups is called beside the target's."""
    return f"draft.{group.name}"


def check_same_vocabulary(target: Checkpoint, draft: Checkpoint) -> None:
    """UserError where an id may mean one token to the target and another one to the draft."""
    num_target, num_draft = (load_model_config(checkpoint).vocab_size for checkpoint in (target, draft))
    if num_target != num_draft:
        raise UserError(
            f"spec.checkpoint: {draft.path} has {num_draft} token ids and the target has {num_target}; name a draft of "
            "the target's vocabulary"
        )
    target_tokens, draft_tokens = _tokens(target), _tokens(draft)
    if target_tokens is not None and draft_tokens is not None and target_tokens != draft_tokens:
        raise UserError(
            f"spec.checkpoint: {draft.path} has other tokens in its {TOKENIZER_FILE} than the target, so its drafts "
            "would mean something else; name a draft of the target's vocabulary"
        )


def _tokens(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Token -> id; None where the checkpoint comes without a tokenizer.json."""
    file = checkpoint.path / TOKENIZER_FILE
    return Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True) if file.is_file() else None
