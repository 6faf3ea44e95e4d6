"""silu(x gate^T) * (x up^T) of few rows on a GPU, in one launch.

Such a product takes as long as its matrix takes to arrive. A program has as many gates as ups, over all inputs, so that
what becomes of them stays in registers; outputs are the rows of the matrix instruction, which takes many of those. It
asks for its first weights while whatever runs before still runs, and lets the next kernel start when it has read its
last: its programs take most of what a multiprocessor has, and another's weights would only compete with its own.

Belongs here: the wide half of a gated MLP in plain numbers. Does not belong here: products whose parts others add up
(few_rows.py), the activation of a product that is there (activation.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.activation import activated
from specbench.engine.kernels.overlap import ask_for, launch_options, may_overlap

#: Rows for which it was faster than cuBLAS and the activation: each program reads all of them, up to 64 in one tile of
#: a matrix instruction and the rest in another.
MAX_ROWS = 80
_TILE_ROWS, _MORE_ROWS = 64, 16
_BLOCK_WIDTH = 64
#: Programs: at least one for about every multiprocessor of an H200, and no more than run at once, two on each.
_MIN_PROGRAMS, _MAX_PROGRAMS = 128, 264


def takes(num_rows: int, gate_up: Tensor) -> bool:
    """Whether it is for so many rows and gate_up [2 * width, hidden]."""
    width, num_inputs = gate_up.shape[0] // 2, gate_up.shape[1]
    is_narrow = gate_up.dtype in (torch.bfloat16, torch.float16)
    is_fit = num_rows <= MAX_ROWS and num_inputs % 128 == 0 and fills_gpu(width)
    return is_fit and is_narrow and may_overlap(gate_up.device)


def fills_gpu(width: int) -> bool:
    """Whether so many gates, and their ups, are whole tiles and as many of them as run at once."""
    return width % _BLOCK_WIDTH == 0 and _MIN_PROGRAMS <= width // _BLOCK_WIDTH <= _MAX_PROGRAMS


def gated_product(x: Tensor, gate_up: Tensor) -> Tensor:
    """x [T, hidden], T at most MAX_ROWS, gate_up [2 * width, hidden], gates first -> [T, width]: sums in fp32, rounded
    to the type of x before gates and ups are multiplied."""
    num_rows, num_inputs = x.shape
    width = len(gate_up) // 2
    output = x.new_empty(num_rows, width)
    block_rows = min(max(16, triton.next_power_of_2(num_rows)), _TILE_ROWS)
    is_deep = block_rows == 16
    assert num_rows <= MAX_ROWS and x.is_contiguous() and gate_up.is_contiguous()
    assert width % _BLOCK_WIDTH == 0 and num_inputs % 128 == 0
    _gated_tile[(width // _BLOCK_WIDTH,)](
        x,
        gate_up,
        output,
        num_rows,
        INPUTS=num_inputs,
        WIDTH=width,
        BLOCK_WIDTH=_BLOCK_WIDTH,
        # What two programs have room for.
        BLOCK_INPUTS=128 if is_deep else 64,
        BLOCK_ROWS=block_rows,
        MORE_ROWS=_MORE_ROWS if num_rows > _TILE_ROWS else 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device),
        num_warps=4,
        num_stages=3 if is_deep else 4,
    )
    return output


@triton.jit(do_not_specialize=("num_rows",))
def _gated_tile(
    x,
    gate_up,
    output,
    num_rows,
    INPUTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MORE_ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """All rows, some gates and, behind them in one tile, their ups."""
    first_column = tl.program_id(0) * BLOCK_WIDTH
    place = tl.arange(0, 2 * BLOCK_WIDTH)
    matrix_row = first_column + place % BLOCK_WIDTH + place // BLOCK_WIDTH * WIDTH
    of_matrix = gate_up + matrix_row[:, None].to(tl.int64) * INPUTS
    inputs = tl.arange(0, BLOCK_INPUTS)[None, :]
    if MAY_OVERLAP:
        LINE: tl.constexpr = 1024 // gate_up.dtype.element_ty.primitive_bitwidth
        ask_for(of_matrix + (tl.arange(0, BLOCK_INPUTS // LINE) * LINE)[None, :])
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, BLOCK_ROWS)[:, None]
    total = tl.zeros((2 * BLOCK_WIDTH, BLOCK_ROWS), tl.float32)
    if MORE_ROWS > 0:
        later_row = BLOCK_ROWS + tl.arange(0, MORE_ROWS)[:, None]
        later_total = tl.zeros((2 * BLOCK_WIDTH, MORE_ROWS), tl.float32)
    for start in tl.range(0, INPUTS, BLOCK_INPUTS):
        v = tl.load(x + row * INPUTS + inputs + start, mask=row < num_rows, other=0.0)
        w = tl.load(of_matrix + inputs + start)
        total = tl.dot(w, tl.trans(v), total, input_precision=PRECISION)
        if MORE_ROWS > 0:
            v = tl.load(x + later_row * INPUTS + inputs + start, mask=later_row < num_rows, other=0.0)
            later_total = tl.dot(w, tl.trans(v), later_total, input_precision=PRECISION)
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    _store_gated(output, total, first_column, 0, num_rows, WIDTH, BLOCK_WIDTH, BLOCK_ROWS)
    if MORE_ROWS > 0:
        _store_gated(output, later_total, first_column, BLOCK_ROWS, num_rows, WIDTH, BLOCK_WIDTH, MORE_ROWS)


@triton.jit
def _store_gated(
    output, total, first_column, first_row, num_rows,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    gate, up = tl.split(tl.permute(tl.reshape(total, (2, BLOCK_WIDTH, BLOCK_ROWS)), (1, 2, 0)))
    values = activated(gate, up, output.dtype.element_ty)
    row = first_row + tl.arange(0, BLOCK_ROWS)[None, :]
    column = first_column + tl.arange(0, BLOCK_WIDTH)[:, None]
    tl.store(output + row * WIDTH + column, values, mask=row < num_rows)
