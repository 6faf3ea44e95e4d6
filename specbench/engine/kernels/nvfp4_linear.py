"""x weight^T with a weight of NVFP4 codes, each converted where it is used: a quarter of bf16's bytes.

Codes lie in memory in the order in which the matrix instruction takes numbers from registers, as in fp8_linear.py: a
word holds the eight of a thread for one instruction. Its bits are where three shifts bring them to bf16's fields.

Belongs here: codes of NVFP4 in that order, their products, and the weight in plain numbers. Does not belong here: how a
product is cut up (code_plan.py), experts (expert_codes.py), FP8 (fp8_linear.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.code_plan import BLOCK_K, CodePlan, padded_outputs
from specbench.engine.kernels.overlap import launch_options

#: Columns that share a scale.
_SCALED = 16
#: E2M1: what each code of 4 bits stands for.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Where 16 bits have the sign and the other three bits of four codes: of (8 outputs, 8 inputs) (0, 0), (0, 1), (1, 0)
#: and (1, 1). See _numbers.
_PLACES = ((15, 6), (14, 3), (9, 0), (13, 10))
_UNPACKED_OUTPUTS, _UNPACKING_WARPS = 64, 4


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """A weight of codes, its outputs filled up to whole tiles."""

    # [outputs / 16, inputs / 128, 2 (of 64 inputs), 8 outputs, 4 (of 2 inputs), 4 (of 16 inputs), 4] uint8: 4 bytes
    # hold 2 neighbours of 2 (of 8 inputs) of 2 (of 8 outputs)
    codes: Tensor
    # [outputs / 16, inputs / 128, 2 (of 64 inputs), 8 outputs, 4 (of 16 inputs), 2 (of 8 outputs)] float8_e4m3fn
    block_scale: Tensor
    # [outputs] fp32
    row_scale: Tensor
    #: Those that are there.
    num_outputs: int

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1] * BLOCK_K


def pack_nvfp4(codes: Tensor, block_scale: Tensor, row_scale: Tensor) -> Nvfp4Weight:
    """codes: [outputs, inputs / 2] uint8, the even column in the low half of a byte; block_scale: [outputs, inputs /
    16] float8_e4m3fn; row_scale: [outputs] fp32."""
    num_outputs, num_blocks = len(codes), codes.shape[1] * 2 // BLOCK_K
    missing = (0, 0, 0, padded_outputs(num_outputs) - num_outputs)
    pairs = F.pad(codes, missing).view(-1, 2, 8, num_blocks, 2, 4, 2, 4)
    # units, blocks, 64 inputs, outputs, 2 inputs, 16 inputs, 8 outputs, 8 inputs
    pairs = pairs.permute(0, 3, 4, 2, 7, 5, 1, 6).flatten(-2)
    halves = torch.stack((_in_16_bits(pairs & 15), _in_16_bits(pairs >> 4)), -1)
    scales = F.pad(block_scale.view(torch.uint8), missing).view(-1, 2, 8, num_blocks, 2, 4)
    return Nvfp4Weight(
        torch.stack((halves & 255, halves >> 8), -1).to(torch.uint8).flatten(-2),
        scales.permute(0, 3, 4, 2, 5, 1).contiguous().view(block_scale.dtype),
        F.pad(row_scale, missing[2:]),
        num_outputs,
    )


def _in_16_bits(codes: Tensor) -> Tensor:
    """[..., 4 codes] uint8 -> [...] int32."""
    words = torch.zeros(codes.shape[:-1], dtype=torch.int32, device=codes.device)
    for index, (sign, number) in enumerate(_PLACES):
        code = codes[..., index].int()
        words |= ((code >> 3) << sign) | ((code & 7) << number)
    return words


def nvfp4_product(x: Tensor, weight: Nvfp4Weight, bias: Tensor | None, plan: CodePlan, dtype: torch.dtype) -> Tensor:
    """x: [T, inputs]; bias: [outputs]. Returns [splits, T, outputs] in dtype, whose sum over splits is the product."""
    num_rows, num_inputs = x.shape
    assert x.is_contiguous() and num_inputs == weight.num_inputs and plan.num_splits <= num_inputs // BLOCK_K
    output = torch.empty(plan.num_splits, num_rows, weight.num_outputs, dtype=dtype, device=x.device)
    _nvfp4_tile[plan.grid(num_rows, weight.num_outputs)](
        x,
        weight.codes,
        weight.block_scale,
        weight.row_scale,
        output if bias is None else bias,
        output,
        num_rows,
        weight.num_outputs,
        num_inputs // BLOCK_K,
        plan.num_splits,
        BLOCK_OUTPUTS=plan.block_outputs,
        BLOCK_ROWS=plan.block_rows,
        MORE_ROWS=plan.more_rows,
        WARPS=plan.num_warps,
        STAGES=plan.num_stages,
        HAS_BIAS=bias is not None,
        **launch_options(x.device),
        num_warps=plan.num_warps,
    )
    return output


def nvfp4_numbers(weight: Nvfp4Weight, dtype: torch.dtype) -> Tensor:
    """The weight in plain numbers, [outputs, inputs]."""
    numbers = torch.empty(weight.num_outputs, weight.num_inputs, dtype=dtype, device=weight.codes.device)
    num_blocks = weight.codes.shape[1]
    _nvfp4_numbers[(num_blocks, triton.cdiv(weight.num_outputs, _UNPACKED_OUTPUTS))](
        weight.codes,
        weight.block_scale,
        weight.row_scale,
        numbers,
        weight.num_outputs,
        num_blocks,
        BLOCK_OUTPUTS=_UNPACKED_OUTPUTS,
        WARPS=_UNPACKING_WARPS,
        **launch_options(weight.codes.device),
        num_warps=_UNPACKING_WARPS,
    )
    return numbers


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
def _field(half, sign: tl.constexpr, number: tl.constexpr):
    """2 ** -126 of a code of 16 bits, in fp32."""
    bits = (((half >> sign) & 1) << 31) | (((half >> number) & 7) << 22)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scales(scale, dtype: tl.constexpr, IS_FAST: tl.constexpr):
    """2 ** 118 of the scales, FP8 codes: see _decoded of fp8_linear.py."""
    if IS_FAST and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, factor;
            mov.b32 factor, 0x7b807b80;
            prmt.b32 low, $2, 0, 0x9180;
            prmt.b32 high, $2, 0, 0xb3a2;
            shl.b32 low, low, 4;
            shl.b32 high, high, 4;
            and.b32 low, low, 0x87f087f0;
            and.b32 high, high, 0x87f087f0;
            mul.rn.bf16x2 low, low, factor;
            mul.rn.bf16x2 high, high, factor;
            mov.b32 factor, 0x7a807a80;
            mul.rn.bf16x2 $0, low, factor;
            mul.rn.bf16x2 $1, high, factor;
            }""",
            "=r,=r,r",
            [scale],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    return (scale.to(tl.float32) * 3.3230699894622897e35).to(dtype)


