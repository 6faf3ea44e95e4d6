"""A matrix and its bias."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class Linear:
    """x -> x weight^T + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        #: [outputs, inputs]
        self._weight = weight
        #: [outputs]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        # x: [T, inputs] -> [T, outputs]
        return F.linear(x, self._weight, self._bias)
