"""x weight^T of few rows with a weight of FP8 codes, each converted where it is used: half the bytes of bf16."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

#: Columns of the weight that share a scale.
BLOCK_K = 128
#: Rows that one tile holds at most; more are computed faster with the weight converted as a whole.
MAX_ROWS = 64
#: Of the product; below it tiles are narrower, so that every multiprocessor has one.
_WIDE = 8192


def fp8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """x: [T, K], T at most MAX_ROWS; codes: [N, K] float8_e4m3fn; scale: [N, K / 128] fp32; bias: [N]. Returns [T, N],
    summed in fp32."""
    num_rows, num_columns = len(x), len(codes)
    assert num_rows <= MAX_ROWS and x.is_contiguous() and codes.is_contiguous() and scale.is_contiguous()
    output = x.new_empty(num_rows, num_columns)
    block_n = 64 if num_columns > _WIDE else 32
    _fp8_linear[(triton.cdiv(num_columns, block_n),)](
        x,
        codes,
        scale,
        codes if bias is None else bias,
        output,
        num_rows,
        num_columns,
        K=codes.shape[1],
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=block_n,
        BLOCK_K=BLOCK_K,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=5,
    )
    return output


def fp8_linear_reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The same with the weight in the type of x."""
    return F.linear(x, converted(codes, scale).to(x.dtype), bias)


def converted(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight in fp32, [N, K]."""
    return (codes.float().unflatten(1, (-1, BLOCK_K)) * scale.unsqueeze(-1)).flatten(1)


@triton.jit
def _fp8_linear(
    x,
    codes,
    scale,
    bias,
    output,
    num_rows,
    num_columns,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    is_row, is_column = row < num_rows, column < num_columns
    x_tile = x + row[:, None] * K + inner[None, :]
    codes_tile = codes + column[None, :].to(tl.int64) * K + inner[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(K // BLOCK_K):
        inputs = tl.load(x_tile + block * BLOCK_K, mask=is_row[:, None], other=0.0)
        weight = tl.load(codes_tile + block * BLOCK_K, mask=is_column[None, :], other=0.0).to(inputs.dtype)
        factor = tl.load(scale + column * (K // BLOCK_K) + block, mask=is_column, other=0.0)
        total += tl.dot(inputs, weight, input_precision="ieee") * factor[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = output + row[:, None] * num_columns + column[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
