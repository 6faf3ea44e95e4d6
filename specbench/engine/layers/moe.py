"""Mixture of experts.

Shared experts, where a model has them, are the last experts of one stack and are chosen for every token. On a CPU few
tokens run through all experts as one wide MLP (three large operations); many are sorted by expert. On a GPU kernels
place tokens by expert, and very many are sorted. All ways give the same sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from specbench.engine.kernels.experts import Choice

#: Above any sigmoid plus bias: makes the router choose the shared experts always.
_ALWAYS = 1e4
#: Multiply-adds that one call may spend on experts that its tokens did not choose: what sorting costs, on a CPU core.
_MAX_WASTED_MACS = 2_000_000


class Router(Protocol):
    """Chooses experts for each token, and weighs them."""

    #: Experts per token, shared ones included.
    num_chosen: int

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> expert ids [T, chosen], weights [T, chosen] fp32."""
        ...

    def choose_on_gpu(self, x: Tensor) -> Choice:
        """The same as the experts' kernels take it."""
        ...


class SoftmaxRouter:
    """Chooses experts by softmax over all of them, weighs them by it."""

    def __init__(self, weight: Tensor, num_chosen: int, is_renormalised: bool) -> None:
        #: [experts, hidden] fp32
        self._weight = weight
        self._is_renormalised = is_renormalised
        self.num_chosen = num_chosen

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = F.linear(x.float(), self._weight).softmax(-1).topk(self.num_chosen, dim=-1)
        if self._is_renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights

    def choose_on_gpu(self, x: Tensor) -> Choice:
        from specbench.engine.kernels.experts import choose_by_softmax

        logits = _logits_on_gpu(x, self._weight)
        return choose_by_softmax(logits, self.num_chosen, is_renormalised=self._is_renormalised)


class SharedExpertRouter:
    """Chooses experts by sigmoid plus bias, weighs them by the sigmoid's share among the chosen and the shared."""

    def __init__(self, weight: Tensor, bias: Tensor, num_routed_per_token: int, num_shared: int, scale: Tensor) -> None:
        #: [experts, hidden] fp32, shared experts last
        self._weight = weight
        #: [experts] fp32
        self._bias = torch.cat((bias, bias.new_full((num_shared,), _ALWAYS)))
        #: [1] fp32
        self._scale = scale
        self.num_chosen = num_routed_per_token + num_shared

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(x.float(), self._weight)
        chosen = (torch.sigmoid(logits) + self._bias).topk(self.num_chosen, dim=-1, sorted=False).indices
        # Through logarithms: sigmoids of strongly negative logits would all be zero.
        weights = F.logsigmoid(logits.gather(1, chosen)).softmax(-1) * self._scale
        return chosen, weights

    def choose_on_gpu(self, x: Tensor) -> Choice:
        from specbench.engine.kernels.experts import choose_by_sigmoid

        return choose_by_sigmoid(_logits_on_gpu(x, self._weight), self._bias, self._scale, self.num_chosen)


def _logits_on_gpu(x: Tensor, weight: Tensor) -> Tensor:
    """[T, hidden], [experts, hidden] fp32 -> [T, experts] fp32."""
    from specbench.engine.kernels.experts import MAX_ROUTER_ROWS, router_logits

    return router_logits(x, weight) if len(x) <= MAX_ROUTER_ROWS else F.linear(x.float(), weight)


class MixtureOfExperts:
    """sum over chosen experts of weight * down(silu(gate(x)) * up(x))."""

    def __init__(self, router: Router, gate_up: Tensor, down: Tensor) -> None:
        self._router = router
        #: [experts, 2 * width, hidden], gates first
        self._gate_up = gate_up
        #: [experts, width, hidden]
        self._down = down
        self._num_experts, self._width, hidden = down.shape
        wasted_macs = max((self._num_experts - router.num_chosen) * 3 * self._width * hidden, 1)
        #: Most tokens that run through all experts.
        self._max_dense_tokens = _MAX_WASTED_MACS // wasted_macs

    def __call__(self, x: Tensor) -> Tensor:
        # x: [T, hidden]
        if x.is_cuda:
            return self._on_gpu(x)
        chosen, weights = self._router(x)
        if x.shape[0] <= self._max_dense_tokens:
            return self.dense(x, chosen, weights)
        return self.grouped(x, chosen, weights)

    def _on_gpu(self, x: Tensor) -> Tensor:
        from specbench.engine.kernels.experts import MAX_ROWS, run_experts

        if len(x) > MAX_ROWS and x.dtype == torch.bfloat16:  # in which alone torch has grouped products
            return self.grouped(x, *self._router(x))
        outputs = [
            run_experts(rows, self._router.choose_on_gpu(rows), self._gate_up, self._down) for rows in x.split(MAX_ROWS)
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def dense(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Every expert for every token; those not chosen weigh nothing."""
        # chosen, weights: [T, chosen]
        num_tokens = x.shape[0]
        weight_of = weights.new_zeros(num_tokens, self._num_experts).scatter_(1, chosen, weights).to(x.dtype)
        gate_up = F.linear(x, self._gate_up.flatten(0, 1)).view(num_tokens, self._num_experts, 2, self._width)
        activated = F.silu(gate_up[:, :, 0]) * gate_up[:, :, 1] * weight_of.unsqueeze(-1)
        return activated.view(num_tokens, -1) @ self._down.flatten(0, 1)

    def grouped(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens sorted by expert, one product per expert."""
        # chosen, weights: [T, chosen]
        num_chosen = chosen.shape[1]
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(self._num_experts, device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
        gate_up = F.grouped_mm(x[order // num_chosen], self._gate_up.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate) * up * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        outputs = F.grouped_mm(activated, self._down, offs=ends)
        in_order = torch.empty_like(outputs)
        in_order[order] = outputs
        return in_order.view(-1, num_chosen, x.shape[1]).sum(1)
