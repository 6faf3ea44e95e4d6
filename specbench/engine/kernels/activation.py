"""silu(gate) * up on a GPU, in one launch."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.few_rows import load_sum, num_sums
from specbench.engine.kernels.overlap import launch_options

_BLOCK = 1024


def silu_and_multiply(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, 2 * width], or fp32 [splits, T, 2 * width], gates first -> [T, width], by way of fp32."""
    num_rows, width = gate_up.shape[-2], gate_up.shape[-1] // 2
    output = torch.empty(num_rows, width, dtype=dtype, device=gate_up.device)
    assert gate_up.is_contiguous()
    _silu_and_multiply[(num_rows, triton.cdiv(width, _BLOCK))](
        gate_up,
        output,
        num_rows * 2 * width,
        WIDTH=width,
        BLOCK=_BLOCK,
        SPLITS=num_sums(gate_up),
        **launch_options(gate_up.device),
        num_warps=4,
    )
    return output


def silu_and_multiply_reference(gate_up: Tensor) -> Tensor:
    """The same in the arithmetic of its inputs."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@triton.jit
def _silu_and_multiply(
    gate_up,
    output,
    split_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < WIDTH
    source = gate_up + row * (2 * WIDTH) + column
    gate = load_sum(source, is_column, split_stride, SPLITS)
    up = load_sum(source + WIDTH, is_column, split_stride, SPLITS)
    values = activated(gate, up, output.dtype.element_ty)
    tl.store(output + row * WIDTH + column, values, mask=is_column)


@triton.jit
def activated(gate, up, dtype: tl.constexpr):
    """silu(gate) * up of sums in fp32, rounded to `dtype` before and after."""
    gate = gate.to(dtype).to(tl.float32)
    up = up.to(dtype).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(dtype)
