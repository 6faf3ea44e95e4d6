"""The two ways through the experts give the same sums; the router weighs what it should."""

from __future__ import annotations

import pytest
import torch

from specbench.engine.layers.linear import Linear
from specbench.engine.layers.mlp import GatedMLP, deinterleave
from specbench.engine.layers.moe import MixtureOfExperts, SharedExpertRouter

EXPERTS, SHARED, HIDDEN, WIDTH = 6, 2, 16, 8


def make_experts(logit_shift: float = 0.0, dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS + SHARED, HIDDEN)
    weight[:, 0] += logit_shift
    router = SharedExpertRouter(weight, torch.randn(EXPERTS), 2, SHARED, torch.tensor([1.7]))
    gate_up, down = torch.randn(EXPERTS + SHARED, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS + SHARED, WIDTH, HIDDEN)
    return MixtureOfExperts(router, gate_up.to(dtype), down.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_grouped_equals_dense(num_tokens: int, dtype: torch.dtype) -> None:
    experts = make_experts(dtype=dtype)
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    chosen, weights = experts._router(x)
    grouped, dense = experts.grouped(x, chosen, weights), experts.dense(x, chosen, weights)
    assert grouped.dtype == dense.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(grouped, dense, rtol=tolerance, atol=tolerance * float(dense.abs().max()))


def test_many_tokens_are_grouped_and_few_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts()
    x = torch.randn(5000, HIDDEN)
    together = experts(x)
    monkeypatch.setattr(MixtureOfExperts, "grouped", lambda *arguments: pytest.fail("few tokens were sorted"))
    torch.testing.assert_close(experts(x[:1]), together[:1])
    with pytest.raises(pytest.fail.Exception):
        experts(x)


def test_shared_experts_are_always_chosen_and_weights_sum_to_the_scale() -> None:
    chosen, weights = make_experts()._router(torch.randn(50, HIDDEN))
    assert ((chosen >= EXPERTS).sum(1) == SHARED).all()
    assert all(len(set(row)) == 4 for row in chosen.tolist())
    torch.testing.assert_close(weights.sum(1), torch.full((50,), 1.7))


def test_very_negative_logits_still_weigh() -> None:
    x = torch.zeros(1, HIDDEN)
    x[0, 0] = 1.0
    _, weights = make_experts(logit_shift=-500.0)._router(x)
    torch.testing.assert_close(weights.sum(1), torch.tensor([1.7]))


def test_deinterleave_puts_gates_first() -> None:
    rows = torch.arange(6.0)[:, None].repeat(1, 3)
    assert deinterleave(rows)[:, 0].tolist() == [0, 2, 4, 1, 3, 5]
    stacked = deinterleave(torch.stack((rows, rows + 10)))
    assert stacked[1, :, 0].tolist() == [10, 12, 14, 11, 13, 15]


def test_gated_mlp_is_down_of_silu_gate_times_up() -> None:
    gate_up, down, x = torch.randn(2 * WIDTH, HIDDEN), torch.randn(HIDDEN, WIDTH), torch.randn(3, HIDDEN)
    expected = (torch.nn.functional.silu(x @ gate_up[:WIDTH].T) * (x @ gate_up[WIDTH:].T)) @ down.T
    torch.testing.assert_close(GatedMLP(Linear(gate_up), Linear(down))(x), expected)
