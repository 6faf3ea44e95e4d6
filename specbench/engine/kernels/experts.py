"""Mixture of experts on a GPU: the products of the rows that chose each expert (router.py).

Entries of one expert fill tiles; a product's program finds its expert by its tile. The grid covers the most tiles that
any choice can need, and programs without a tile end at once. Where other ranks have experts, entries of theirs get no
product and no part in the sum. Entries are few and columns many, so columns are the rows of the matrix instruction.

Belongs here: experts of plain numbers, and what every form of them shares. Does not belong here: which rows chose
which expert (router.py), weights in codes (expert_codes.py), ranks and layers (layers/moe.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.router import Choice

#: Rows that are taken: every program looks for its tile among all experts, and many rows are another product's work.
MAX_ROWS = 1024


def run_experts(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor, first_expert: int = 0) -> Tensor:
    """x [T, hidden], gate_up [experts, 2 * width, hidden] (gates first), down [experts, width, hidden] -> [T, hidden]:
    the sum over a row's experts of weight * down(silu(gate(x)) * up(x)), of those from `first_expert` on that are here.
    """
    num_experts = len(down)
    outputs = _products(x, choice, gate_up, down, first_expert, are_parts=False)
    return sum_chosen(outputs, choice, first_expert, num_experts)


def partial_sums(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same where all experts are here, fp32 [chosen, T, hidden], whose sum over the chosen it is: for kernels that
    add up as they read (few_rows.load_sum)."""
    return _products(x, choice, gate_up, down, first_expert=0, are_parts=True)


def _products(
    x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor, first_expert: int, *, are_parts: bool
) -> Tensor:
    """[T * chosen, hidden] of the entries whose experts are here; in parts as partial_sums has them."""
    num_rows, hidden = x.shape
    num_experts, width, _ = down.shape
    num_chosen = choice.experts.shape[1]
    plan = launch_plan(x, choice, num_experts, first_expert, width)
    activated = x.new_empty(num_rows * num_chosen, width)
    if are_parts:
        outputs = x.new_empty(num_chosen, num_rows, hidden, dtype=torch.float32)
    else:
        outputs = x.new_empty(num_rows * num_chosen, hidden)
    assert gate_up.is_contiguous() and down.is_contiguous()
    gate_up_tile, down_tile = _tile_shapes(x.dtype, num_rows, plan.options["BLOCK_M"])
    _gate_up_tile[(triton.cdiv(width, gate_up_tile.columns), plan.num_tiles)](
        x, TensorDescriptor.from_tensor(gate_up.flatten(0, 1), [gate_up_tile.columns, gate_up_tile.depth]),
        choice.experts, choice.weights, choice.entries, choice.counts, activated, num_rows,
        **plan.options, **gate_up_tile.options,
    )  # fmt: skip
    _down_tile[(triton.cdiv(hidden, down_tile.columns), plan.num_tiles)](
        activated, TensorDescriptor.from_tensor(down.flatten(0, 1), [down_tile.depth, down_tile.columns]),
        choice.experts, choice.entries, choice.counts, outputs, num_rows,
        **plan.options, **down_tile.options, ARE_PARTS=are_parts,
    )  # fmt: skip
    return outputs


@dataclass(frozen=True, slots=True)
class _TileShape:
    """What a program of a product takes."""

    #: Columns of the product, and inputs of one turn.
    columns: int
    depth: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """Of a launch."""
        return {"BLOCK_N": self.columns, "BLOCK_K": self.depth, "num_stages": self.num_stages}


