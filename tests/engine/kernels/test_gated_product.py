"""A gated product in one launch equals its parts in plain torch: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
from specbench.engine.kernels.activation import silu_and_multiply_reference
from specbench.engine.kernels.gated_product import MAX_ROWS, gated_product, takes
from specbench.engine.layers.linear import Linear
from specbench.engine.layers.mlp import GatedMLP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(num_rows: int, width: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, hidden, generator=generator).to(DEVICE, dtype)
    return x, (torch.randn(2 * width, hidden, generator=generator) / hidden**0.5).to(DEVICE, dtype)


def error(num_rows: int, width: int, hidden: int, dtype: torch.dtype) -> float:
    x, gate_up = draw(num_rows, width, hidden, dtype)
    expected = silu_and_multiply_reference(x.double() @ gate_up.double().T)
    return float((gated_product(x, gate_up) - expected).norm() / expected.norm())


@pytest.mark.parametrize("num_rows", [1, 9, 16, 17, 40, 64, 65, 80])
def test_equals_its_parts(num_rows: int) -> None:
    assert error(num_rows, 128, 256, torch.float32) < 2e-6


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 9, 16, 17, 33, 64, 80])
def test_equals_its_parts_on_a_gpu(num_rows: int) -> None:
    assert error(num_rows, 12288, 4096, torch.bfloat16) < 6e-3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_a_layer_takes_it_and_its_result_is_the_same(num_rows: int) -> None:
    x, gate_up = draw(num_rows, 8192, 1024, torch.bfloat16)
    down = draw(1024, 64, 8192, torch.bfloat16)[0] / 100
    assert takes(num_rows, gate_up)
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    expected = F.linear(F.silu(gate.float()).mul(up.float()).bfloat16(), down).double()
    output = GatedMLP(Linear(gate_up), Linear(down, may_split=False))(x)
    assert float((output - expected).norm() / expected.norm()) < 6e-3


def test_it_is_for_few_rows_of_whole_tiles_that_fill_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up = torch.empty(2 * 12288, 4096, dtype=torch.bfloat16, device="meta")
    assert not takes(1, gate_up), "only where kernels overlap"
    monkeypatch.setattr("specbench.engine.kernels.gated_product.may_overlap", lambda device: True)
    assert takes(1, gate_up) and takes(MAX_ROWS, gate_up)
    assert not takes(MAX_ROWS + 1, gate_up)
    assert not takes(1, gate_up.float())
    for width, hidden in ((4096, 4096), (25600, 4096), (12288 + 32, 4096), (12288, 4096 + 64)):
        assert not takes(1, gate_up.new_empty(2 * width, hidden)), (width, hidden)
