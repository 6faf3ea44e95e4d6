"""The product with NVFP4 codes equals the one with what they mean: in the interpreter, and on a GPU in bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.nvfp4_linear import (
    E2M1,
    converted_nvfp4,
    nvfp4_linear,
    nvfp4_linear_reference,
)
from specbench.engine.layers.linear import Nvfp4Linear, Nvfp4Matrix, make_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


def draw(
    num_rows: int, num_columns: int, inner: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Nvfp4Matrix, torch.Tensor]:
    """Every code with every sign, in both halves of a byte."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, inner, generator=generator).to(DEVICE, dtype)
    codes = torch.randint(256, (num_columns, inner // 2), generator=generator, dtype=torch.uint8).to(DEVICE)
    block_scale = (torch.rand(num_columns, inner // 16, generator=generator) * 8).to(torch.float8_e4m3fn).to(DEVICE)
    row_scale = (torch.rand(num_columns, generator=generator) / 100).to(DEVICE)
    bias = torch.randn(num_columns, generator=generator).to(DEVICE, dtype)
    return x, Nvfp4Matrix(codes, block_scale, row_scale), bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_columns", "inner"), [(1, 40, 128), (5, 64, 384), (33, 100, 256)])
def test_few_rows(num_rows: int, num_columns: int, inner: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, matrix, bias = draw(num_rows, num_columns, inner, dtype)
    found = nvfp4_linear(x, matrix.codes, matrix.block_scale, matrix.row_scale, bias if has_bias else None)
    weight = torch.empty(num_columns, inner, dtype=torch.float64, device=DEVICE)
    table = torch.tensor(E2M1, dtype=torch.float64, device=DEVICE)
    weight[:, ::2], weight[:, 1::2] = table[(matrix.codes % 16).long()], table[(matrix.codes // 16).long()]
    weight *= matrix.block_scale.double().repeat_interleave(16, 1) * matrix.row_scale.double()[:, None]
    expected = x.double() @ weight.T + (bias.double() if has_bias else 0.0)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        converted_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale).double(), weight, rtol=1e-6, atol=0
    )


def test_a_layer_takes_either_way_by_the_number_of_rows() -> None:
    x, matrix, bias = draw(70, 48, 128, torch.float32)
    layer = make_linear(matrix, bias)
    assert isinstance(layer, Nvfp4Linear)
    expected = nvfp4_linear_reference(x, matrix.codes, matrix.block_scale, matrix.row_scale, bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(layer(x[:7]), expected[:7], rtol=1e-5, atol=1e-5)
