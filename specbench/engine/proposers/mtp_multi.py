"""Multi-module MTP: N modules with their own weights and caches draft N tokens in one pass over one row layout.

Row p of module m takes token x_(p+m+1) and the previous module's hidden at p (the target's, after its final norm, for
module 0) and predicts x_(p+m+2). Positions and slots are the same for all modules, so metadata is built once a pass.

A module's cache entry at p therefore depends on tokens up to p+m+1. Entries made from drafts that were then rejected
are stale and run again at the start of the next pass, from a window of the target's newest hiddens kept per request.
Token ids need no window: committed tokens and, behind them, this pass's drafts are one row of the token pool, so
"known tokens replace drafts at a chunk's edge" is what reading the pool at p+m+1 does.

Belongs here: the order of passes, their windows. Does not belong here: the modules' layers (models/), what single and
multi share (mtp_modules.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.layers import fusion
from specbench.engine.layers.metadata import AttentionMetadata, DeviceLayout, RowLayout
from specbench.engine.layers.to_device import to_device
from specbench.engine.models.registry import module_cache_groups, module_weight_bytes
from specbench.engine.models.target import TargetModel
from specbench.engine.proposers.mtp_modules import DraftModules
from specbench.engine.proposers.proposer import DraftBatch, MixedRows, ProposerRequirements
from specbench.engine.proposers.row_indices import RowIndices, row_indices, uniform_rows


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """Index maps of a draft pass that depend on its shape alone."""

    # [num_requests + 1] on the host
    query_start_loc_np: tuple[int, ...]
    # [num_requests] on the host: rows added to the target's layout
    num_added_np: tuple[int, ...]
    # of this layout
    indices: RowIndices
    # [num_requests] int64: first row of each request in the target's layout
    target_start: torch.Tensor
    # [num_requests] bool: a chunk of a prompt rather than a verification
    is_chunk: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftPass:
    """The rows of one pass, stale ones included."""

    metadata: AttentionMetadata
    # [num_rows] int64: row -> batch index
    request_of_row: torch.Tensor
    # [num_requests] int64: last live row of each request; any row of one that has none
    last_rows: torch.Tensor


def draft_layout(
    target_start_loc: tuple[int, ...], is_chunk: tuple[bool, ...], num_modules: int, device: torch.device
) -> DraftLayout:
    """Steps of one shape share it; that of verifications alone is kept for good, since graphs go on reading it."""
    num_rows = None if any(is_chunk) else uniform_rows(target_start_loc)
    if num_rows is None:
        return _mixed_layout(target_start_loc, is_chunk, num_modules, device)
    return _verification_layout(len(is_chunk), num_rows, num_modules, device)


@cache
def _verification_layout(num_requests: int, num_rows: int, num_modules: int, device: torch.device) -> DraftLayout:
    target_start_loc = tuple(range(0, num_requests * num_rows + 1, num_rows))
    return _make_layout(target_start_loc, (False,) * num_requests, num_modules, device)


@lru_cache(maxsize=256)
def _mixed_layout(
    target_start_loc: tuple[int, ...], is_chunk: tuple[bool, ...], num_modules: int, device: torch.device
) -> DraftLayout:
    return _make_layout(target_start_loc, is_chunk, num_modules, device)


def _make_layout(
    target_start_loc: tuple[int, ...], is_chunk: tuple[bool, ...], num_modules: int, device: torch.device
) -> DraftLayout:
    """A chunk keeps its rows. A verification gets N + 1: at most N - 1 stale rows, of which one goes with every
    accepted draft, and the accepted drafts and the row before them make N, or N + 1 when all N were accepted."""
    counts = np.where(is_chunk, np.diff(target_start_loc), num_modules + 1)
    starts = np.concatenate([[0], np.cumsum(counts)])
    target_start, chunks = to_device([np.asarray(target_start_loc[:-1]), np.asarray(is_chunk)], device)
    return DraftLayout(
        query_start_loc_np=tuple(starts.tolist()),
        num_added_np=tuple((counts - np.diff(target_start_loc)).tolist()),
        indices=row_indices(tuple(starts.tolist()), device),
        target_start=target_start,
        is_chunk=chunks.bool(),
    )


def draft_rows_kernel(batch: DraftBatch, num_modules: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """First positions, live rows and last live rows of a pass behind verifications, stale rows included."""
    from specbench.engine.kernels.draft_inputs import draft_rows

    return draft_rows(batch.first_position, batch.num_valid, batch.num_accepted, num_modules)


class MultiModuleMTP:
    """The proposer. Its only memory of a request is the window of hiddens."""

    is_capturable = True
    is_capturable_mixed = True
    encodes_content = False

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.config = config
        self.checkpoint = checkpoint
        self.num_modules = config.num_speculative_tokens
        # One for requests of padding.
        self.num_window_rows = config.max_num_seqs + 1
        self.hidden_feedback = config.hidden_feedback
        self.faults = config.faults
        # One hidden more is needed to be wrong by one row.
        self.window_size = self.num_modules - 1 + ("hidden_off_by_one" in self.faults)

    def requirements(self) -> ProposerRequirements:
        specs, hidden_size = module_cache_groups(
            self.checkpoint, self.config.dtype, self.num_modules, self.faults, self.config.shard
        )
        return ProposerRequirements(
            num_speculative_tokens=self.num_modules,
            cache_groups=specs,
            num_prompt_lookahead=self.num_modules,
            weight_bytes=module_weight_bytes(self.checkpoint, self.config.dtype, self.num_modules, self.config.shard),
            fixed_bytes=self.num_window_rows * self.window_size * hidden_size * specs[0].element_size,
            num_draft_rows=self.num_modules + 1,
        )

    def load(self, target: TargetModel) -> None:
        self.target = target
        self.modules = DraftModules(self.config, self.checkpoint, target, self.num_modules)
        # [max_num_seqs + 1, window_size, hidden]: the target's hiddens of each request's newest valid rows, newest last
        self.window = torch.zeros(
            self.num_window_rows, self.window_size, target.hidden_size, dtype=target.dtype, device=target.device
        )

    def propose(self, batch: DraftBatch) -> None:
        if batch.mixed is not None:
            self._propose_mixed(batch, batch.mixed)
            return
        layout = draft_layout(batch.query_start_loc_np, batch.is_chunk_np, self.num_modules, self.target.device)
        is_by_kernel = self._is_by_kernel(batch)
        if is_by_kernel:
            first_position, num_live, last_rows = draft_rows_kernel(batch, self.num_modules)
        else:
            num_stale = self._num_stale_rows(batch, layout.is_chunk)
            first_position = batch.first_position - num_stale
            num_live = num_stale + batch.num_valid
            last_rows = layout.indices.query_start + num_live - 1
        # Stale rows come before the target's first row, so the bound of an added row is never too small.
        max_seq_lens = [m + n for m, n in zip(batch.max_seq_lens_np, layout.num_added_np, strict=True)]
        metadata = self.modules.metadata_builder.build(
            batch.block_tables, RowLayout(layout.query_start_loc_np, first_position, num_live, max_seq_lens)
        )
        draft_pass = DraftPass(metadata, layout.indices.request_of_row, last_rows)
        if is_by_kernel:
            hidden = self._hidden_by_kernel(batch, first_position)
        else:
            hidden = self._gather_hidden(batch, draft_pass, layout.target_start)
        self._draft(batch, draft_pass, hidden)

    def _propose_mixed(self, batch: DraftBatch, rows: MixedRows) -> None:
        """The same where the device alone knows how many rows each request has."""
        num_stale = self._num_stale_rows(batch, rows.is_chunk)
        num_live = num_stale + batch.num_valid
        num_rows = torch.where(rows.is_chunk, rows.num_target_rows, self.num_modules + 1)
        num_rows = num_rows * (rows.num_target_rows > 0)  # padding has none
        max_seq_len = max(batch.max_seq_lens_np) + self.num_modules
        layout = DeviceLayout.of(num_rows, batch.first_position - num_stale, rows.num_rows, max_seq_len, num_live)
        metadata = self.modules.metadata_builder.build_on_device(batch.block_tables, layout)
        last_rows = (num_rows.cumsum(0) - num_rows + num_live - 1).clamp_min_(0)
        draft_pass = DraftPass(metadata, layout.request_of_row, last_rows)
        self._draft(batch, draft_pass, self._gather_hidden(batch, draft_pass, rows.target_start))

    def release(self, rows: list[int]) -> None:
        """A new occupant's first pass has no stale rows and fills the window before any is read: nothing to clear."""

    def _is_by_kernel(self, batch: DraftBatch) -> bool:
        """Whether the pass follows verifications of equally many rows, which is what the kernels are for."""
        is_plain = self.window_size > 0 and not self.faults and not any(batch.is_chunk_np)
        return is_plain and fusion.is_fused(batch.rows) and uniform_rows(batch.query_start_loc_np) is not None

    def _hidden_by_kernel(self, batch: DraftBatch, first_position: torch.Tensor) -> torch.Tensor:
        """As `_gather_hidden`."""
        from specbench.engine.kernels.draft_inputs import draft_hiddens

        return draft_hiddens(
            batch.hidden_states, self.window, batch.rows, batch.first_position, batch.num_valid, first_position,
            self.num_modules + 1,
        )  # fmt: skip

    def _num_stale_rows(self, batch: DraftBatch, is_chunk: torch.Tensor) -> torch.Tensor:
        """[num_requests]: rows whose deeper entries used rejected drafts, N - 1 - accepted.

        None after a chunk, whose tokens were all known; never more than there are positions before the first row.
        """
        if "skipped_reprefill" in self.faults:
            return torch.zeros_like(batch.num_accepted)
        num_stale = (self.num_modules - 1 - batch.num_accepted).clamp_min(0)
        return torch.minimum(num_stale, batch.first_position).masked_fill(is_chunk, 0)

    def _gather_hidden(self, batch: DraftBatch, draft_pass: DraftPass, target_start: torch.Tensor) -> torch.Tensor:
        """The target's hidden at every row, from this step's rows or the window; then the window is moved on.

        Window entry w of a request holds position first_position - window_size + w. It is shifted as a whole: entries
        that this step's rows do not replace move down, none is overwritten in part.
        """
        rows_hidden = batch.residual if "pre_norm_hidden" in self.faults else batch.hidden_states
        if self.window_size == 0:
            source = rows_hidden
        else:
            source = torch.cat([rows_hidden, self.window[batch.rows].flatten(0, 1)])
        num_rows = len(rows_hidden)
        # [num_requests]: index in `source` of position 0, were every position in this step's rows or in the window
        rows_origin = target_start - batch.first_position
        positions = draft_pass.metadata.positions
        requests = torch.arange(len(batch.rows), device=positions.device)
        window_origin = num_rows + (requests + 1) * self.window_size - batch.first_position

        def index(of: torch.Tensor, request: torch.Tensor) -> torch.Tensor:
            in_rows = of >= batch.first_position[request]
            oldest = num_rows + request * self.window_size
            # Dead rows may point past this step's rows and, where no window is, past all there is; young windows before
            # their first entry.
            in_window = torch.maximum(window_origin[request] + of, oldest).clamp_max(len(source) - 1)
            return torch.where(in_rows, (rows_origin[request] + of).clamp_max(num_rows - 1), in_window)

        wanted = (positions - 1).clamp_min(0) if "hidden_off_by_one" in self.faults else positions
        hidden = source[index(wanted, draft_pass.request_of_row)]
        if self.window_size:
            newest = batch.first_position + batch.num_valid - 1
            kept = newest[:, None] + torch.arange(1 - self.window_size, 1, device=positions.device)
            self.window[batch.rows] = source[index(kept, requests[:, None])]
        return hidden

    def _draft(self, batch: DraftBatch, draft_pass: DraftPass, hidden: torch.Tensor) -> None:
        """Run the modules in turn; draft m is chosen from module m's logits at each request's last live row."""
        target_hidden, metadata, draft = hidden, draft_pass.metadata, None
        for module in range(self.num_modules):
            weights = 0 if "module_0_everywhere" in self.faults else module
            output, last_hidden = self.modules.run(
                weights, batch, draft_pass.request_of_row, metadata, hidden, module + 1, draft_pass.last_rows, draft
            )
            draft = self.modules.open_draft(module, batch, metadata, last_hidden)
            hidden = target_hidden if self.hidden_feedback == "target" else output
            if "post_norm_chain" in self.faults:
                hidden = self.target.final_norm(hidden)
        self.modules.close_draft(batch, draft)
