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
        # x: [T, hidden]
        gate_up = self._gate_up(x)
        if gate_up.is_cuda:
            from specbench.engine.kernels.activation import silu_and_multiply

            return self._down(silu_and_multiply(gate_up))
        gate, up = gate_up.chunk(2, -1)
        return self._down(F.silu(gate) * up)
