"""Products of few rows, and the kernels that add up their partial sums: in the interpreter, and on a GPU in bf16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from specbench.engine.kernels.activation import silu_and_multiply
from specbench.engine.kernels.attention_inputs import HeadNorm, HeadShape, Turn, attention_inputs
from specbench.engine.kernels.few_rows import (
    MAX_ROWS,
    RowPlan,
    batched_sums,
    num_batched,
    partial_sums,
    plan_product,
    staged_sums,
    takes_staged,
)
from specbench.engine.kernels.norm import add_rms_norm
from specbench.engine.layers.linear import Linear

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPE = torch.bfloat16 if HAS_GPU else torch.float32
TOLERANCE = 6e-3 if HAS_GPU else 1e-6


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE, DTYPE)


def error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS])
@pytest.mark.parametrize(("outputs", "inputs", "num_splits"), [(64, 16, 1), (128, 96, 6), (128, 112, 3), (192, 64, 1)])
def test_sums_add_up_to_the_product(outputs: int, inputs: int, num_splits: int, num_rows: int, has_bias: bool) -> None:
    x, weight, bias = randn(num_rows, inputs), randn(outputs, inputs), randn(outputs)
    sums = partial_sums(x, weight, bias if has_bias else None, RowPlan(64, 16, num_splits))
    assert sums.shape == (num_splits, num_rows, outputs) and sums.dtype == torch.float32
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert error(sums.sum(0), expected) < 1e-5


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 32])
def test_staged_sums_add_up_to_the_product(num_rows: int, has_bias: bool) -> None:
    x, weight, bias = randn(num_rows, 640), randn(128, 640), randn(128)
    sums = staged_sums(x, weight, bias if has_bias else None)
    assert sums.shape == (2, num_rows, 128) and sums.dtype == torch.float32
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    assert error(sums.sum(0), expected) < 1e-5


def test_sums_are_staged_of_matrices_that_are_too_wide_for_a_batch() -> None:
    assert [takes_staged(rows, 6144) for rows in (10, 32, 33)] == [True, True, False]
    assert not takes_staged(16, 4096) and not takes_staged(16, 24576)


def test_a_matrix_that_falls_into_no_tiles_has_no_plan() -> None:
    assert plan_product(4096, 4096) == RowPlan(64, 128, 8)
    assert plan_product(6144, 4096) == RowPlan(64, 128, 6)
    assert plan_product(64, 256) == RowPlan(64, 128, 2)
    for shape in ((100, 4096), (4096, 100), (24576, 4096)):
        assert plan_product(*shape) is None


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 16, 144])
def test_batches_add_up_to_the_product(num_rows: int) -> None:
    x, weight = randn(num_rows, 256), randn(64, 256)
    sums = batched_sums(x, weight, 2)
    assert sums.shape == (2, num_rows, 64) and sums.dtype == torch.float32
    assert error(sums.sum(0), x.double() @ weight.double().T) < 1e-5


def test_products_are_batched_where_that_was_faster() -> None:
    down, o, gate_up = (4096, 12288), (4096, 4096), (24576, 4096)
    assert [num_batched(rows, *down) for rows in (16, 64, 144, 320)] == [2, 2, 2, 1]
    assert [num_batched(rows, *o) for rows in (16, 64, 144, 320)] == [2, 1, 2, 1]
    assert num_batched(16, *gate_up) == num_batched(16, 64, 64) == 1


def split(product: Tensor, num_splits: int) -> Tensor:
    """fp32 parts that add up to it."""
    parts = torch.randn(num_splits, *product.shape, device=product.device)
    return torch.cat((parts[1:], product.float()[None] - parts[1:].sum(0, keepdim=True)))


@pytest.mark.parametrize("num_splits", [2, 3])
def test_readers_add_sums_up(num_splits: int) -> None:
    x, delta, weight = randn(3, 48), randn(3, 48), randn(48)
    for value, expected in zip(
        add_rms_norm(x, split(delta, num_splits), weight, 1e-6), add_rms_norm(x, delta, weight, 1e-6), strict=True
    ):
        assert error(value, expected.double()) < TOLERANCE
    gate_up = randn(3, 2 * 1500)
    value = silu_and_multiply(split(gate_up, num_splits), DTYPE)
    assert value.dtype == DTYPE and error(value, silu_and_multiply(gate_up, DTYPE).double()) < TOLERANCE


def test_attention_adds_sums_up() -> None:
    shape, num_rows, d = HeadShape(4, 2, 16), 5, 16
    projected, slots = randn(num_rows, 8 * d), torch.tensor([3, 0, 7, -1, 5], device=DEVICE)
    norm, turn = HeadNorm(randn(6, d), 1e-6), Turn(randn(num_rows, 1, d), randn(num_rows, 1, d))
    outputs = []
    for product in (projected, split(projected, 3)):
        kv_cache = torch.zeros(9, 2, 2, d, device=DEVICE, dtype=DTYPE)
        outputs.append((attention_inputs(product, shape, kv_cache, slots, norm, turn), kv_cache))
    for value, expected in zip(*outputs, strict=True):
        assert value.dtype == DTYPE and error(value, expected.double()) < TOLERANCE


def test_a_layer_leaves_sums_only_for_few_rows_of_narrow_numbers_on_a_gpu() -> None:
    weight, x = randn(128, 512), randn(40, 512)
    layer, never = Linear(weight), Linear(weight, may_split=False)
    assert layer.partial_sums(x).shape == (40, 128)
    few = layer.partial_sums(x[:3])
    if HAS_GPU and torch.cuda.get_device_capability() >= (9, 0):
        assert few.dim() == 3 and few.dtype == torch.float32
        few = few.sum(0)
    assert error(few, x[:3].double() @ weight.double().T) < TOLERANCE
    assert never.partial_sums(x[:3]).shape == (3, 128)
