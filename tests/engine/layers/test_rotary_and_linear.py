"""Turned heads and packed matrices are what their definitions say."""

from __future__ import annotations

import math

import pytest
import torch

from specbench.engine.layers.huge_pages import join_ranges, use_huge_pages
from specbench.engine.layers.linear import PackedLinear, can_pack, make_linear
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


@pytest.mark.parametrize("shape", [(48, 32), (480, 320)], ids=["plain", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_of_plain_and_packed_matrices(shape: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    weight = torch.randn(shape).to(dtype)
    bias = torch.randn(shape[0]).to(dtype) if has_bias else None
    linear = make_linear(weight, bias)
    assert isinstance(linear, PackedLinear) == can_pack(weight.numel(), dtype, weight.device)
    wide = torch.randn(40, 2 * shape[1]).to(dtype)
    for num_rows in (1, 5, 40):
        x = wide[:num_rows, : shape[1]]  # rows that do not lie one behind the other
        product = linear(x)
        assert product.dtype == dtype
        exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(product.double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max()))


def test_neither_small_matrices_nor_those_of_other_devices_are_packed() -> None:
    assert not can_pack(1000, torch.float32, torch.device("cpu"))
    assert not can_pack(1 << 20, torch.bfloat16, torch.device("meta"))


def test_ranges_are_joined_where_a_huge_page_spans_them() -> None:
    huge = 1 << 21
    assert join_ranges([(3 * huge, 4 * huge), (0, 10), (20, huge), (huge - 5, huge + 5)]) == [
        (0, huge + 5),
        (3 * huge, 4 * huge),
    ]


@pytest.mark.parametrize("shape", [(48, 32), (1024, 1024)])
def test_moving_a_matrix_to_huge_pages_leaves_it_as_it_is(shape: tuple[int, int]) -> None:
    linear, x = make_linear(torch.randn(shape)), torch.randn(3, shape[1])
    before = linear(x)
    start, end = linear.address_range
    assert end - start >= 4 * shape[0] * shape[1]
    use_huge_pages([linear.address_range])
    assert torch.equal(linear(x), before)
