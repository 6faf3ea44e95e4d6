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
        self._is_packed = is_packed(weight.dtype, weight.device)
        #: [outputs, inputs]
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if self._is_packed else weight
        #: [outputs]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        # x: [T, inputs] -> [T, outputs]
        if self._is_packed:
            return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return F.linear(x, self._weight, self._bias)


def is_packed(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices are kept in oneDNN's order: in bf16, on a CPU that computes in it."""
    is_bf16_on_cpu = device.type == "cpu" and dtype == torch.bfloat16
    return is_bf16_on_cpu and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
