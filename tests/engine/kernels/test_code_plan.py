"""How products of codes are cut up."""

from __future__ import annotations

import pytest

from specbench.engine.kernels.code_plan import CodePlan, padded_outputs, plan_product

#: Every kind: one tile of rows or two, one turn of the warps or two, parts of the inputs that are equal or not.
PLANS = [
    CodePlan(64, 16, 0, 1, 4, 4),
    CodePlan(128, 16, 0, 2, 4, 4),
    CodePlan(128, 32, 16, 3, 8, 3),
    CodePlan(64, 32, 16, 2, 4, 3),
    CodePlan(256, 16, 0, 1, 8, 2),
]


def rows_of(plan: CodePlan) -> int:
    """More than one program has."""
    return 2 * (plan.block_rows + plan.more_rows) - 3


def plan(bits: int, num_rows: int, num_outputs: int, num_inputs: int, most: int | None = None) -> CodePlan:
    found = plan_product(bits, num_rows, num_outputs, num_inputs, most)
    assert found is not None
    return found


def test_what_was_fastest_is_planned() -> None:
    """On an H200, of the products of a model of 8B parameters: gate_up, down, qkv, o."""
    shapes = ((24576, 4096), (4096, 12288), (6144, 4096), (4096, 4096))
    assert [plan(8, 16, *shape).num_splits for shape in shapes] == [1, 6, 4, 6]
    assert [plan(4, 16, *shape).num_splits for shape in shapes] == [2, 12, 8, 11]
    assert [plan(8, 32, *shape).num_splits for shape in shapes] == [1, 6, 4, 6]
    plans = [plan(8, 64, *shape) for shape in shapes]
    assert [(found.block_outputs, found.num_splits) for found in plans] == [(64, 1), (128, 8), (64, 4), (128, 8)]
    assert [plan(8, 144, *shape).num_splits for shape in shapes] == [2, 4, 2, 4]
    assert [plan(8, 320, *shape).num_splits for shape in shapes] == [1, 2, 1, 2]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 16, 17, 33, 64, 65, 80, 81, 96, 97, 128, 129, 144, 160, 161, 256, 320])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 128), (100, 256), (192, 11008), (4096, 4096)])
def test_every_row_output_and_split_has_its_program(
    bits: int, num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    found = plan(bits, num_rows, num_outputs, num_inputs)
    outputs, splits, rows = found.grid(num_rows, num_outputs)
    assert outputs * found.block_outputs == padded_outputs(num_outputs) and splits <= num_inputs // 128
    assert rows * (found.block_rows + found.more_rows) >= num_rows > (rows - 1) * (found.block_rows + found.more_rows)
    # No turn of the warps is left over.
    assert found.block_outputs % (16 * found.num_warps) == 0


def test_no_more_splits_than_may_be_and_none_of_many_rows() -> None:
    assert plan(8, 1, 4096, 4096, most=3).num_splits <= 3
    assert plan(4, 1, 4096, 4096, most=1).num_splits == 1
    assert plan_product(8, 321, 4096, 4096) is None
    assert plan_product(8, 65, 4096, 4096, is_wide=True) is None and plan_product(8, 64, 4096, 4096, is_wide=True)
