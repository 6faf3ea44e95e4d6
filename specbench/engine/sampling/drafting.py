"""How a proposer's logits become a draft: the argmax, or a draw whose probabilities are kept for verification.

Belongs here: the draw and its buffer. Does not belong here: which proposer runs, what verification makes of the
probabilities (verification.py).

Any law is a good one as long as it is the law drawn from: a draft is drawn from the softmax at its request's
temperature alone, whatever filters and penalties the target's own law is under.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specbench.engine.config import EngineConfig
from specbench.engine.layers import fusion
from specbench.engine.sampling.noise import DRAFT, exponential_noise, spread_ids, window_stream


def draft_probability_bytes(config: EngineConfig, vocab_size: int) -> int:
    """Bytes of the buffer that `allocate_draft_probabilities` makes."""
    if config.draft_sample_method == "greedy":
        return 0
    return (config.max_num_seqs + 1) * config.num_speculative_tokens * vocab_size * torch.float32.itemsize


def allocate_draft_probabilities(config: EngineConfig, vocab_size: int) -> torch.Tensor | None:
    """[max_num_seqs + 1, k, vocab] fp32: the law of each draft awaiting verification, the last for requests of padding.
    None where drafts are argmaxes."""
    if config.draft_sample_method == "greedy":
        return None
    return torch.zeros(config.max_num_seqs + 1, config.num_speculative_tokens, vocab_size, device=config.device)


@dataclass(frozen=True, slots=True)
class DraftSampling:
    """What drawing drafts takes, for the requests of one batch."""

    # [max_num_seqs + 1, k, vocab] fp32, written here
    probabilities: torch.Tensor
    # [num_requests] int64: persistent rows
    rows: torch.Tensor
    # [num_requests] fp32; 0 is greedy
    temperature: torch.Tensor
    # [num_requests] int64: request keys
    keys: torch.Tensor
    # [num_requests] int64: position of the first row of the window that will verify these drafts
    window_start: torch.Tensor

    def draw(self, index: int, logits: torch.Tensor) -> torch.Tensor:
        """Draft `index` of every request, int64 [num_requests], from fp32 logits [num_requests, vocab]."""
        if fusion.is_fused(logits):
            from specbench.engine.kernels.sampling import NoiseRows
            from specbench.engine.kernels.tempered_sampling import draw_drafts

            noise_rows = NoiseRows(self.keys, self.window_start, self.temperature, window_stream(DRAFT, index))
            return draw_drafts(logits, noise_rows, self.probabilities, self.rows, index)
        is_greedy = self.temperature == 0
        scaled = logits / torch.where(is_greedy, 1.0, self.temperature)[:, None]
        self.probabilities[self.rows, index] = scaled.softmax(dim=-1)
        stream = window_stream(DRAFT, torch.full_like(self.rows, index))
        ids = spread_ids(logits.shape[-1], logits.device)
        noise = exponential_noise(self.keys, self.window_start, stream, ids)
        return torch.where(is_greedy, logits.argmax(dim=-1), (scaled - noise.log_()).argmax(dim=-1))
