"""The token table and the head over it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine.layers.linear import Linear


class Embedding:
    """Rows of the token table."""

    def __init__(self, weight: Tensor) -> None:
        #: [padded_vocab_size, hidden_size]
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        # token_ids: [T] -> [T, hidden_size]
        return F.embedding(token_ids, self.weight)


class LogitsHead:
    """Hidden states to logits over the token ids that exist."""

    def __init__(self, projection: Linear, divisor: float) -> None:
        #: [vocab_size, hidden_size]: no rows of padding, so no id past the vocabulary can be produced
        self._projection = projection
        self._divisor = divisor

    def __call__(self, hidden: Tensor) -> Tensor:
        # hidden: [R, hidden_size] -> [R, vocab_size] fp32
        return self._projection(hidden / self._divisor).to(torch.float32)
