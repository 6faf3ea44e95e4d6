"""x weight^T with a weight of FP8 codes, each converted where it is used: half the bytes of bf16.

Codes lie in memory in the order in which the matrix instruction takes numbers from registers, outputs as its rows. So
a thread converts what it has loaded and hands it on, without a way through shared memory, where conversion took longer
than the codes need to arrive. A block of codes is converted once for all rows of x that its program has.

Belongs here: codes of FP8 in that order, their products, and the weight in plain numbers, for so many rows that their
product takes longer than writing and reading those. Does not belong here: how a product is cut up (code_plan.py),
experts (expert_codes.py), NVFP4 (nvfp4_linear.py).
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

_UNPACKED_OUTPUTS, _UNPACKING_WARPS = 64, 4


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A weight of codes, its outputs filled up to whole tiles."""

    # [outputs / 16, inputs / 128, 2 (of 64 inputs), 2 (of 8 outputs), 8 outputs, 4 (of 2 inputs), 4 (of 16 inputs),
    #  2 (of 8 inputs), 2] float8_e4m3fn
    codes: Tensor
    # [inputs / 128, outputs] fp32: a block's are neighbours
    scale: Tensor
    #: Those that are there.
    num_outputs: int

    @property
    def num_inputs(self) -> int:
        return len(self.scale) * BLOCK_K