def _tile_shapes(dtype: torch.dtype, num_rows: int, tile_rows: int) -> tuple[_TileShape, _TileShape]:
    """Of both products: what was fastest on an H200 at 1 to 576 rows, 64 and 128 experts of 768 x 2,048."""
    if dtype == torch.float32:
        return _TileShape(32, 32, 2), _TileShape(64, 32, 2)
    is_deep = tile_rows == 16 and num_rows > 1
    return _TileShape(64, 128, 3) if is_deep else _TileShape(64, 64, 4), _TileShape(128, 64, 4)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What both products of a choice are launched with, whatever the weights are."""

    #: The most tiles that any choice can need.
    num_tiles: int
    #: Of the kernels and of the launches.
    options: dict[str, Any]


def launch_plan(x: Tensor, choice: Choice, num_experts: int, first_expert: int, width: int) -> LaunchPlan:
    """For x [T, hidden] and the experts that are here, each of `width`."""
    num_rows, hidden = x.shape
    num_chosen = choice.experts.shape[1]
    num_entries = num_rows * num_chosen
    # A row's experts differ, so no expert has more entries than there are rows.
    tile_rows = min(max(16, triton.next_power_of_2(triton.cdiv(num_entries, len(choice.counts)))), 64)
    # Of one row each entry is a tile, whoever has its expert.
    num_tiles = min(num_entries, num_experts + num_entries // tile_rows) if num_rows > 1 else num_chosen
    assert x.is_contiguous()
    options = {
        "FIRST_EXPERT": first_expert,
        "EXPERTS": num_experts,
        "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
        "WIDTH": width,
        "HIDDEN": hidden,
        "CHOSEN": num_chosen,
        "IS_ONE_ROW": num_rows == 1,
        "BLOCK_M": tile_rows,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "num_warps": 4,
        **launch_options(x.device),
    }
    return LaunchPlan(num_tiles, options)


def sum_chosen(outputs: Tensor, choice: Choice, first_expert: int, num_experts: int) -> Tensor:
    """outputs [T * chosen, hidden], of which those of experts that are here are written -> their sums, [T, hidden]."""
    num_rows, num_chosen = choice.experts.shape
    hidden = outputs.shape[1]
    summed = outputs.new_empty(num_rows, hidden)
    _sum_chosen[(num_rows, triton.cdiv(hidden, 1024))](
        outputs, choice.experts, summed, FIRST_EXPERT=first_expert, EXPERTS=num_experts, HIDDEN=hidden,
        CHOSEN=num_chosen, BLOCK=1024, **launch_options(outputs.device), num_warps=4,
    )  # fmt: skip
    return summed


def run_experts_reference(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor, first_expert: int = 0) -> Tensor:
    """The same in the arithmetic of its inputs, row by row."""
    rows = []
    for row, experts, weights in zip(x, choice.experts.long(), choice.weights.to(x.dtype), strict=True):
        is_here = (experts >= first_expert) & (experts < first_expert + len(down))
        here = experts[is_here] - first_expert
        gate, up = (gate_up[here] @ row).chunk(2, -1)
        rows.append(torch.einsum("cw,cwh,c->h", F.silu(gate) * up, down[here], weights[is_here]))
    return torch.stack(rows)


@triton.jit
def _own_expert(places, is_entry, FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr):
    """Experts as they are counted here: EXPERTS is none of them."""
    own = tl.load(places, mask=is_entry, other=FIRST_EXPERT + EXPERTS) - FIRST_EXPERT
    return tl.where((own >= 0) & (own < EXPERTS), own, EXPERTS)


@triton.jit
def own_tile(
    experts, entries, counts, num_rows, FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    IS_ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """How a product's program begins: once what was launched before has ended, its tile's expert, [BLOCK_M] entries and
    how many of these there are; none where there is no such tile."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    if IS_ONE_ROW:
        # Each entry is a tile.
        expert = _own_expert(experts + tile, True, FIRST_EXPERT, EXPERTS)
        num = (expert < EXPERTS).to(tl.int32)
        entry = tile + lane * 0
    else:
        index = tl.arange(0, BLOCK_EXPERTS)
        count = tl.minimum(tl.load(counts + FIRST_EXPERT + index, mask=index < EXPERTS, other=0), num_rows)
        num_tiles = (count + BLOCK_M - 1) // BLOCK_M
        end = tl.cumsum(num_tiles, 0)
        expert = tl.sum((end <= tile).to(tl.int32), 0)
        is_mine = index == expert
        offset = (tile - tl.sum(tl.where(is_mine, end - num_tiles, 0), 0)) * BLOCK_M
        num = tl.minimum(tl.sum(tl.where(is_mine, count, 0), 0) - offset, BLOCK_M)
        line = entries + (FIRST_EXPERT + expert) * num_rows + offset
        entry = tl.load(line + lane, mask=lane < num, other=0)
    return expert, entry, num


