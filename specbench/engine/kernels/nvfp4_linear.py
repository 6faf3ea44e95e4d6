"""x weight^T of few rows with a weight of NVFP4 codes, each converted where it is used: a quarter of bf16's bytes.

Belongs here: dense weights. Does not belong here: experts (expert_codes.py), FP8 (fp8_linear.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

#: Columns of a tile; the weight's are a multiple of it.
BLOCK_K = 128
#: Rows that one tile holds at most; more are computed faster with the weight converted as a whole.
MAX_ROWS = 64
#: Columns that share a scale.
_SCALED = 16
_WIDE = 8192
#: E2M1: what each code of 4 bits stands for.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def nvfp4_linear(x: Tensor, codes: Tensor, block_scale: Tensor, row_scale: Tensor, bias: Tensor | None) -> Tensor:
    """x: [T, K], T at most MAX_ROWS; codes: [N, K / 2] uint8, the even column in the low half of a byte; block_scale:
    [N, K / 16] float8_e4m3fn; row_scale: [N] fp32; bias: [N]. Returns [T, N], summed in fp32."""
    num_rows, num_columns = len(x), len(codes)
    assert num_rows <= MAX_ROWS and x.is_contiguous() and codes.is_contiguous() and block_scale.is_contiguous()
    output = x.new_empty(num_rows, num_columns)
    block_n = 64 if num_columns > _WIDE else 32
    _nvfp4_linear[(triton.cdiv(num_columns, block_n),)](
        x,
        codes,
        block_scale,
        row_scale,
        row_scale if bias is None else bias,
        output,
        num_rows,
        num_columns,
        K=x.shape[1],
        BLOCK_M=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_N=block_n,
        HALF=BLOCK_K // 2,
        HAS_BIAS=bias is not None,
        num_warps=4,
        num_stages=4,
    )
    return output


def nvfp4_linear_reference(
    x: Tensor, codes: Tensor, block_scale: Tensor, row_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """The same with the weight in the type of x."""
    return F.linear(x, converted_nvfp4(codes, block_scale, row_scale).to(x.dtype), bias)


def converted_nvfp4(codes: Tensor, block_scale: Tensor, row_scale: Tensor) -> Tensor:
    """The weight in fp32, [N, K]."""
    table = torch.tensor(E2M1, device=codes.device)
    pairs = torch.stack((table[(codes & 15).int()], table[(codes >> 4).int()]), -1)
    blocks = pairs.view(len(codes), -1, _SCALED) * block_scale.float().unsqueeze(-1)
    return blocks.flatten(1) * row_scale[:, None]


@triton.jit
def e2m1(code):
    """0 .. 15 (int32) -> what the code stands for, fp32. Where fp32 has its fields, those of a code stand for 2 ** -126
    of that, the numbers without a leading 1 included."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def _nvfp4_linear(
    x,
    codes,
    block_scale,
    row_scale,
    bias,
    output,
    num_rows,
    num_columns,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.arange(0, BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, HALF)
    is_row, is_column = row < num_rows, column < num_columns
    x_tile = x + row[:, None] * K + 2 * byte[None, :]
    codes_tile = codes + column[None, :].to(tl.int64) * (K // 2) + byte[:, None]
    # Eight bytes are the sixteen columns of a scale.
    scale_tile = block_scale + column[None, :].to(tl.int64) * (K // 16) + byte[:, None] // 8
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(K // (2 * HALF)):
        even = tl.load(x_tile + block * 2 * HALF, mask=is_row[:, None], other=0.0)
        odd = tl.load(x_tile + block * 2 * HALF + 1, mask=is_row[:, None], other=0.0)
        pair = tl.load(codes_tile + block * HALF, mask=is_column[None, :], other=0).to(tl.int32)
        scale = tl.load(scale_tile + block * (HALF // 8), mask=is_column[None, :], other=0.0).to(tl.float32)
        # A code times its scale has at most 6 bits of mantissa: exact in bf16.
        total += tl.dot(even, (e2m1(pair & 15) * scale).to(even.dtype), input_precision="ieee")
        total += tl.dot(odd, (e2m1(pair >> 4) * scale).to(odd.dtype), input_precision="ieee")
    total *= tl.load(row_scale + column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    place = output + row[:, None] * num_columns + column[None, :]
    tl.store(place, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
