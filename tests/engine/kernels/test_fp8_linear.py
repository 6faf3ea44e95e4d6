"""The product with FP8 codes equals the one with what they mean: in the interpreter, and on a GPU in bf16."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.fp8_linear import converted, fp8_linear_reference, fp8_sums, plan_splits
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
    weight = matrix.codes.double() * matrix.scale.double().repeat_interleave(128, 1)
    expected = x.double() @ weight.T + (bias.double() if has_bias else 0.0)
    for num_splits in range(1, inner // 128 + 1):
        sums = fp8_sums(x, matrix.codes, matrix.scale.T.contiguous(), bias if has_bias else None, num_splits)
        assert sums.dtype == torch.float32 and sums.shape == (num_splits, num_rows, num_columns)
        torch.testing.assert_close(sums.sum(0).double(), expected, rtol=1e-5, atol=1e-5)


def test_every_code_means_what_its_type_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    codes[:, -1] = 0  # NaN
    for first in (0, 64):
        x = torch.eye(128)[first : first + 64].to(DEVICE, DTYPES[-1])
        found = fp8_sums(x, codes.to(DEVICE), torch.ones(1, 2, device=DEVICE), None, 1)[0]
        assert torch.equal(found.T.cpu(), codes.float()[:, first : first + 64])


def test_splits_are_equal_where_they_can_be() -> None:
    shapes = ((4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288))
    assert [plan_splits(*shape) for shape in shapes] == [8, 4, 4, 12]
    assert plan_splits(4096, 11008) == 11
    assert plan_splits(64, 128) == 1


def test_a_layer_takes_either_way_by_the_number_of_rows() -> None:
    x, matrix, bias = draw(70, 48, 128, torch.float32)
    layer = make_linear(matrix, bias)
    assert isinstance(layer, Fp8Linear)
    expected = fp8_linear_reference(x, matrix.codes, matrix.scale.T, bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=0)
    torch.testing.assert_close(layer(x[:7]), expected[:7], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        converted(matrix.codes, matrix.scale)[3, 5], matrix.codes[3, 5].float() * matrix.scale[3, 0]
    )
