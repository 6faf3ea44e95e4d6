"""Experts chosen and run equal plain torch: in Triton's interpreter on a CPU, and on a GPU in both dtypes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.experts import partial_sums, run_experts, run_experts_reference
from specbench.engine.kernels.router import (
    Choice,
    RouterScores,
    RouterWeight,
    choose_by_sigmoid,
    choose_by_sigmoid_reference,
    choose_by_softmax,
    choose_by_softmax_reference,
    router_scores,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]


def scores_of(logits: torch.Tensor) -> RouterScores:
    return RouterScores(logits[None], torch.zeros(logits.shape[1], dtype=torch.int32, device=logits.device))


def assert_same_choice(choice: Choice, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    experts, weights = expected
    order, expected_order = choice.experts.argsort(1), experts.argsort(1)
    assert torch.equal(choice.experts.long().gather(1, order), experts.gather(1, expected_order))
    torch.testing.assert_close(choice.weights.gather(1, order), weights.gather(1, expected_order), rtol=1e-5, atol=1e-6)
    # Every entry is in its expert's line, once.
    assert torch.equal(choice.counts.long(), experts.flatten().bincount(minlength=len(choice.counts)))
    of_entry = choice.experts.flatten().tolist()
    for expert, count in enumerate(choice.counts.tolist()):
        found = sorted(choice.entries[expert, :count].tolist())
        assert found == [entry for entry, other in enumerate(of_entry) if other == expert]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=ON_GPU)])
@pytest.mark.parametrize(("num_rows", "hidden"), [(1, 600), (7, 130), (40, 300), (270, 40)])
def test_router_scores(num_rows: int, hidden: int, dtype: torch.dtype) -> None:
    """In fp32 throughout, whatever the rows are in."""
    x, weight = torch.randn(num_rows, hidden, device=DEVICE).to(dtype), torch.randn(19, hidden, device=DEVICE)
    scores = router_scores(x, RouterWeight.of(weight))
    torch.testing.assert_close(scores.logits.sum(0).double(), x.double() @ weight.double().T, rtol=1e-5, atol=3e-5)
    assert scores.counts.tolist() == [0] * 19


@pytest.mark.parametrize("is_renormalised", [False, True])
def test_choice_by_softmax(is_renormalised: bool) -> None:
    logits = torch.randn(5, 19, device=DEVICE) * 3
    assert_same_choice(
        choose_by_softmax(scores_of(logits), 3, is_renormalised=is_renormalised),
        choose_by_softmax_reference(logits, 3, is_renormalised=is_renormalised),
    )


@pytest.mark.parametrize("shift", [0.0, -500.0])
def test_choice_by_sigmoid(shift: float) -> None:
    logits, bias = torch.randn(5, 12, device=DEVICE) * 3, torch.randn(12, device=DEVICE)
    bias[-2:] = 1e4
    logits[0] += shift
    scale = torch.tensor([1.7], device=DEVICE)
    if shift:
        logits[0], bias[:10] = shift, torch.arange(10)
    choice = choose_by_sigmoid(scores_of(logits), bias, scale, 5)
    assert_same_choice(choice, choose_by_sigmoid_reference(logits, bias, scale, 5))
    assert ((choice.experts >= 10).sum(1) == 2).all()


def test_ties_go_to_the_lowest_expert() -> None:
    choice = choose_by_softmax(scores_of(torch.zeros(1, 6, device=DEVICE)), 2, is_renormalised=True)
    assert choice.experts.tolist() == [[0, 1]]


def check_run(
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    width: int,
    hidden: int,
    dtype: torch.dtype,
    own: slice = slice(None),
) -> None:
    """own: the experts that are here."""
    x = torch.randn(num_rows, hidden).to(DEVICE, dtype)
    gate_up = (torch.randn(num_experts, 2 * width, hidden) / hidden**0.5).to(DEVICE, dtype)
    down = (torch.randn(num_experts, width, hidden) / width**0.5).to(DEVICE, dtype)
    # Some experts are popular, some are never chosen.
    logits = torch.randn(num_rows, num_experts, device=DEVICE) + torch.linspace(0, 6, num_experts, device=DEVICE)
    choice = choose_by_softmax(scores_of(logits), num_chosen, is_renormalised=True)
    gate_up, down, first = gate_up[own], down[own], own.start or 0
    torch.use_deterministic_algorithms(True)  # outputs are NaN until they are written
    try:
        output = run_experts(x, choice, gate_up, down, first)
        parts = partial_sums(x, choice, gate_up, down) if own == slice(None) else None
    finally:
        torch.use_deterministic_algorithms(False)
    expected = run_experts_reference(x.double(), choice, gate_up.double(), down.double(), first)
    assert output.isfinite().all()
    if parts is not None:
        assert parts.shape == (num_chosen, num_rows, hidden) and parts.dtype == torch.float32
        torch.testing.assert_close(parts.sum(0), output.float(), rtol=2e-2, atol=2e-2)
    difference, tolerance = (output.double() - expected).norm(), 1e-6 if dtype == torch.float32 else 8e-3
    assert difference <= tolerance * expected.norm()


@pytest.mark.parametrize("num_rows", [1, 2, 47])
def test_run(num_rows: int) -> None:
    check_run(num_rows, 6, 3, 20, 36, torch.float32)


@pytest.mark.parametrize("own", [slice(0, 3), slice(3, 6), slice(4, 6)])
@pytest.mark.parametrize("num_rows", [1, 2, 47])
def test_entries_of_other_ranks_experts_are_left_out(num_rows: int, own: slice) -> None:
    check_run(num_rows, 6, 3, 20, 36, torch.float32, own)


def test_a_row_that_chose_no_expert_here_gets_nothing() -> None:
    choice = choose_by_softmax(scores_of(torch.tensor([[0.0, 0, 0, 0, 9, 9]], device=DEVICE)), 2, is_renormalised=True)
    gate_up, down = torch.randn(3, 16, 8, device=DEVICE), torch.randn(3, 8, 8, device=DEVICE)
    assert run_experts(torch.randn(1, 8, device=DEVICE), choice, gate_up, down).eq(0).all()


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("own", [slice(0, 33), slice(33, 66)])
@pytest.mark.parametrize("num_rows", [1, 2, 144, 1000])
def test_run_of_one_ranks_experts_on_a_gpu(num_rows: int, own: slice, dtype: torch.dtype) -> None:
    check_run(num_rows, 66, 8, 256, 512, dtype, own)


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=ON_GPU) for dtype in (torch.float32, torch.bfloat16)])
@pytest.mark.parametrize("num_rows", [1, 2, 16, 144, 576, 1000])
def test_run_on_a_gpu(num_rows: int, dtype: torch.dtype) -> None:
    check_run(num_rows, 66, 8, 256, 512, dtype)


def test_experts_exist_where_logits_are_no_numbers() -> None:
    choice = choose_by_softmax(scores_of(torch.full((2, 5), float("nan"), device=DEVICE)), 3, is_renormalised=True)
    assert ((choice.experts >= 0) & (choice.experts < 5)).all()
