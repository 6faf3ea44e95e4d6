"""Whether one Triton kernel takes the place of several of torch's operations around the model: on a GPU, where each
launch costs more than its work."""

from __future__ import annotations

from torch import Tensor


def is_fused(tensor: Tensor) -> bool:
    """For tensors that lie where this one does."""
    return tensor.is_cuda
