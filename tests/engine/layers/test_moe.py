"""The two ways through the experts give the same sums; the router weighs what it should."""

from __future__ import annotations

import pytest
import torch

from specbench.engine.layers.linear import Linear
from specbench.engine.layers.mlp import GatedMLP, deinterleave
from specbench.engine.layers.moe import ExpertStack, MixtureOfExperts, SharedExpertRouter

EXPERTS, SHARED, HIDDEN, WIDTH = 6, 2, 16, 8


def make_experts(logit_shift: float = 0.0, dtype: torch.dtype = torch.float32) -> MixtureOfExperts:
    torch.manual_seed(0)
    weight = torch.randn(EXPERTS + SHARED, HIDDEN)
    weight[:, 0] += logit_shift
    router = SharedExpertRouter(weight, torch.randn(EXPERTS), 2, SHARED, torch.tensor([1.7]))
    gate_up, down = torch.randn(EXPERTS + SHARED, 2 * WIDTH, HIDDEN), torch.randn(EXPERTS + SHARED, WIDTH, HIDDEN)
    return MixtureOfExperts(router, ExpertStack(gate_up.to(dtype), down.to(dtype), router.num_chosen))


def of_ranks(experts: MixtureOfExperts, num_ranks: int) -> list[MixtureOfExperts]:
    """The same as ranks have it: whole routed experts, and a part of the width of the shared ones."""
    (all_of_them,) = experts._stacks
    gate_up, down = all_of_them.gate_up, all_of_them.down
    found, share, width = [], EXPERTS // num_ranks, WIDTH // num_ranks
    for rank in range(num_ranks):
        own, columns = slice(rank * share, (rank + 1) * share), slice(rank * width, (rank + 1) * width)
        shared = gate_up[EXPERTS:].unflatten(1, (2, WIDTH))[:, :, columns].flatten(1, 2)
        stacks = (
            ExpertStack(gate_up[own], down[own], 2 / num_ranks, own.start, are_all=False),
            ExpertStack(shared, down[EXPERTS:, columns].contiguous(), SHARED, EXPERTS, are_all=False),
        )
        found.append(MixtureOfExperts(experts._router, *stacks))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_grouped_equals_dense(num_tokens: int, dtype: torch.dtype) -> None:
    experts = make_experts(dtype=dtype)
    x = torch.randn(num_tokens, HIDDEN).to(dtype)
    chosen, weights = experts._router(x)
    (stack,) = experts._stacks
    grouped, dense = stack.grouped(x, chosen, weights), stack.dense(x, chosen, weights)
    assert grouped.dtype == dense.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(grouped, dense, rtol=tolerance, atol=tolerance * float(dense.abs().max()))


@pytest.mark.parametrize("way", ["grouped", "dense"])
@pytest.mark.parametrize("num_ranks", [2, 1])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_ranks_with_whole_experts_add_up(num_tokens: int, num_ranks: int, way: str) -> None:
    experts, x = make_experts(), torch.randn(num_tokens, HIDDEN)
    chosen, weights = experts._router(x)
    outputs = [getattr(stack, way)(x, chosen, weights) for one in of_ranks(experts, num_ranks) for stack in one._stacks]
    torch.testing.assert_close(sum(outputs), experts(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sum(one(x) for one in of_ranks(experts, num_ranks)), experts(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["grouped", "dense"])
def test_a_rank_whose_experts_no_token_chose_adds_nothing(way: str) -> None:
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    try:
        stack = ExpertStack(torch.randn(3, 2 * WIDTH, HIDDEN), torch.randn(3, WIDTH, HIDDEN), 1.0, are_all=False)
        chosen, weights = torch.tensor([[3, 4], [5, 4]]), torch.ones(2, 2)
        assert getattr(stack, way)(torch.randn(2, HIDDEN), chosen, weights).eq(0).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_many_tokens_are_grouped_and_few_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts()
    x = torch.randn(5000, HIDDEN)
    together = experts(x)
    monkeypatch.setattr(ExpertStack, "grouped", lambda *arguments: pytest.fail("few tokens were sorted"))
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
