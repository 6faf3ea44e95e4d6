"""Mixture of experts: a router, and one or two stacks of experts.

Shared experts, where a model has them, are the last experts of one stack and are chosen for every token. On a CPU few
tokens run through all experts as one wide MLP (three large operations); many are sorted by expert. On a GPU kernels
place tokens by expert, and very many are sorted. All ways give the same sums.

Ranks share experts by width, each having a part of every expert, or have whole ones. Of shared experts each has a part
of the width either way: every token chooses them.

Belongs here: the layer: stacks, shares of ranks, which way is taken. Does not belong here: kernels (kernels/experts.py,
kernels/router.py), which tensors a family's experts are (models/).
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine.layers.linear import Fp8Stack, Nvfp4Stack

if TYPE_CHECKING:
    from specbench.engine.kernels.router import Choice, RouterWeight

#: Above any sigmoid plus bias: makes the router choose the shared experts always.
_ALWAYS = 1e4
#: Multiply-adds that one call may spend on experts that its tokens did not choose: what sorting costs, on a CPU core.
_MAX_WASTED_MACS = 2_000_000
#: Rows whose entries a reader adds up in less time than a launch takes.
_MAX_PARTIAL_ROWS = 64


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
        self._on_gpu = _weight_on_gpu(weight)
        self._is_renormalised = is_renormalised
        self.num_chosen = num_chosen

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = F.linear(x.float(), self._weight).softmax(-1).topk(self.num_chosen, dim=-1)
        if self._is_renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return chosen, weights

    def choose_on_gpu(self, x: Tensor) -> Choice:
        from specbench.engine.kernels.router import choose_by_softmax, router_scores

        assert self._on_gpu is not None
        scores = router_scores(x, self._on_gpu)
        return choose_by_softmax(scores, self.num_chosen, is_renormalised=self._is_renormalised)


class SharedExpertRouter:
    """Chooses experts by sigmoid plus bias, weighs them by the sigmoid's share among the chosen and the shared."""

    def __init__(self, weight: Tensor, bias: Tensor, num_routed_per_token: int, num_shared: int, scale: Tensor) -> None:
        #: [experts, hidden] fp32, shared experts last
        self._weight = weight
        self._on_gpu = _weight_on_gpu(weight)
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
        from specbench.engine.kernels.router import choose_by_sigmoid, router_scores

        assert self._on_gpu is not None
        return choose_by_sigmoid(router_scores(x, self._on_gpu), self._bias, self._scale, self.num_chosen)


def _weight_on_gpu(weight: Tensor) -> RouterWeight | None:
    """[experts, hidden] fp32, as kernels want it."""
    if not weight.is_cuda:
        return None
    from specbench.engine.kernels.router import RouterWeight

    return RouterWeight.of(weight)


#: Matrices of experts in codes.
CodedStack = Fp8Stack | Nvfp4Stack


