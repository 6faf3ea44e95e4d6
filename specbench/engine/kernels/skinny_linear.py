"""x weight^T for few rows on a GPU, where reading the weight is what takes time.

The weight is the left operand of the matrix instruction, so that few rows waste little. Columns of the sum are split
over programs until the device is full; the last program of a tile to arrive adds the parts up, always in the same
order. Where kernels may overlap, a program asks for its weights before it waits for its input.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options

#: Most rows that gain.
MAX_ROWS = 64
#: Programs that fill the device.
_FULL_GRID = 264
_MAX_SPLITS = 8


@dataclass(frozen=True, slots=True)
class SkinnyPlan:
    """How one product is cut up."""

    tile_outputs: int
    tile_inputs: int
    num_splits: int
    num_warps: int
    num_stages: int


def plan_skinny(num_outputs: int, num_inputs: int) -> SkinnyPlan:
    """For a weight [outputs, inputs]."""
    tile_outputs, tile_inputs = 64, 128
    num_tiles = triton.cdiv(num_outputs, tile_outputs)
    num_splits = 1
    while num_splits < _MAX_SPLITS and 2 * num_splits * num_tiles <= _FULL_GRID:
        if num_inputs % (2 * num_splits * tile_inputs):
            break
        num_splits *= 2
    return SkinnyPlan(tile_outputs, tile_inputs, num_splits, num_warps=4, num_stages=4)


def can_skinny(num_outputs: int, num_inputs: int) -> bool:
    """Whether the kernel takes a weight of this shape: whole tiles of both."""
    return num_outputs % 64 == 0 and num_inputs % 128 == 0


def skinny_counters(num_outputs: int, device: torch.device) -> Tensor:
    """What products with one weight count their programs in: zeros, and zeros again after each."""
    return torch.zeros(triton.cdiv(num_outputs, 64), dtype=torch.int32, device=device)


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    counters: Tensor,
    bias: Tensor | None = None,
    plan: SkinnyPlan | None = None,
) -> Tensor:
    """x [T, inputs], weight [outputs, inputs], bias [outputs] -> [T, outputs]. The weight and the bias are constants:
    they may be read before the kernel before this one has ended."""
    num_rows, num_inputs = x.shape
    num_outputs = len(weight)
    plan = plan or plan_skinny(num_outputs, num_inputs)
    output = x.new_empty(num_rows, num_outputs)
    block_rows = max(16, triton.next_power_of_2(num_rows))
    partial = output
    if plan.num_splits > 1:
        partial = x.new_empty((plan.num_splits, num_outputs, block_rows), dtype=torch.float32)
    assert x.is_contiguous() and weight.is_contiguous()
    _skinny_tile[(num_outputs // plan.tile_outputs, plan.num_splits)](
        x,
        weight,
        output if bias is None else bias,
        output,
        partial,
        counters,
        num_rows,
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        SPLITS=plan.num_splits,
        HAS_BIAS=bias is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=plan.tile_outputs,
        BLOCK_INPUTS=plan.tile_inputs,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    return output


@triton.jit(do_not_specialize=("num_rows",))
def _skinny_tile(
    x,
    weight,
    bias,
    output,
    partial,
    counters,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    SPLIT_INPUTS: tl.constexpr = INPUTS // SPLITS
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = tl.arange(0, BLOCK_ROWS)
    k = split * SPLIT_INPUTS + tl.arange(0, BLOCK_INPUTS)
    weights = weight + n.to(tl.int64)[:, None] * INPUTS + k[None, :]
    if MAY_OVERLAP:
        _prefetch(weight + n.to(tl.int64) * INPUTS + split * SPLIT_INPUTS, SPLIT_INPUTS)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inputs = x + row[None, :] * INPUTS + k[:, None]
    is_row = row < num_rows
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    for start in tl.range(0, SPLIT_INPUTS, BLOCK_INPUTS):
        w = tl.load(weights + start)
        v = tl.load(inputs + start, mask=is_row[None, :], other=0.0)
        sums = tl.dot(w, v, sums, input_precision=PRECISION)
    is_last = True
    if SPLITS > 1:
        place = partial + n[:, None] * BLOCK_ROWS + row[None, :]
        tl.store(place + split * (OUTPUTS * BLOCK_ROWS), sums)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(counters + tile, 0)
            sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
            for part in tl.static_range(SPLITS):
                sums += tl.load(place + part * (OUTPUTS * BLOCK_ROWS), cache_modifier=".cg")
    if is_last:
        if HAS_BIAS:
            sums += tl.load(bias + n).to(tl.float32)[:, None]
        values = sums.to(output.dtype.element_ty)
        tl.store(output + row[None, :] * OUTPUTS + n[:, None], values, mask=is_row[None, :])


@triton.jit
def _prefetch(rows, LENGTH: tl.constexpr):
    """Ask for LENGTH numbers from each of `rows` on, in the cache that all multiprocessors share."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,n",
        [rows.to(tl.int64), LENGTH * 2],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
