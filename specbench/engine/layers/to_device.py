"""From the host to the device in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """int64 tensors of the arrays' shapes and values. On a GPU they share one copy, from pinned memory: a copy from
    any other waits until the device has come to it."""
    wide = [np.ascontiguousarray(array, dtype=np.int64) for array in arrays]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in wide]
    sizes = [array.size for array in wide]
    # The allocator of pinned memory gives it away again once the copy is done.
    staging = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=True)
    np.concatenate([array.reshape(-1) for array in wide], out=staging.numpy())
    parts = staging.to(device, non_blocking=True).split(sizes)
    return [part.view(array.shape) for part, array in zip(parts, wide, strict=True)]


def copy_in(buffer: Tensor, values: np.ndarray) -> None:
    """Fill a buffer of the same shape, which must be contiguous, in the same way."""
    if not buffer.is_cuda:
        buffer.copy_(torch.from_numpy(values))
        return
    staging = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
    staging.numpy()[...] = values
    buffer.copy_(staging, non_blocking=True)
