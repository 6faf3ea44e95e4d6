"""Memory of a GPU that other ranks' kernels write to. No Triton.

Belongs here: its layout. Does not belong here: how it is mapped (execution/peer_memory.py), what is sent
(kernels/all_reduce.py, split_sampling.py, split_conv.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Places of a row and a sender.
NUM_PLACES = 4
#: What an inbox holds, by the size of what is sent: bits, and those of a place at which nothing has arrived.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EMPTY = {size: -(1 << (8 * size - 1)) for size in BITS}


@dataclass(frozen=True, slots=True)
class Inboxes:
    """One rank's view of all inboxes of one kind."""

    rank: int
    # [size] int64: where each rank's inbox begins, for this rank's device
    addresses: Tensor
    # [max_rows, NUM_PLACES, size, width] of BITS: this rank's, all EMPTY at first
    own: Tensor
    # [max_rows] int32: exchanges of each row so far
    counts: Tensor
    # [1] int32: others are waited for while it is 0
    is_aborted: Tensor

    @property
    def size(self) -> int:
        """Ranks."""
        return self.own.shape[2]

    def takes(self, num_rows: int, width: int, itemsize: int) -> bool:
        """Whether rows of this kind fit."""
        max_rows, _, _, capacity = self.own.shape
        return num_rows <= max_rows and width <= capacity and itemsize == self.own.element_size()


@dataclass(frozen=True, slots=True)
class PeerInboxes:
    """What ranks exchange over each other's memory."""

    #: Rows of hidden states.
    rows: Inboxes
    #: One int64 a row.
    keys: Inboxes


@dataclass(frozen=True, slots=True)
class OwnIds:
    """Of a token table that ranks share: the id of this rank's first row, and where others' rows come."""

    first: int
    inboxes: Inboxes
