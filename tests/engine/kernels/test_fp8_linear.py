"""The product with FP8 codes equals the one with what they mean: in the interpreter, and on a GPU in bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from specbench.engine.kernels.code_plan import CodePlan
from specbench.engine.kernels.fp8_linear import (
    can_gate,
    converted,
    fp8_gated_product,
    fp8_numbers,
    fp8_product,
    pack_fp8,
)
from specbench.engine.layers.linear import Fp8Linear, Fp8Matrix, make_linear
from tests.engine.kernels.test_code_plan import PLANS, rows_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
#: On a GPU all in bf16 and one in fp32.
CASES = [(plan, DTYPE) for plan in PLANS] + [(PLANS[1], torch.float32)] * torch.cuda.is_available()


def draw(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, Fp8Matrix, torch.Tensor]:
    """x and the bias in numbers that bf16 has."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator).bfloat16().to(DEVICE)
    codes = (16 * torch.randn(num_outputs, num_inputs, generator=generator)).to(torch.float8_e4m3fn).to(DEVICE)
    scale = (torch.rand(num_outputs, num_inputs // 128, generator=generator) / 100).to(DEVICE)
    return x, Fp8Matrix(codes, scale), torch.randn(num_outputs, generator=generator).bfloat16().to(DEVICE)


@pytest.mark.parametrize(("plan", "dtype"), CASES, ids=str)
def test_product(plan: CodePlan, dtype: torch.dtype) -> None:
    has_bias = plan.num_splits != 2
    num_rows, num_outputs = rows_of(plan), 2 * plan.block_outputs - 27
    x, matrix, bias = draw(num_rows, num_outputs, 384)
    weight = converted(matrix.codes, matrix.scale)
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0.0)
    packed = pack_fp8(matrix.codes, matrix.scale)
    sums = fp8_product(x.to(dtype), packed, bias.to(dtype) if has_bias else None, plan, torch.float32)
    assert sums.dtype == torch.float32 and sums.shape == (plan.num_splits, num_rows, num_outputs)
    torch.testing.assert_close(sums.sum(0).double(), expected, rtol=1e-5, atol=2e-5)


def test_every_code_means_what_its_type_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    codes.view(torch.uint8)[:, -1] = 0  # NaN
    packed = pack_fp8(codes.to(DEVICE), torch.ones(2, 1, device=DEVICE))
    assert torch.equal(fp8_numbers(packed, DTYPE).float().cpu(), codes.float())
    x = torch.eye(128, device=DEVICE, dtype=DTYPE)
    found = fp8_product(x, packed, None, CodePlan(64, 64, 0, 1, 4, 3), torch.float32)
    assert torch.equal(found[0].T.cpu(), codes.float())


def test_numbers_are_those_of_the_checkpoint() -> None:
    _, matrix, _ = draw(1, 100, 384)
    assert torch.equal(
        fp8_numbers(pack_fp8(matrix.codes, matrix.scale), torch.float32), converted(matrix.codes, matrix.scale)
    )
    assert converted(matrix.codes, matrix.scale)[3, 200] == matrix.codes[3, 200].float() * matrix.scale[3, 1]


def test_a_layer_takes_either_way_by_the_number_of_rows() -> None:
    x, matrix, bias = draw(700, 48, 128)
    layer = make_linear(matrix, bias.float())
    assert isinstance(layer, Fp8Linear) and layer.matrix is None
    expected = x.float() @ converted(matrix.codes, matrix.scale).T + bias.float()
    for num_rows in (1, 33, 700):
        torch.testing.assert_close(layer(x[:num_rows].float()), expected[:num_rows], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(layer.wide(x[:num_rows].float()), expected[:num_rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("plan", "has_bias"), [(CodePlan(64, 16, 0, 1, 4, 6), False), (CodePlan(128, 32, 16, 1, 8, 3), True)], ids=str
)
def test_gates_and_ups(plan: CodePlan, has_bias: bool) -> None:
    x, matrix, bias = draw(rows_of(plan), 384, 256)
    packed = pack_fp8(matrix.codes, matrix.scale)
    gate, up = (x.double() @ converted(matrix.codes, matrix.scale).double().T + bias.double() * has_bias).chunk(2, 1)
    found = fp8_gated_product(x.to(DTYPE), packed, bias.to(DTYPE) if has_bias else None, plan)
    assert found.dtype == DTYPE
    tolerance = 1e-5 if torch.float32 == DTYPE else 2e-2
    torch.testing.assert_close(found.double(), F.silu(gate) * up, rtol=tolerance, atol=tolerance)


def test_what_can_be_gated() -> None:
    assert can_gate(CodePlan(64, 16, 0, 1, 4, 6), 384)
    assert not can_gate(CodePlan(64, 16, 0, 2, 4, 6), 384)  # parts of sums
    assert not can_gate(CodePlan(128, 16, 0, 1, 8, 6), 448)  # not whole
    assert not can_gate(CodePlan(128, 16, 0, 1, 4, 6), 384)  # more units than warps
    _, matrix, _ = draw(1, 128, 128)
    layer = Fp8Linear(matrix)
    x = torch.randn(3, 128, device=DEVICE)
    gate, up = layer(x).chunk(2, 1)
    activated = layer.gated(x)
    assert activated is not None and layer.gated(x.new_zeros(400, 128)) is None
    torch.testing.assert_close(activated, F.silu(gate) * up, rtol=1e-5, atol=1e-5)
