"""The token table and the head over it.

Belongs here: ids to rows and hiddens to logits, where ranks share the vocabulary, too. Does not belong here: choosing a
token (sampling/), how ranks exchange (parallel.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specbench.engine.layers.linear import Linear
from specbench.engine.layers.parallel import Vocabulary

if TYPE_CHECKING:
    from specbench.engine.kernels.sampling import ChunkBests

#: What the number of a head's rows on a GPU is a multiple of.
_HEAD_ROWS = 64


class Embedding:
    """Rows of the token table."""

    def __init__(self, weight: Tensor, vocabulary: Vocabulary) -> None:
        #: [padded_vocab_size, hidden_size], or this rank's rows of it
        self.weight = weight
        self._vocabulary = vocabulary

    def __call__(self, token_ids: Tensor) -> Tensor:
        # token_ids: [T] -> [T, hidden_size]
        if self._vocabulary.is_whole:
            # The operation named embedding takes several times as long for few rows on a GPU.
            return (
                self.weight[token_ids] if token_ids.is_cuda else torch.nn.functional.embedding(token_ids, self.weight)
            )
        return self._vocabulary.look_up(self.weight, token_ids)


class LogitsHead:
    """Hidden states to logits over the token ids that exist."""

    def __init__(self, projection: Linear, divisor: float, vocabulary: Vocabulary) -> None:
        #: [vocab_size, hidden_size], or this rank's; rows of padding may follow (see `num_head_rows`)
        self._projection = projection
        self.vocabulary = vocabulary
        self._divisor = divisor

    def __call__(self, hidden: Tensor) -> Tensor:
        # hidden: [R, hidden_size] -> [R, vocab_size] fp32
        return self.vocabulary.gather(self.own_logits(hidden))

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> fp32 [R, ids of this rank]."""
        logits = self._projection.wide(hidden if self._divisor == 1.0 else hidden / self._divisor)
        # Columns of padding are left out, so no id past the vocabulary can be produced.
        num_ids = self.vocabulary.stop - self.vocabulary.start
        return logits if logits.shape[1] == num_ids else logits[:, :num_ids]

    def bests(self, hidden: Tensor) -> ChunkBests:
        """On a GPU: hidden [R, hidden_size] -> the best of each part of the logits of this rank's ids."""
        from specbench.engine.kernels.head_best import best_of_head, takes
        from specbench.engine.kernels.sampling import best_of_chunks

        matrix = self._projection.matrix
        if matrix is None or self._divisor != 1.0 or not takes(len(hidden), matrix):
            return best_of_chunks(self.own_logits(hidden))
        return best_of_head(hidden.contiguous(), matrix, self.vocabulary.stop - self.vocabulary.start)


def num_head_rows(num_ids: int, num_stored: int, device: torch.device) -> int:
    """Rows that a head over `num_ids` multiplies by, of those that the checkpoint stores. On a GPU products with an odd
    number of columns take up to three times as long as those with one that can be halved a few times."""
    if device.type == "cpu":
        return num_ids
    return min(-(-num_ids // _HEAD_ROWS) * _HEAD_ROWS, num_stored)
