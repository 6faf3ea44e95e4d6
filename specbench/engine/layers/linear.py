"""A matrix and its bias.

In bf16 on a CPU the matrix is kept as oneDNN reads it (blocks of rows, pairs of columns together). Left in rows, it is
put in that order anew at every product, which costs as much as the product itself where rows are few.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class Linear:
    """x -> x weight^T + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._is_packed = can_be_packed(weight)
        #: [outputs, inputs]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self._is_packed else weight
        #: [outputs]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        # x: [T, inputs] -> [T, outputs]
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


def can_be_packed(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by such a matrix on this machine."""
    is_bf16_on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return is_bf16_on_cpu and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