@triton.jit
def swiglu(gate, up, weight):
    """silu(gate) * up * weight."""
    return gate / (1.0 + tl.exp(-gate)) * up * weight


@triton.jit
def store_tile(rows, row, is_row, column, values, COLUMNS: tl.constexpr):
    """Puts values [M, N] at rows `row` [M] and columns `column` [N] of a matrix with COLUMNS columns."""
    place = rows + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(place, values.to(rows.dtype.element_ty), mask=is_row[:, None] & (column < COLUMNS)[None, :])


@triton.jit(do_not_specialize=("num_rows",))
def _gate_up_tile(
    x, gate_up, experts, weights, entries, counts, activated, num_rows,
    FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, IS_ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, MAY_OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """weight * silu(gate) * up of one tile of entries, some columns."""
    expert, entry, num = own_tile(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M, MAY_OVERLAP
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    first = tl.program_id(0) * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    inputs = x + (entry // CHOSEN).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    # Rows behind an expert's last gate, or up, are others': what comes of them is not stored.
    gate_row = expert * (2 * WIDTH) + first
    gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K):
        v = tl.load(inputs + start, mask=is_entry[:, None] & (k < HIDDEN - start)[None, :], other=0.0)
        gate = tl.dot(gate_up.load([gate_row, start]), tl.trans(v), gate, input_precision=PRECISION)
        up = tl.dot(gate_up.load([gate_row + WIDTH, start]), tl.trans(v), up, input_precision=PRECISION)
    weight = tl.load(weights + entry, mask=is_entry, other=0.0)
    values = tl.trans(swiglu(gate, up, weight[None, :]))
    store_tile(activated, entry, is_entry, first + tl.arange(0, BLOCK_N), values, WIDTH)


@triton.jit(do_not_specialize=("num_rows",))
def _down_tile(
    activated, down, experts, entries, counts, outputs, num_rows,
    FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, IS_ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, MAY_OVERLAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ARE_PARTS: tl.constexpr,
):  # fmt: skip
    """The way back of one tile of entries, some columns."""
    expert, entry, num = own_tile(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M, MAY_OVERLAP
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    first = tl.program_id(0) * BLOCK_N
    k = tl.arange(0, BLOCK_K)
    inputs = activated + entry.to(tl.int64)[:, None] * WIDTH + k[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K):
        # Another expert's rows behind the last one meet zeros.
        v = tl.load(inputs + start, mask=is_entry[:, None] & (k < WIDTH - start)[None, :], other=0.0)
        w = down.load([expert * WIDTH + start, first])
        sums = tl.dot(tl.trans(w), tl.trans(v), sums, input_precision=PRECISION)
    output_row = (entry % CHOSEN) * num_rows + entry // CHOSEN if ARE_PARTS else entry
    store_tile(outputs, output_row, is_entry, first + tl.arange(0, BLOCK_N), tl.trans(sums), HIDDEN)


@triton.jit
def _sum_chosen(
    outputs, experts, summed, FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's entries added up."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(CHOSEN):
        entry = row * CHOSEN + index
        is_here = _own_expert(experts + entry, True, FIRST_EXPERT, EXPERTS) < EXPERTS
        values = tl.load(outputs + entry * HIDDEN + column, mask=is_column & is_here, other=0.0)
        total += values.to(tl.float32)
    tl.store(summed + row * HIDDEN + column, total.to(summed.dtype.element_ty), mask=is_column)
