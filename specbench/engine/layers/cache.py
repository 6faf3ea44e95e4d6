"""The memory of one cache group: what was stored at each slot, for every layer and stream.

Slots are block * block_size + offset. Block 0 is the null block: never written, always zeros, and what a freed or
unallocated table entry, and a convolution tap before the sequence's start, point at. The row past the last block is the
scratch row: a slot of -1 writes there (it is the last index), and nothing reads it.
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec


class CachePool:
    """The tensors of one cache group."""

    def __init__(
        self, spec: CacheGroupSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert dtype.itemsize == spec.element_size
        self.spec = spec
        num_rows = num_blocks * block_size + 1
        #: Per layer, per stream: [num_blocks * block_size + 1, *stream.shape]
        self.layers: tuple[tuple[Tensor, ...], ...] = tuple(
            tuple(_zeros((num_rows, *stream.shape), dtype, device) for stream in streams) for streams in spec.streams
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Pages of a mapping are zeros that take no memory until they are written, and most of a large pool never is.
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