class ExpertStack:
    """Experts of one width that lie together: all of them, or those that this rank has."""

    def __init__(
        self, gate_up: Tensor, down: Tensor, num_chosen: float, first_expert: int = 0, *, are_all: bool = True
    ) -> None:
        """num_chosen: how many of these a token chooses on average. first_expert: the router's id of the first.
        are_all: there are no others."""
        #: [experts, 2 * width, hidden], gates first
        self.gate_up = gate_up
        #: [experts, width, hidden]
        self.down = down
        self.first_expert = first_expert
        self.are_all = are_all
        self.num_experts, self.width, hidden = down.shape
        wasted_macs = max(int((self.num_experts - num_chosen) * 3 * self.width * hidden), 1)
        #: Most tokens that run through all of these.
        self._max_dense_tokens = _MAX_WASTED_MACS // wasted_macs

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden], [T, chosen], [T, chosen] fp32 -> [T, hidden]: what these experts add."""
        run = self.dense if x.shape[0] <= self._max_dense_tokens else self.grouped
        return run(x, chosen, weights)

    def by_kernels(self, x: Tensor, choice: Choice) -> Tensor:
        """The same on a GPU, of few rows."""
        from specbench.engine.kernels.experts import run_experts

        return run_experts(x, choice, self.gate_up, self.down, self.first_expert)

    def partial_sums(self, x: Tensor, choice: Choice) -> Tensor:
        """The same as fp32 [chosen, T, hidden], whose sum over the chosen it is, where all experts are here."""
        from specbench.engine.kernels.experts import partial_sums

        assert self.are_all
        return partial_sums(x, choice, self.gate_up, self.down)

    def dense(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Every expert for every token; those not chosen weigh nothing."""
        # chosen, weights: [T, chosen]
        num_tokens = x.shape[0]
        # A column behind the last expert takes what others' weigh.
        weight_of = weights.new_zeros(num_tokens, self.num_experts + (not self.are_all))
        weight_of = weight_of.scatter_(1, self._places(chosen), weights)[:, : self.num_experts].to(x.dtype)
        gate_up = F.linear(x, self.gate_up.flatten(0, 1)).view(num_tokens, self.num_experts, 2, self.width)
        activated = F.silu(gate_up[:, :, 0]) * gate_up[:, :, 1] * weight_of.unsqueeze(-1)
        return activated.view(num_tokens, -1) @ self.down.flatten(0, 1)

    def grouped(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens sorted by expert, one product per expert."""
        # chosen, weights: [T, chosen]
        num_chosen = chosen.shape[1]
        places = self._places(chosen)
        by_expert, order = places.flatten().sort(stable=True)
        experts = torch.arange(self.num_experts, device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True).to(torch.int32)
        gate_up = F.grouped_mm(x[order // num_chosen], self.gate_up.transpose(1, 2), offs=ends)
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate) * up * weights.flatten()[order].unsqueeze(-1).to(x.dtype)
        outputs = F.grouped_mm(activated, self.down, offs=ends)
        in_order = torch.empty_like(outputs)
        in_order[order] = outputs
        in_order = in_order.view(-1, num_chosen, x.shape[1])
        if not self.are_all:  # no product writes the rows of others
            in_order.masked_fill_((places == self.num_experts).unsqueeze(-1), 0.0)
        return in_order.sum(1)

    def _places(self, chosen: Tensor) -> Tensor:
        """Expert ids -> places in this stack; behind its last one for an expert that is not in it."""
        return chosen if self.are_all else _places(chosen, self.first_expert, self.num_experts)


class CodedExpertStack:
    """The same in codes, each converted where it is used."""

    def __init__(self, gate_up: CodedStack, down: CodedStack, first_expert: int = 0) -> None:
        #: of [experts, 2 * width, hidden], gates first
        self.gate_up = gate_up
        #: of [experts, hidden, width]
        self.down = down
        self.first_expert = first_expert

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """As ExpertStack's, an expert at a time: for tests of what is on a GPU."""
        places = _places(chosen, self.first_expert, len(self.down.codes))
        summed = torch.zeros_like(x)
        for expert in range(len(self.down.codes)):
            rows, slots = (places == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[rows], self.gate_up.matrix(expert, x.dtype)).chunk(2, -1)
            activated = F.silu(gate) * up * weights[rows, slots].unsqueeze(-1).to(x.dtype)
            summed.index_add_(0, rows, F.linear(activated, self.down.matrix(expert, x.dtype)))
        return summed

    def by_kernels(self, x: Tensor, choice: Choice) -> Tensor:
        """The same on a GPU, of few rows."""
        from specbench.engine.kernels.expert_codes import run_fp8_experts, run_nvfp4_experts

        if isinstance(self.gate_up, Fp8Stack):
            assert isinstance(self.down, Fp8Stack)
            return run_fp8_experts(x, choice, self.gate_up, self.down, self.first_expert)
        assert isinstance(self.down, Nvfp4Stack)
        return run_nvfp4_experts(x, choice, self.gate_up, self.down, self.first_expert)


def _places(chosen: Tensor, first_expert: int, num_experts: int) -> Tensor:
    places = chosen - first_expert
    return places.where((places >= 0) & (places < num_experts), num_experts)


class MixtureOfExperts:
    """sum over chosen experts of weight * down(silu(gate(x)) * up(x))."""

    def __init__(self, router: Router, *stacks: ExpertStack | CodedExpertStack) -> None:
        """stacks: an expert is in one of them, or on another rank."""
        self._router = router
        self._stacks = stacks

    def __call__(self, x: Tensor) -> Tensor:
        # x: [T, hidden]
        if x.is_cuda:
            return self._on_gpu(x)
        chosen, weights = self._router(x)
        return reduce(torch.add, (stack(x, chosen, weights) for stack in self._stacks))

    def partial_sums(self, x: Tensor) -> Tensor:
        """The same, or for few rows on a GPU fp32 [chosen, T, hidden], whose sum over the chosen it is: for kernels
        that take either."""
        stack = self._stacks[0]
        if not x.is_cuda or len(x) > _MAX_PARTIAL_ROWS or not isinstance(stack, ExpertStack) or not stack.are_all:
            return self(x)
        return stack.partial_sums(x, self._router.choose_on_gpu(x))

    def _on_gpu(self, x: Tensor) -> Tensor:
        from specbench.engine.kernels.experts import MAX_ROWS

        plain = [stack for stack in self._stacks if isinstance(stack, ExpertStack)]
        if len(x) > MAX_ROWS and x.dtype == torch.bfloat16 and len(plain) == len(self._stacks):
            # torch has grouped products in this type alone, and none with codes.
            chosen, weights = self._router(x)
            return reduce(torch.add, (stack.grouped(x, chosen, weights) for stack in plain))
        outputs = [self._by_kernels(rows) for rows in x.split(MAX_ROWS)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _by_kernels(self, x: Tensor) -> Tensor:
        choice = self._router.choose_on_gpu(x)
        return reduce(torch.add, (stack.by_kernels(x, choice) for stack in self._stacks))
