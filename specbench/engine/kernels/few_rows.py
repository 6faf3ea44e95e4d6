"""x weight^T of few rows on a GPU, as parts of a sum that its reader adds up.

Such a product is done when its matrix has been read, and what is lost is the time when nothing is being read: before
the first bytes arrive, and while sums over parts of the inputs are added up in a launch of their own. So a product of
few rows is left as partial sums, and the kernels that read it add them up (`load_sum`). Up to MAX_ROWS rows a kernel
makes them whose programs have their first share of the matrix on the way to registers before they wait for x, while
whatever runs before still runs (see overlap.py). Above, cuBLAS makes them as a batch of products, or, of a matrix too
wide for that, a kernel whose loads the compiler stages.

Belongs here: products of weights in plain numbers, and how partial sums are read. Does not belong here: weights in
codes (fp8_linear.py, nvfp4_linear.py), which layers are asked for parts (layers/linear.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import ask_for, launch_options

#: Rows for which the kernel is faster than cuBLAS, and what one tile of a matrix instruction holds of them.
MAX_ROWS = 9
#: Rows for which the kernel for wider matrices is.
_MAX_STAGED_ROWS = 32
_STAGED_SPLITS = 2
_BLOCK_ROWS = 16
_BLOCK_OUTPUTS, _BLOCK_INPUTS = 64, 128
#: Programs that keep every multiprocessor busy.
_FULL_GRID = 512
#: Of more outputs than these, whole tiles keep it busy: by the kernel, and by cuBLAS.
_MAX_OUTPUTS, _MAX_BATCHED_OUTPUTS = 8192, 5120
#: Rows, inputs and weights for which a batch of two products, each over half of the inputs, was faster than one.
_MAX_BATCHED_ROWS = 256
_MANY_INPUTS = 8192
_MIN_BATCHED_WEIGHTS = 1 << 22


@dataclass(frozen=True, slots=True)
class RowPlan:
    """How a matrix is cut up: outputs of a program, inputs that it has on the way at once, and parts of the inputs."""

    block_outputs: int
    block_inputs: int
    num_splits: int


def plan_product(num_outputs: int, num_inputs: int) -> RowPlan | None:
    """None where the matrix does not fall into whole tiles, or has so many outputs that parts gain nothing."""
    if num_outputs % _BLOCK_OUTPUTS or num_inputs % _BLOCK_INPUTS or num_outputs > _MAX_OUTPUTS:
        return None
    num_splits = triton.cdiv(_FULL_GRID, num_outputs // _BLOCK_OUTPUTS)
    return RowPlan(_BLOCK_OUTPUTS, _BLOCK_INPUTS, min(num_splits, num_inputs // _BLOCK_INPUTS))


def partial_sums(x: Tensor, weight: Tensor, bias: Tensor | None, plan: RowPlan) -> Tensor:
    """x [T, inputs], T at most MAX_ROWS, weight [outputs, inputs], bias [outputs] -> fp32 [splits, T, outputs], whose
    sum over splits is the product."""
    num_rows, num_outputs, num_inputs = len(x), *weight.shape
    sums = torch.empty(plan.num_splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    assert num_rows <= _BLOCK_ROWS and x.is_contiguous() and weight.is_contiguous()
    _sum_tile[(num_outputs // plan.block_outputs, plan.num_splits)](
        x,
        weight,
        weight if bias is None else bias,
        sums,
        num_rows,
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_OUTPUTS=plan.block_outputs,
        BLOCK_INPUTS=plan.block_inputs,
        SPLITS=plan.num_splits,
        BLOCK_ROWS=_BLOCK_ROWS,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device),
        num_warps=4,
    )
    return sums


def takes_staged(num_rows: int, num_outputs: int) -> bool:
    """Whether a matrix that `plan_product` has a plan for is one for `staged_sums`."""
    return num_rows <= _MAX_STAGED_ROWS and _MAX_BATCHED_OUTPUTS < num_outputs <= _MAX_OUTPUTS


def staged_sums(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As partial_sums, for up to 32 rows."""
    num_rows, num_outputs, num_inputs = len(x), *weight.shape
    sums = torch.empty(_STAGED_SPLITS, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    block_rows = max(_BLOCK_ROWS, triton.next_power_of_2(num_rows))
    is_deep = block_rows == _BLOCK_ROWS
    assert num_rows <= _MAX_STAGED_ROWS and x.is_contiguous() and weight.is_contiguous()
    assert num_outputs % _BLOCK_OUTPUTS == 0 and num_inputs % _BLOCK_INPUTS == 0
    _sum_staged[(num_outputs // _BLOCK_OUTPUTS, _STAGED_SPLITS)](
        x,
        weight,
        weight if bias is None else bias,
        sums,
        num_rows,
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        BLOCK_INPUTS=_BLOCK_INPUTS if is_deep else _BLOCK_INPUTS // 2,
        SPLITS=_STAGED_SPLITS,
        BLOCK_ROWS=block_rows,
        HAS_BIAS=bias is not None,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device),
        num_warps=4,
        num_stages=3 if is_deep else 4,
    )
    return sums


def num_batched(num_rows: int, num_outputs: int, num_inputs: int) -> int:
    """Products that cuBLAS is better asked for in place of one."""
    if num_outputs > _MAX_BATCHED_OUTPUTS or num_outputs * num_inputs < _MIN_BATCHED_WEIGHTS or num_inputs % 16:
        return 1
    # Of fewer inputs it makes a whole of some 64 rows faster.
    is_faster = num_rows <= _MAX_BATCHED_ROWS and (num_inputs >= _MANY_INPUTS or not 32 < num_rows <= 96)
    return 2 if is_faster else 1


def batched_sums(x: Tensor, weight: Tensor, num_splits: int) -> Tensor:
    """As partial_sums, for any number of rows."""
    parts_of_x = x.unflatten(1, (num_splits, -1)).transpose(0, 1)
    parts_of_weight = weight.unflatten(1, (num_splits, -1)).permute(1, 2, 0)
    return torch.bmm(parts_of_x, parts_of_weight, out_dtype=torch.float32)


def num_sums(product: Tensor) -> int:
    """Of [T, ...], which is whole, or [splits, T, ...]."""
    return product.shape[0] if product.dim() == 3 else 1


@triton.jit
def load_sum(product, mask, split_stride, SPLITS: tl.constexpr):
    """Elements of a product, whole or in splits, in fp32."""
    total = tl.load(product, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(product + split * split_stride, mask=mask, other=0.0)
    return total


@triton.jit
def _arrived(weight):
    """The same numbers, all of them in registers. Without it each is passed on as it comes, and few are asked for at a
    time."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [weight], dtype=weight.dtype, is_pure=False, pack=2)


@triton.jit(do_not_specialize=("num_rows",))
def _sum_tile(
    x,
    weight,
    bias,
    sums,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """Some outputs over some inputs: every split has as many blocks of inputs as any other, or one more."""
    NUM_BLOCKS: tl.constexpr = INPUTS // BLOCK_INPUTS
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    split = tl.program_id(1)
    first = split * NUM_BLOCKS // SPLITS
    stop = (split + 1) * NUM_BLOCKS // SPLITS
    row = tl.arange(0, BLOCK_ROWS)
    inputs = tl.arange(0, BLOCK_INPUTS)
    is_row = (row < num_rows)[None, :]
    of_weight = weight + output[:, None].to(tl.int64) * INPUTS + inputs[None, :]
    of_x = x + row[None, :] * INPUTS + inputs[:, None]
    block = tl.load(of_weight + first * BLOCK_INPUTS)
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        block = _arrived(block)
    x_block = tl.load(of_x + first * BLOCK_INPUTS, mask=is_row, other=0.0)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    # The next block is on the way while one is multiplied; stages of the compiler's would be asked for after the wait.
    for index in tl.range(first + 1, stop, num_stages=1):
        following = tl.load(of_weight + index * BLOCK_INPUTS)
        x_following = tl.load(of_x + index * BLOCK_INPUTS, mask=is_row, other=0.0)
        total = tl.dot(block, x_block, total, input_precision=PRECISION)
        block = following
        x_block = x_following
        if MAY_OVERLAP:
            block = _arrived(block)
    total = tl.dot(block, x_block, total, input_precision=PRECISION)
    if HAS_BIAS:  # noqa: SIM102
        if split == 0:
            total += tl.load(bias + output).to(tl.float32)[:, None]
    tl.store(sums + (split * num_rows + row[None, :]) * OUTPUTS + output[:, None], total, mask=is_row)


@triton.jit(do_not_specialize=("num_rows",))
def _sum_staged(
    x,
    weight,
    bias,
    sums,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """As _sum_tile, with blocks on their way to a multiprocessor's memory while others are multiplied: of those, more
    than of registers. Before it waits it asks for its first two."""
    NUM_BLOCKS: tl.constexpr = INPUTS // BLOCK_INPUTS
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    split = tl.program_id(1)
    first = split * NUM_BLOCKS // SPLITS
    stop = (split + 1) * NUM_BLOCKS // SPLITS
    row = tl.arange(0, BLOCK_ROWS)
    inputs = tl.arange(0, BLOCK_INPUTS)[None, :]
    of_weight = weight + output[:, None].to(tl.int64) * INPUTS
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
        ask_for(of_weight + (first * BLOCK_INPUTS + tl.arange(0, 2 * BLOCK_INPUTS // LINE) * LINE)[None, :])
        tl.extra.cuda.gdc_wait()
    is_row = row[:, None] < num_rows
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    for index in tl.range(first, stop):
        v = tl.load(x + row[:, None] * INPUTS + inputs + index * BLOCK_INPUTS, mask=is_row, other=0.0)
        w = tl.load(of_weight + inputs + index * BLOCK_INPUTS)
        total = tl.dot(w, tl.trans(v), total, input_precision=PRECISION)
    if HAS_BIAS:  # noqa: SIM102
        if split == 0:
            total += tl.load(bias + output).to(tl.float32)[:, None]
    place = (split * num_rows + row[None, :]) * OUTPUTS + output[:, None]
    tl.store(sums + place, total, mask=row[None, :] < num_rows)
