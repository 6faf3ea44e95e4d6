"""Experts in codes equal those of the numbers that they stand for: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.expert_codes import run_fp8_experts, run_nvfp4_experts
from specbench.engine.kernels.experts import run_experts_reference
from specbench.engine.kernels.router import choose_by_softmax
from specbench.engine.layers.linear import Fp8Stack, Nvfp4Stack
from specbench.engine.layers.moe import CodedExpertStack, CodedStack
from tests.engine.kernels.test_experts import DEVICE, HAS_GPU, scores_of

RUNS = {"nvfp4": run_nvfp4_experts, "fp8": run_fp8_experts}


def random_stack(kind: str, num_experts: int, num_rows: int, width: int) -> CodedStack:
    if kind == "fp8":
        codes = (8 * torch.randn(num_experts, num_rows, width)).to(torch.float8_e4m3fn)
        scale = (torch.rand(num_experts, num_rows, width // 128) + 0.5) * width**-0.5 / 8
        return Fp8Stack(codes.to(DEVICE), scale.to(DEVICE))
    codes = torch.randint(256, (num_experts, num_rows, width // 2), dtype=torch.uint8)
    block_scale = (torch.rand(num_experts, num_rows, width // 16) + 0.5).to(torch.float8_e4m3fn)
    scale = (torch.rand(num_experts) + 0.5) * width**-0.5 / 3
    return Nvfp4Stack(codes.to(DEVICE), block_scale.to(DEVICE), scale.to(DEVICE))


def part(stack: CodedStack, own: slice) -> CodedStack:
    if isinstance(stack, Fp8Stack):
        return Fp8Stack(stack.codes[own], stack.scale[own])
    return Nvfp4Stack(stack.codes[own], stack.block_scale[own], stack.scale[own])


def matrices(stack: CodedStack) -> torch.Tensor:
    return torch.stack([stack.matrix(expert, torch.float64) for expert in range(len(stack.scale))])


def check_run(
    kind: str, num_rows: int, num_experts: int, width: int, hidden: int, dtype: torch.dtype, own: slice
) -> None:
    x = torch.randn(num_rows, hidden).to(DEVICE, dtype)
    gate_up, down = random_stack(kind, num_experts, 2 * width, hidden), random_stack(kind, num_experts, hidden, width)
    logits = torch.randn(num_rows, num_experts, device=DEVICE) + torch.linspace(0, 6, num_experts, device=DEVICE)
    choice = choose_by_softmax(scores_of(logits), 3, is_renormalised=True)
    gate_up, down, first = part(gate_up, own), part(down, own), own.start or 0
    torch.use_deterministic_algorithms(True)  # outputs are NaN until they are written
    try:
        output = RUNS[kind](x, choice, gate_up, down, first)  # type: ignore[operator]
    finally:
        torch.use_deterministic_algorithms(False)
    downs = matrices(down).transpose(1, 2)
    expected = run_experts_reference(x.double(), choice, matrices(gate_up), downs, first)
    tolerance = 2e-6 if dtype == torch.float32 else 8e-3
    assert (output.double() - expected).norm() <= tolerance * expected.norm()
    slow = CodedExpertStack(gate_up, down, first)(x.float(), choice.experts.long(), choice.weights)
    assert (slow.double() - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
@pytest.mark.parametrize(("num_rows", "own"), [(1, slice(None)), (1, slice(2, 4)), (9, slice(None)), (9, slice(0, 2))])
def test_run(kind: str, num_rows: int, own: slice) -> None:
    check_run(kind, num_rows, 4, 128, 128, torch.float32, own)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
@pytest.mark.parametrize("own", [slice(None), slice(33, 66)])
@pytest.mark.parametrize("num_rows", [1, 16, 144, 1000])
def test_run_on_a_gpu(kind: str, num_rows: int, own: slice, dtype: torch.dtype) -> None:
    check_run(kind, num_rows, 66, 256, 512, dtype, own)
