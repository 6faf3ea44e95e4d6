"""Turned heads and packed matrices are what their definitions say."""

from __future__ import annotations

import math

import pytest
import torch

from specbench.engine.layers.linear import Linear, is_packed
from specbench.engine.layers.rotary import RotaryEmbedding
from specbench.engine.layers.rotary_config import RotaryConfig


def test_heads_are_turned_in_place_pair_by_pair() -> None:
    config = RotaryConfig(theta=100.0, head_dim=8, scaling=None)
    positions = torch.tensor([0, 1, 7, 500])
    heads = torch.randn(4, 3, 8)
    turned = torch.cat((heads, torch.zeros(4, 1, 8)), 1)
    RotaryEmbedding(config, torch.float32, torch.device("cpu"))(positions).apply_(turned[:, :3])
    for row, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = position * 100.0 ** (-2 * pair / 8)
            first, second = heads[row, :, pair], heads[row, :, pair + 4]
            expected = first * math.cos(angle) - second * math.sin(angle)
            torch.testing.assert_close(turned[row, :3, pair], expected, rtol=1e-4, atol=1e-4)
            expected = second * math.cos(angle) + first * math.sin(angle)
            torch.testing.assert_close(turned[row, :3, pair + 4], expected, rtol=1e-4, atol=1e-4)
    assert not turned[:, 3:].any(), "only the heads handed over are turned"


@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_matrix_gives_the_product_of_a_plain_one(num_rows: int, has_bias: bool) -> None:
    weight, x = torch.randn(48, 32).bfloat16(), torch.randn(num_rows, 32).bfloat16()
    bias = torch.randn(48).bfloat16() if has_bias else None
    product = Linear(weight, bias)(x)
    assert product.dtype == torch.bfloat16
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(product.double(), exact, rtol=2**-7, atol=2**-5)
    part = torch.randn(num_rows, 64).bfloat16()[:, 16:48]
    torch.testing.assert_close(Linear(weight, bias)(part), Linear(weight, bias)(part.contiguous()))


def test_only_bf16_on_a_cpu_is_packed() -> None:
    assert not is_packed(torch.float32, torch.device("cpu"))
    assert not is_packed(torch.bfloat16, torch.device("meta"))
