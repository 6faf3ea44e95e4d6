"""The optimizer: Muon on the matrices inside layers, AdamW on everything else.

Matrices of one shape are orthogonalized together as one batch, so a step is some hundred kernels instead of thousands,
and nothing here waits for the device: the whole step can be captured in a graph.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_LEAVES = ("wq_du", "wk_dv", "wv_dv", "wo_ud", "w13_dn", "w2_md", "input_proj", "w13_weight", "w2_weight",
               "shared_w13_weight", "shared_w2_weight")  # fmt: skip
MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
_A, _B, _C = 3.4445, -4.7750, 2.0315


def leaf_name(name: str) -> str:
    """`...attn.wq_du.weight` -> `wq_du`; `...experts.w13_weight` -> `w13_weight`."""
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def orthogonalized(batch: Tensor) -> Tensor:
    """[n, rows, columns] -> the nearest matrices with equal singular values, roughly, in bf16."""
    x = batch.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if is_tall else x


class MatrixGroup:
    """All matrices of one shape, with their momentum stacked."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.shape = parameters[0].shape[-2:]
        self.counts = [parameter.numel() // self.shape.numel() for parameter in parameters]
        # [total matrices, rows, columns]
        self.momentum = torch.zeros(sum(self.counts), *self.shape, device=parameters[0].device)

    @torch.no_grad()
    def step(self, rate: Tensor, weight_decay: float) -> None:
        """`rate` is a scalar tensor on the device."""
        gradient = torch.cat([parameter.grad.view(-1, *self.shape) for parameter in self.parameters])
        self.momentum.lerp_(gradient, 1.0 - MOMENTUM)
        update = orthogonalized(torch.lerp(gradient, self.momentum, MOMENTUM)).float()
        update = update * (-rate * 0.2 * max(self.shape) ** 0.5)
        torch._foreach_mul_(self.parameters, 1.0 - rate * weight_decay)
        pieces = [piece.view_as(p) for piece, p in zip(update.split(self.counts), self.parameters, strict=True)]
        torch._foreach_add_(self.parameters, pieces)


class Optimizer:
    """Both optimizers under one learning-rate factor."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, weight_decay: float) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        shapes: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in trained:
            if leaf_name(name) in MUON_LEAVES:
                shapes[parameter.shape[-2:]].append(parameter)
        self.groups = [MatrixGroup(parameters) for parameters in shapes.values()]
        rest = [(name, p) for name, p in trained if leaf_name(name) not in MUON_LEAVES]
        device = trained[0][1].device
        self.weight_decay = weight_decay
        self.rates = (muon_rate, adam_rate)
        self.muon_rate = torch.tensor(muon_rate, device=device)
        self.adam_rate = torch.tensor(adam_rate, device=device)
        decayed = [p for name, p in rest if p.ndim == 2]
        plain = [p for name, p in rest if p.ndim != 2]
        self.adam_parameters = decayed + plain
        is_cuda = device.type == "cuda"
        self.adam = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=self.adam_rate, betas=(0.9, 0.95), eps=1e-10, capturable=is_cuda, fused=is_cuda,
        )  # fmt: skip

    def set_factor(self, factor: float) -> None:
        """Scales both learning rates; takes effect in captured steps too."""
        self.muon_rate.fill_(self.rates[0] * factor)
        self.adam_rate.fill_(self.rates[1] * factor)

    def step(self) -> None:
        for group in self.groups:
            group.step(self.muon_rate, self.weight_decay)
        # Muon does not see the gradient's size, so only AdamW's part is clipped.
        nn.utils.clip_grad_norm_(self.adam_parameters, 1.0, foreach=True)
        self.adam.step()

    def clear(self) -> None:
        for group in self.groups:
            for parameter in group.parameters:
                parameter.grad = None
        self.adam.zero_grad(set_to_none=True)
