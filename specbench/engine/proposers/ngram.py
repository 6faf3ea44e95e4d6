"""Prompt lookup: the drafts are what followed the newest tokens where they occurred before, in prompt or output.

The convention is that of vLLM and transformers: the longest match of ngram_min to ngram_max tokens wins, among equally
long ones the earliest, and the drafts are the tokens behind it, as far as there are any. It needs no model, no cache.
The search runs on the token pool, where the newest tokens are, so the host need not know them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.models.target import TargetModel
from specbench.engine.proposers.proposer import DraftBatch, ProposerRequirements


class NgramLookup:
    """The proposer. It remembers nothing."""

    is_capturable = True
    is_capturable_mixed = True
    encodes_content = False

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.k = config.num_speculative_tokens
        self.ngram_min = config.ngram_min
        self.ngram_max = config.ngram_max

    def requirements(self) -> ProposerRequirements:
        return ProposerRequirements(
            num_speculative_tokens=self.k,
            cache_groups=(),
            num_prompt_lookahead=0,
            fixed_bytes=0,
        )

    def load(self, target: TargetModel) -> None:
        """Nothing to load."""

    def propose(self, batch: DraftBatch) -> None:
        if not batch.is_read:
            return
        # A verification commits one token more than it has rows at most, a final chunk one.
        token_ids = batch.token_pool[batch.rows, : max(batch.max_seq_lens_np) + 1]
        # The columns of a partial chunk's drafts lie past the width: whatever is found for it is not read.
        num_tokens = batch.draft_columns.clamp_max(token_ids.shape[1])
        batch.write_drafts(look_up(token_ids, num_tokens, self.ngram_min, self.ngram_max, self.k))

    def release(self, rows: list[int]) -> None:
        """Nothing was kept."""


def look_up(token_ids: Tensor, num_tokens: Tensor, ngram_min: int, ngram_max: int, k: int) -> Tensor:
    """Drafts [num_requests, k], -1 where there is none.

    token_ids: [num_requests, width] int64, of which the first num_tokens ([num_requests]) of each request count.
    """
    width = token_ids.shape[1]
    columns = torch.arange(width, device=token_ids.device)
    match_length = _match_lengths(token_ids, num_tokens, ngram_max)
    # A match needs a token behind it that is known.
    is_match = (match_length >= ngram_min) & (columns < num_tokens[:, None] - 1)
    # The longest first, then the earliest.
    rank = torch.where(is_match, match_length * width + (width - 1 - columns), -1)
    best_rank, match_end = rank.max(dim=1)
    draft_columns = match_end[:, None] + 1 + torch.arange(k, device=token_ids.device)
    is_draft = (best_rank >= 0)[:, None] & (draft_columns < num_tokens[:, None])
    drafts = token_ids.gather(1, draft_columns.clamp_max(width - 1))
    return torch.where(is_draft, drafts, -1)


def _match_lengths(token_ids: Tensor, num_tokens: Tensor, ngram_max: int) -> Tensor:
    """[num_requests, width]: how many tokens, up to ngram_max, end alike at this column and at the newest token."""
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    length = torch.zeros_like(token_ids)
    is_alike = torch.ones_like(token_ids, dtype=torch.bool)
    # No more tokens than there are can end alike.
    for back in range(min(ngram_max, token_ids.shape[1])):
        newest = token_ids.gather(1, (num_tokens[:, None] - 1 - back).clamp_min(0))
        earlier = token_ids.roll(back, dims=1)
        is_alike &= (earlier == newest) & (columns >= back)
        length += is_alike
    return length