def pack_fp8(codes: Tensor, scale: Tensor) -> Fp8Weight:
    """codes: [outputs, inputs] float8_e4m3fn; scale: [outputs, inputs / 128] fp32."""
    num_outputs, num_inputs = codes.shape
    missing = padded_outputs(num_outputs) - num_outputs
    parts = F.pad(codes.view(torch.uint8), (0, 0, 0, missing)).view(-1, 2, 8, num_inputs // BLOCK_K, 2, 4, 2, 4, 2)
    packed = parts.permute(0, 3, 4, 1, 2, 7, 5, 6, 8).contiguous()
    return Fp8Weight(packed.view(codes.dtype), F.pad(scale, (0, 0, 0, missing)).T.contiguous(), num_outputs)


def fp8_product(x: Tensor, weight: Fp8Weight, bias: Tensor | None, plan: CodePlan, dtype: torch.dtype) -> Tensor:
    """x: [T, inputs]; bias: [outputs]. Returns [splits, T, outputs] in dtype, whose sum over splits is the product."""
    num_rows, num_inputs = x.shape
    assert x.is_contiguous() and num_inputs == weight.num_inputs and plan.num_splits <= num_inputs // BLOCK_K
    output = torch.empty(plan.num_splits, num_rows, weight.num_outputs, dtype=dtype, device=x.device)
    _fp8_tile[plan.grid(num_rows, weight.num_outputs)](
        x,
        weight.codes,
        weight.scale,
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


def fp8_numbers(weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """The weight in plain numbers, [outputs, inputs]."""
    numbers = torch.empty(weight.num_outputs, weight.num_inputs, dtype=dtype, device=weight.codes.device)
    num_tiles = triton.cdiv(weight.num_outputs, _UNPACKED_OUTPUTS)
    _fp8_numbers[(len(weight.scale), num_tiles)](
        weight.codes,
        weight.scale,
        numbers,
        weight.num_outputs,
        len(weight.scale),
        BLOCK_OUTPUTS=_UNPACKED_OUTPUTS,
        WARPS=_UNPACKING_WARPS,
        **launch_options(weight.codes.device),
        num_warps=_UNPACKING_WARPS,
    )
    return numbers


def converted(codes: Tensor, scale: Tensor) -> Tensor:
    """A weight as it is in a checkpoint, codes [N, K] and scale [N, K / 128], in fp32."""
    return (codes.float().unflatten(1, (-1, BLOCK_K)) * scale.unsqueeze(-1)).flatten(1)


@triton.jit
def _decoded(codes, dtype: tl.constexpr, IS_FAST: tl.constexpr):
    """What the codes stand for. The compiler's own conversion takes more instructions than there is time for while
    codes arrive. Here a code is put into 16 bits behind eight of its sign and moved to where bf16 has its fields: that
    stands for 2 ** -120 of its value, whatever the exponent. No code is taken for NaN."""
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
            mul.rn.bf16x2 $0, low, factor;
            mul.rn.bf16x2 $1, high, factor;
            }""",
            "=r,=r,r",
            [codes],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=4,
        )
    return codes.to(dtype)


@triton.jit
def _of_block(codes, first_unit, num_blocks, UNITS: tl.constexpr, WARPS: tl.constexpr):
    """Where the codes of the first block of these units lie: [4 of a unit for every turn of the warps, bytes of all
    warps], so that a thread gets 16 bytes at a time, and all of them in order."""
    part = tl.arange(0, 4 * (UNITS // WARPS))
    place = tl.arange(0, WARPS * 512)
    unit = num_blocks * 2048
    start = codes + first_unit.to(tl.int64) * unit
    of_part = (part // 4) * (WARPS * unit) + (part % 4) * 512
    return start + of_part[:, None] + ((place // 512) * unit + place % 512)[None, :]


@triton.jit
def _as_matrix(block, UNITS: tl.constexpr, WARPS: tl.constexpr):
    """[outputs, 128 inputs] of what _of_block points at. No thread gives anything away."""
    parts = block.reshape(UNITS // WARPS, 2, 2, WARPS, 8, 4, 4, 2, 2)
    return parts.permute(0, 3, 2, 4, 1, 6, 7, 5, 8).reshape(UNITS * 16, 128)


@triton.jit(do_not_specialize=("num_rows", "num_blocks", "num_splits"))
def _fp8_tile(
    x,
    codes,
    scale,
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
    padded = tl.cdiv(num_outputs, 64) * 64
    column = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    split = tl.program_id(1)
    first = split * num_blocks // num_splits
    stop = (split + 1) * num_blocks // num_splits
    row = tl.program_id(2) * (BLOCK_ROWS + MORE_ROWS) + tl.arange(0, BLOCK_ROWS)
    inner = tl.arange(0, 128)
    of_codes = _of_block(codes, tl.program_id(0) * UNITS, num_blocks, UNITS, WARPS)
    of_x = x + row[None, :] * (num_blocks * 128) + inner[:, None]
    more = row
    if MORE_ROWS > 0:
        more = tl.program_id(2) * (BLOCK_ROWS + MORE_ROWS) + BLOCK_ROWS + tl.arange(0, MORE_ROWS)
    of_more = x + more[None, :] * (num_blocks * 128) + inner[:, None]
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    total_more = tl.zeros((BLOCK_OUTPUTS, MORE_ROWS if MORE_ROWS > 0 else 1), tl.float32)
    for index in tl.range(first, stop, num_stages=STAGES):
        block = tl.load(of_codes + index * 2048)
        factor = tl.load(scale + index * padded + column)[:, None]
        x_block = tl.load(of_x + index * 128, mask=(row < num_rows)[None, :], other=0.0)
        values = _as_matrix(_decoded(block, x.dtype.element_ty, MAY_OVERLAP), UNITS, WARPS)
        # Scales are for sums, of which there are fewer.
        total += tl.dot(values, x_block, input_precision="ieee") * factor
        if MORE_ROWS > 0:
            x_more = tl.load(of_more + index * 128, mask=(more < num_rows)[None, :], other=0.0)
            total_more += tl.dot(values, x_more, input_precision="ieee") * factor
    is_output = (column < num_outputs)[:, None]
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
def _fp8_numbers(
    codes,
    scale,
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
    padded = tl.cdiv(num_outputs, 64) * 64
    of_codes = _of_block(codes, tl.program_id(1) * UNITS, num_blocks, UNITS, WARPS)
    block = tl.load(of_codes + index * 2048)
    factor = tl.load(scale + index * padded + column)
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = _as_matrix(_decoded(block, tl.bfloat16, MAY_OVERLAP), UNITS, WARPS).to(tl.float32) * factor[:, None]
    place = numbers + column[:, None].to(tl.int64) * (num_blocks * 128) + (index * 128 + tl.arange(0, 128))[None, :]
    tl.store(place, values.to(numbers.dtype.element_ty), mask=(column < num_outputs)[:, None])
