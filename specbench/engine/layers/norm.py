"""RMSNorm, alone or after an addition. On a GPU each is one launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32.

    The weight may have more dimensions than one: its rows then apply to rows of x (different heads, different halves).
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight = weight.contiguous()
        self.eps = eps
        self._is_fused = weight.is_cuda
        if self._is_fused:
            return
        # sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(size * eps)) / sqrt(size)
        self._root = torch.tensor(math.sqrt(size * eps), dtype=torch.float32, device=weight.device)
        self._scaled_weight = weight.float() * math.sqrt(size)

    def __call__(self, x: Tensor) -> Tensor:
        # x: [..., *weight.shape]
        if self._is_fused:
            from specbench.engine.kernels.norm import rms_norm

            return rms_norm(x, self.weight, self.eps)
        # On a CPU F.rms_norm runs as seven small operations; these are four, and a cast each way where x is narrow.
        wide = x.float()
        length = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), self._root)
        return wide.div(length).mul_(self._scaled_weight).to(x.dtype)

    def of_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm."""
        if self._is_fused:
            from specbench.engine.kernels.norm import add_rms_norm

            return add_rms_norm(x, delta, self.weight, self.eps)
        x = x + delta
        return x, self(x)

    def of_product(self, product: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A product in `dtype`, which may be left as partial sums (see Linear), and its norm."""
        if product.dim() == 2:
            return product, self(product)
        from specbench.engine.kernels.norm import sum_rms_norm

        return sum_rms_norm(product, self.weight, self.eps, dtype)
