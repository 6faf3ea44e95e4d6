"""Products of few rows equal plain torch in fp64: in Triton's interpreter on a CPU, and on a GPU in both dtypes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.skinny_linear import (
    MAX_ROWS,
    SkinnyPlan,
    can_skinny,
    plan_skinny,
    skinny_counters,
    skinny_linear,
)

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def check(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, has_bias: bool) -> None:
    x, weight = torch.randn(num_rows, num_inputs), torch.randn(num_outputs, num_inputs)
    x, weight = x.to(DEVICE, dtype), weight.to(DEVICE, dtype)
    bias = torch.randn(num_outputs).to(DEVICE, dtype) if has_bias else None
    counters = skinny_counters(num_outputs, x.device)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias if bias is None else bias.double())
    first = None
    for _ in range(3):
        torch.use_deterministic_algorithms(True)  # outputs are NaN until they are written
        try:
            output = skinny_linear(x, weight, counters, bias)
        finally:
            torch.use_deterministic_algorithms(False)
        assert float((output.double() - expected).norm() / expected.norm()) < (1e-6 if dtype == torch.float32 else 4e-3)
        first = output if first is None else first
        assert torch.equal(output, first), "parts were added in another order"
        assert not counters.any()


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "num_inputs", "has_bias"), [(1, 64, 256, True), (17, 128, 512, False)]
)
def test_equals_torch(num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool) -> None:
    check(num_rows, num_outputs, num_inputs, torch.float32, has_bias=has_bias)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 9, 16, MAX_ROWS - 1])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(6144, 4096), (4096, 12288), (4096, 4096), (64, 128)])
def test_equals_torch_on_a_gpu(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    check(num_rows, num_outputs, num_inputs, torch.bfloat16, has_bias=num_rows == 9)


def test_plans_fill_the_device_with_whole_tiles() -> None:
    for num_outputs, num_inputs in [(4096, 4096), (6144, 4096), (24576, 4096), (64, 128), (128, 384)]:
        plan = plan_skinny(num_outputs, num_inputs)
        assert isinstance(plan, SkinnyPlan) and can_skinny(num_outputs, num_inputs)
        assert num_inputs % (plan.num_splits * plan.tile_inputs) == 0 and num_outputs % plan.tile_outputs == 0
    assert plan_skinny(4096, 4096).num_splits == 4
    assert not can_skinny(100, 128)
