"""Dense gated MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from specbench.engine.layers.linear import Linear


def deinterleave(weight: Tensor) -> Tensor:
    """Rows gate, up, gate, up ... (dimension -2) to all gates, then all ups: two contiguous halves of one product."""
    *leading, rows, columns = weight.shape
    return weight.view(*leading, rows // 2, 2, columns).transpose(-3, -2).reshape(weight.shape)


class GatedMLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        #: [2 * width, hidden], gates first
        self._gate_up = gate_up
        #: [hidden, width]
        self._down = down
        self.linears = (gate_up, down)

    def __call__(self, x: Tensor) -> Tensor:
        # x: [T, hidden] -> [T, hidden]
        if x.is_cuda:
            return self._down(self._activated(x))
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate) * up)

    def partial_sums(self, x: Tensor, most: int | None = None) -> Tensor:
        """The same, or its partial sums (see Linear)."""
        return self._down.partial_sums(self._activated(x), most) if x.is_cuda else self(x)

    def _activated(self, x: Tensor) -> Tensor:
        from specbench.engine.kernels.activation import silu_and_multiply

        activated = self._gate_up.gated(x)
        return silu_and_multiply(self._gate_up.partial_sums(x), x.dtype) if activated is None else activated
