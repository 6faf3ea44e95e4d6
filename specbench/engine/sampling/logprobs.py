"""Log-probabilities of tokens, for the requests that ask: of what was emitted, and of their prompts.

Belongs here: from logits to TokenLogprob. Does not belong here: which rows belong to whom (execution/).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from specbench.engine.sampling.row_chunks import log_total
from specbench.generate import TokenLogprob


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Rows of a log-softmax at chosen tokens, on the device."""

    # [num_rows] int64, fp32, int64, bool
    token_ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    is_argmax: torch.Tensor
    # [num_rows, num_top] int64 and fp32, the likeliest first
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    @classmethod
    def gather(cls, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> LogprobTensors:
        """logits: fp32 [num_rows, vocab]. token_ids: int64 [num_rows]."""
        chosen = logits.gather(1, token_ids[:, None])
        total = log_total(logits)[:, None]
        top = logits.topk(num_top, dim=-1)
        return cls(
            token_ids=token_ids,
            logprobs=(chosen - total)[:, 0],
            ranks=1 + (logits > chosen).sum(dim=-1),
            is_argmax=logits.argmax(dim=-1) == token_ids,
            top_ids=top.indices,
            top_logprobs=top.values - total,
        )

    def map(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> LogprobTensors:
        """The same with every tensor replaced by its copy."""
        return LogprobTensors(*(copy(getattr(self, field.name)) for field in fields(self)))

    def read(self, num_top: Sequence[int]) -> list[TokenLogprob]:
        """One for each row of tensors on the host, with as many of the likeliest ids as `num_top` says for it; ids of
        no probability are left out."""
        ids, logprobs = self.top_ids.tolist(), self.top_logprobs.tolist()
        rows = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.is_argmax.tolist(),
            ids,
            logprobs,
            num_top,
            strict=True,
        )
        return [
            TokenLogprob(token_id, logprob, rank, is_argmax, _likeliest(top_ids[:count], top_logprobs[:count]))
            for token_id, logprob, rank, is_argmax, top_ids, top_logprobs, count in rows
        ]


def _likeliest(token_ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    """Pairs of id and logprob, ids of equal probability in their order."""
    pairs = [pair for pair in zip(token_ids, logprobs, strict=True) if pair[1] > -math.inf]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