@triton.jit
def _numbers(codes, scale, dtype: tl.constexpr, IS_FAST: tl.constexpr):
    """2 ** -8 of what codes [threads, parts, 16 bytes] with scales [threads, parts, 8] stand for, exact in bf16: those
    of the lower 8 inputs of every 16, and those of the upper, both [threads, parts, 8, 2 neighbours]."""
    THREADS: tl.constexpr = codes.shape[0]
    PARTS: tl.constexpr = codes.shape[1]
    factor = _scales(scale, dtype, IS_FAST)[:, :, :, None]
    if IS_FAST and dtype == tl.bfloat16:
        # Where bf16 has its fields, those of a code stand for 2 ** -126 of it.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, sign;
            and.b32 a, $4, 0x81c081c0;
            shl.b32 b, $4, 6;
            and.b32 b, b, 0x81c081c0;
            shl.b32 c, $4, 3;
            and.b32 c, c, 0x01c001c0;
            shl.b32 sign, $4, 1;
            lop3.b32 c, sign, 0x80008000, c, 0xea;
            shr.u32 d, $4, 4;
            and.b32 d, d, 0x01c001c0;
            shl.b32 sign, $4, 2;
            lop3.b32 d, sign, 0x80008000, d, 0xea;
            mul.rn.bf16x2 $0, a, $5;
            mul.rn.bf16x2 $1, b, $6;
            mul.rn.bf16x2 $2, c, $5;
            mul.rn.bf16x2 $3, d, $6;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r",
            [codes.reshape(THREADS, PARTS, 8, 2), tl.broadcast_to(factor, (THREADS, PARTS, 8, 2))],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=False,
            pack=4,
        )
    low, high = tl.split(codes.reshape(THREADS, PARTS, 4, 2, 2).to(tl.int32))
    half = low | (high << 8)
    lower = tl.join(_field(half, 15, 6), _field(half, 9, 0)).permute(0, 1, 2, 4, 3).reshape(THREADS, PARTS, 8, 2)
    upper = tl.join(_field(half, 14, 3), _field(half, 13, 10)).permute(0, 1, 2, 4, 3).reshape(THREADS, PARTS, 8, 2)
    return lower.to(dtype) * factor, upper.to(dtype) * factor


