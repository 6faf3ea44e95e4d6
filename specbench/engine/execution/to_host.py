"""From the device to the host in copies that the host does not wait for."""

from __future__ import annotations

import torch


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory. It is there once all that was queued before, and the copy itself, is done."""
    if not tensor.is_cuda:
        return tensor.clone()  # the buffers of captured steps are written again
    # Of the same strides, since a copy that has to reorder would be made on the device first.
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.contiguous(), non_blocking=True)
