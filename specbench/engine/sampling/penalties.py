"""Repetition, presence and frequency penalties, from the tokens before each row.

A request's committed tokens and, behind them, its drafts are one row of the token pool, so the tokens before a verify
row are the pool up to its position: the drafts before it in the window count as generated, and no counts are kept
that a rejection or a preemption could leave wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.engine.sampling.row_chunks import row_chunks


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """Penalties of the logits rows of a batch, neutral for those that ask for none."""

    # [num_rows] fp32: divides or multiplies; 1 is off. None: off for all
    repetition: torch.Tensor | None
    # [num_rows] fp32; 0 is off
    presence: torch.Tensor
    frequency: torch.Tensor
    # [num_rows, width] int64: the token pool's row of each; -1 where a draft is missing
    token_ids: torch.Tensor
    # [num_rows] int64: tokens of the prompt, and all tokens before the one to be sampled
    num_prompt_tokens: torch.Tensor
    num_tokens: torch.Tensor

    def apply_(self, logits: torch.Tensor) -> None:
        """In place on fp32 logits [num_rows, vocab]: repetition first, then frequency and presence."""
        for rows in row_chunks(logits):
            self._apply_to_(logits[rows], rows)

    def _apply_to_(self, logits: torch.Tensor, rows: slice) -> None:
        columns = torch.arange(self.token_ids.shape[1], device=logits.device)
        # Rows behind a missing draft are never emitted: what stands in for it does not matter.
        token_ids = self.token_ids[rows].clamp_min(0)
        is_before = columns < self.num_tokens[rows, None]
        if self.repetition is not None:
            factor = self.repetition[rows, None]
            penalised = torch.where(logits > 0, logits / factor, logits * factor)
            torch.where(_count(token_ids, is_before, logits) > 0, penalised, logits, out=logits)
        counts = _count(token_ids, is_before & (columns >= self.num_prompt_tokens[rows, None]), logits)
        logits -= self.frequency[rows, None] * counts
        logits -= self.presence[rows, None] * (counts > 0)


def _count(token_ids: torch.Tensor, is_counted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """How often each row holds each id, in the shape and type of `logits`."""
    return torch.zeros_like(logits).scatter_add_(1, token_ids, is_counted.to(logits.dtype))