@triton.jit
def _of_block(start, num_blocks, BYTES: tl.constexpr, SHARING: tl.constexpr, UNITS: tl.constexpr, WARPS: tl.constexpr):
    """Where BYTES of every thread lie, twice 64 inputs for every turn of the warps: [threads, parts, BYTES]. SHARING
    threads have the same."""
    thread = tl.arange(0, WARPS * 32)[:, None, None]
    part = tl.arange(0, 2 * (UNITS // WARPS))[None, :, None]
    unit = num_blocks * (64 // SHARING * BYTES)
    of_part = (part // 2) * (WARPS * unit) + (part % 2) * (32 // SHARING * BYTES)
    of_thread = (thread // 32) * unit + thread % 32 // SHARING * BYTES
    return start + of_part + of_thread + tl.arange(0, BYTES)[None, None, :]


@triton.jit
def _as_matrix(lower, upper, UNITS: tl.constexpr, WARPS: tl.constexpr):
    """[outputs, 128 inputs] of _numbers. No thread gives anything away."""
    parts = tl.join(lower, upper).reshape(WARPS, 8, 4, UNITS // WARPS, 2, 4, 2, 2, 2)
    return parts.permute(3, 0, 6, 1, 4, 5, 8, 2, 7).reshape(UNITS * 16, 128)


@triton.jit(do_not_specialize=("num_rows", "num_blocks", "num_splits"))
def _nvfp4_tile(
    x,
    codes,
    block_scale,
    row_scale,
    bias,
    output,
    num_rows,
    num_outputs,
    num_blocks,
    num_splits,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    MORE_ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    # All loads of the loop are on their way that early, only if it says so itself.
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """Some outputs over some inputs, of BLOCK_ROWS and MORE_ROWS rows: powers of two both, their sum need not be."""
    UNITS: tl.constexpr = BLOCK_OUTPUTS // 16
    column = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    split = tl.program_id(1)
    first = split * num_blocks // num_splits
    stop = (split + 1) * num_blocks // num_splits
    row = tl.program_id(2) * (BLOCK_ROWS + MORE_ROWS) + tl.arange(0, BLOCK_ROWS)
    inner = tl.arange(0, 128)
    before = (tl.program_id(0) * UNITS).to(tl.int64) * num_blocks
    of_codes = _of_block(codes + before * 1024, num_blocks, 16, 1, UNITS, WARPS)
    of_scale = _of_block(block_scale + before * 128, num_blocks, 8, 4, UNITS, WARPS)
    of_x = x + row[None, :] * (num_blocks * 128) + inner[:, None]
    more = row
    if MORE_ROWS > 0:
        more = tl.program_id(2) * (BLOCK_ROWS + MORE_ROWS) + BLOCK_ROWS + tl.arange(0, MORE_ROWS)
    of_more = x + more[None, :] * (num_blocks * 128) + inner[:, None]
    if MAY_OVERLAP:
        # Of many rows, the next kernel's programs would only be in the way of those that have not begun.
        if BLOCK_ROWS == 16:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    total_more = tl.zeros((BLOCK_OUTPUTS, MORE_ROWS if MORE_ROWS > 0 else 1), tl.float32)
    for index in tl.range(first, stop, num_stages=STAGES):
        block = tl.load(of_codes + index * 1024)
        scale = tl.load(of_scale + index * 128)
        x_block = tl.load(of_x + index * 128, mask=(row < num_rows)[None, :], other=0.0)
        lower, upper = _numbers(block, scale, x.dtype.element_ty, MAY_OVERLAP)
        values = _as_matrix(lower, upper, UNITS, WARPS)
        total = tl.dot(values, x_block, total, input_precision="ieee")
        if MORE_ROWS > 0:
            x_more = tl.load(of_more + index * 128, mask=(more < num_rows)[None, :], other=0.0)
            total_more = tl.dot(values, x_more, total_more, input_precision="ieee")
    factor = tl.load(row_scale + column)[:, None] * 256.0
    total *= factor
    total_more *= factor
    is_output = (column < num_outputs)[:, None]
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:  # noqa: SIM102
        if split == 0:
            added = tl.load(bias + column, mask=column < num_outputs, other=0.0).to(tl.float32)[:, None]
            total += added
            total_more += added
    place = output + split * num_rows * num_outputs + column[:, None]
    is_row = (row < num_rows)[None, :]
    tl.store(place + row[None, :] * num_outputs, total.to(output.dtype.element_ty), mask=is_output & is_row)
    if MORE_ROWS > 0:
        is_row = (more < num_rows)[None, :]
        tl.store(place + more[None, :] * num_outputs, total_more.to(output.dtype.element_ty), mask=is_output & is_row)


@triton.jit(do_not_specialize=("num_blocks",))
def _nvfp4_numbers(
    codes,
    block_scale,
    row_scale,
    numbers,
    num_outputs,
    num_blocks,
    BLOCK_OUTPUTS: tl.constexpr,
    WARPS: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """Some outputs over one block of inputs."""
    UNITS: tl.constexpr = BLOCK_OUTPUTS // 16
    index = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    before = (tl.program_id(1) * UNITS).to(tl.int64) * num_blocks + index
    block = tl.load(_of_block(codes + before * 1024, num_blocks, 16, 1, UNITS, WARPS))
    scale = tl.load(_of_block(block_scale + before * 128, num_blocks, 8, 4, UNITS, WARPS))
    factor = tl.load(row_scale + column)[:, None] * 256.0
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    lower, upper = _numbers(block, scale, numbers.dtype.element_ty, MAY_OVERLAP)
    values = _as_matrix(lower, upper, UNITS, WARPS).to(tl.float32) * factor
    place = numbers + column[:, None].to(tl.int64) * (num_blocks * 128) + (index * 128 + tl.arange(0, 128))[None, :]
    tl.store(place, values.to(numbers.dtype.element_ty), mask=(column < num_outputs)[:, None])
