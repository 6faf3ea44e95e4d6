"""The token table and the head over it."""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.engine.layers.linear import Linear
from specbench.engine.layers.parallel import Vocabulary


class Embedding:
    """Rows of the token table."""

    def __init__(self, weight: Tensor, vocabulary: Vocabulary) -> None:
        #: [padded_vocab_size, hidden_size], or this rank's rows of it
        self.weight = weight
        self._vocabulary = vocabulary

    def __call__(self, token_ids: Tensor) -> Tensor:
        # token_ids: [T] -> [T, hidden_size]
        if self._vocabulary.is_whole:
            return torch.nn.functional.embedding(token_ids, self.weight)
        return self._vocabulary.look_up(self.weight, token_ids)


class LogitsHead:
    """Hidden states to logits over the token ids that exist."""

    def __init__(self, projection: Linear, divisor: float, vocabulary: Vocabulary) -> None:
        #: [vocab_size, hidden_size]: no rows of padding, so no id past the vocabulary can be produced; or this rank's
        self._projection = projection
        self._vocabulary = vocabulary
        self._divisor = divisor

    def __call__(self, hidden: Tensor) -> Tensor:
        # hidden: [R, hidden_size] -> [R, vocab_size] fp32
        return self._vocabulary.gather(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> fp32 [R, ids of this rank]."""
        return self._projection.wide(hidden if self._divisor == 1.0 else hidden / self._divisor)
