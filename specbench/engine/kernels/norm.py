"""RMSNorm on a GPU, with the addition that comes before it, in one launch."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.few_rows import load_sum
from specbench.engine.kernels.overlap import launch_options

#: Rows that leave multiprocessors idle: each is spread over twice as many warps.
_FEW_ROWS = 64


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., *weight.shape] -> the same: over the last dimension, in fp32."""
    normed = torch.empty_like(x)
    _launch(x, x, weight, x, normed, eps, has_delta=False)
    return normed


def sum_rms_norm(product: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """product fp32 [splits, T, hidden] -> its sum over splits, rounded to `dtype`, and the norm of that."""
    summed, normed = (product.new_empty(product.shape[1:], dtype=dtype) for _ in range(2))
    _launch(summed, product, weight, summed, normed, eps, has_delta=True, has_x=False)
    return summed, normed


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, rounded to the type of x, and its norm. delta: like x, or fp32 [splits, *x.shape]."""
    summed, normed = torch.empty_like(x), torch.empty_like(x)
    _launch(x, delta, weight, summed, normed, eps, has_delta=True)
    return summed, normed


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in the arithmetic of its inputs."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _launch(
    x: Tensor, delta: Tensor, weight: Tensor, summed: Tensor, normed: Tensor, eps: float, *, has_delta: bool,
    has_x: bool = True,
) -> None:  # fmt: skip
    assert x.is_contiguous() and delta.is_contiguous() and weight.is_contiguous()
    width = weight.shape[-1]
    block, num_rows = triton.next_power_of_2(width), x.numel() // width
    _norm_row[(num_rows,)](
        x,
        delta,
        weight,
        summed,
        normed,
        eps,
        x.numel(),
        WIDTH=width,
        BLOCK=block,
        WEIGHT_ROWS=weight.numel() // width,
        SPLITS=delta.numel() // x.numel(),
        HAS_DELTA=has_delta,
        HAS_X=has_x,
        **launch_options(x.device),
        num_warps=min(max(block // (256 if num_rows <= _FEW_ROWS else 512), 1), 16),
    )


@triton.jit
def _norm_row(
    x,
    delta,
    weight,
    summed,
    normed,
    eps,
    split_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_X: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    is_column = column < WIDTH
    start = row.to(tl.int64) * WIDTH
    if HAS_X:
        values = tl.load(x + start + column, mask=is_column, other=0.0)
    factor = tl.load(weight + (row % WEIGHT_ROWS) * WIDTH + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_DELTA:
        added = load_sum(delta + start + column, is_column, split_stride, SPLITS).to(summed.dtype.element_ty)
        values = (values.to(tl.float32) + added.to(tl.float32)).to(summed.dtype.element_ty) if HAS_X else added
        tl.store(summed + start + column, values, mask=is_column)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(normed + start + column, (wide * scale * factor).to(normed.dtype.element_ty), mask=is_column)
