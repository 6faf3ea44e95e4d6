"""The base of what ends in a head: a target, and MTP modules, which have their target's.

Belongs here: what execution and proposers ask of a head (`target.LogitsModel`), by that head. Does not belong here: the
head's arithmetic (layers/embedding.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specbench.engine.layers.embedding import LogitsHead

if TYPE_CHECKING:
    from specbench.engine.kernels.sampling import ChunkBests


class HeadOwner:
    """Logits by `head`."""

    def __init__(self, head: LogitsHead) -> None:
        self.head = head
        self.vocabulary = head.vocabulary

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab_size] fp32."""
        return self.head(hidden)

    def compute_own_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> fp32 [R, this rank's range of the vocabulary]."""
        return self.head.own_logits(hidden)

    def compute_bests(self, hidden: Tensor) -> ChunkBests:
        """[R, hidden] on a GPU -> the best of each part of own logits."""
        return self.head.bests(hidden)
