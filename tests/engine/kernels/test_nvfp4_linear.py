"""The product with NVFP4 codes equals the one with what they mean: in the interpreter, and on a GPU in bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.code_plan import CodePlan
from specbench.engine.kernels.nvfp4_linear import (
    E2M1,
    converted_nvfp4,
    nvfp4_numbers,
    nvfp4_product,
    pack_nvfp4,
)
from specbench.engine.layers.linear import Nvfp4Linear, Nvfp4Matrix, make_linear
from tests.engine.kernels.test_code_plan import PLANS, rows_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float32
#: On a GPU all in bf16 and one in fp32.
CASES = [(plan, DTYPE) for plan in PLANS] + [(PLANS[1], torch.float32)] * torch.cuda.is_available()


def draw(num_rows: int, num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, Nvfp4Matrix, torch.Tensor]:
    """Every code with every sign, in both halves of a byte; x and the bias in numbers that bf16 has."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator).bfloat16().to(DEVICE)
    codes = torch.randint(256, (num_outputs, num_inputs // 2), generator=generator, dtype=torch.uint8).to(DEVICE)
    block_scale = (torch.rand(num_outputs, num_inputs // 16, generator=generator) * 8).to(torch.float8_e4m3fn)
    row_scale = (torch.rand(num_outputs, generator=generator) / 100).to(DEVICE)
    bias = torch.randn(num_outputs, generator=generator).bfloat16().to(DEVICE)
    return x, Nvfp4Matrix(codes, block_scale.to(DEVICE), row_scale), bias


def weight_of(matrix: Nvfp4Matrix) -> torch.Tensor:
    """[outputs, inputs] float64"""
    table = torch.tensor(E2M1, dtype=torch.float64, device=DEVICE)
    weight = torch.stack((table[(matrix.codes % 16).long()], table[(matrix.codes // 16).long()]), -1).flatten(1)
    return weight * matrix.block_scale.double().repeat_interleave(16, 1) * matrix.row_scale.double()[:, None]


@pytest.mark.parametrize(("plan", "dtype"), CASES, ids=str)
def test_product(plan: CodePlan, dtype: torch.dtype) -> None:
    has_bias = plan.num_splits != 2
    num_rows, num_outputs = rows_of(plan), 2 * plan.block_outputs - 27
    x, matrix, bias = draw(num_rows, num_outputs, 384)
    expected = x.double() @ weight_of(matrix).T + (bias.double() if has_bias else 0.0)
    packed = pack_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale)
    sums = nvfp4_product(x.to(dtype), packed, bias.to(dtype) if has_bias else None, plan, torch.float32)
    assert sums.dtype == torch.float32 and sums.shape == (plan.num_splits, num_rows, num_outputs)
    torch.testing.assert_close(sums.sum(0).double(), expected, rtol=1e-5, atol=2e-5)


def test_every_code_means_what_its_type_says_with_every_scale() -> None:
    codes = (torch.arange(16) * 17).to(torch.uint8).repeat(256, 4).to(DEVICE)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.where(scales.float().isnan(), 0.0, scales.float()).to(torch.float8_e4m3fn).to(DEVICE)
    matrix = Nvfp4Matrix(codes, scales[:, None].expand(256, 8).contiguous(), torch.ones(256, device=DEVICE))
    packed = pack_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale)
    assert torch.equal(nvfp4_numbers(packed, DTYPE).double(), weight_of(matrix))
    x = torch.eye(128, device=DEVICE, dtype=DTYPE)
    found = nvfp4_product(x, packed, None, CodePlan(64, 64, 0, 1, 4, 3), torch.float32)
    assert torch.equal(found[0].T.double(), weight_of(matrix))


def test_numbers_are_those_of_the_checkpoint() -> None:
    _, matrix, _ = draw(1, 100, 384)
    expected = converted_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale)
    packed = pack_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale)
    assert torch.equal(nvfp4_numbers(packed, torch.float32), expected)
    torch.testing.assert_close(expected.double(), weight_of(matrix), rtol=1e-6, atol=0)


def test_a_layer_takes_either_way_by_the_number_of_rows() -> None:
    x, matrix, bias = draw(700, 48, 128)
    layer = make_linear(matrix, bias.float())
    assert isinstance(layer, Nvfp4Linear) and layer.matrix is None
    expected = x.double() @ weight_of(matrix).T + bias.double()
    for num_rows in (1, 33, 700):
        found = layer(x[:num_rows].float())
        torch.testing.assert_close(found.double(), expected[:num_rows], rtol=1e-5, atol=1e-5)
