"""The product with FP8 codes equals the one with what they mean: in the interpreter, and on a GPU in bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.fp8_linear import converted, fp8_linear, fp8_linear_reference
from specbench.engine.layers.linear import Fp8Linear, Fp8Matrix, make_linear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


def draw(
    num_rows: int, num_columns: int, inner: int, dtype: torch.dtype
) -> tuple[torch.Tensor, Fp8Matrix, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, inner, generator=generator).to(DEVICE, dtype)
    codes = (16 * torch.randn(num_columns, inner, generator=generator)).to(torch.float8_e4m3fn).to(DEVICE)
    scale = (torch.rand(num_columns, inner // 128, generator=generator) / 100).to(DEVICE)
    bias = torch.randn(num_columns, generator=generator).to(DEVICE, dtype)
    return x, Fp8Matrix(codes, scale), bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_rows", "num_columns", "inner"), [(1, 40, 128), (5, 64, 384), (33, 100, 256)])
def test_few_rows(num_rows: int, num_columns: int, inner: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, matrix, bias = draw(num_rows, num_columns, inner, dtype)
    found = fp8_linear(x, matrix.codes, matrix.scale, bias if has_bias else None)
    weight = matrix.codes.double() * matrix.scale.double().repeat_interleave(128, 1)
    expected = x.double() @ weight.T + (bias.double() if has_bias else 0.0)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert found.dtype == dtype


def test_a_layer_takes_either_way_by_the_number_of_rows() -> None:
    x, matrix, bias = draw(70, 48, 128, torch.float32)
    layer = make_linear(matrix, bias)
    assert isinstance(layer, Fp8Linear)
    expected = fp8_linear_reference(x, matrix.codes, matrix.scale, bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(layer(x[:7]), expected[:7], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        converted(matrix.codes, matrix.scale)[3, 5], matrix.codes[3, 5].float() * matrix.scale[3, 0]
    )
