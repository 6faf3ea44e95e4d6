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
    output = torch.empty(plan.num_splits, len(x), weight.num_outputs, dtype=dtype, device=x.device)
    _launch(x, weight, bias, plan, output, is_gated=False)
    return output


def can_gate(plan: CodePlan, num_outputs: int) -> bool:
    """Whether a program of such a plan can have as many gates as ups, and whole ones."""
    return plan.num_splits == 1 and plan.block_outputs == 16 * plan.num_warps and num_outputs % plan.block_outputs == 0


def fp8_gated_product(x: Tensor, gate_up: Fp8Weight, bias: Tensor | None, plan: CodePlan) -> Tensor:
    """silu(x gate^T) * (x up^T) of gate_up [2 * width, inputs], gates first -> [T, width]: sums in fp32, rounded to the
    type of x before gates and ups are multiplied."""
    assert can_gate(plan, gate_up.num_outputs)
    output = x.new_empty(len(x), gate_up.num_outputs // 2)
    _launch(x, gate_up, bias, plan, output, is_gated=True)
    return output


def _launch(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, plan: CodePlan, output: Tensor, *, is_gated: bool
) -> None:
    num_rows, num_inputs = x.shape
    assert x.is_contiguous() and num_inputs == weight.num_inputs and plan.num_splits <= num_inputs // BLOCK_K
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
        IS_GATED=is_gated,
        **launch_options(x.device),
        num_warps=plan.num_warps,
    )


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
def _of_block(codes, first_unit, between, num_blocks, UNITS: tl.constexpr, WARPS: tl.constexpr):
    """Where the codes of the first block of these units lie: [4 of a unit for every turn of the warps, bytes of all
    warps], so that a thread gets 16 bytes at a time, and all of them in order. Of a turn, the second half's units begin
    so many after those of the first."""
    HALF: tl.constexpr = WARPS // 2
    part = tl.arange(0, 4 * (UNITS // WARPS))
    place = tl.arange(0, WARPS * 512)
    unit_bytes = num_blocks * 2048
    unit = place // 512 // HALF * between + place // 512 % HALF
    start = codes + first_unit.to(tl.int64) * unit_bytes
    of_part = (part // 4) * (WARPS * unit_bytes) + (part % 4) * 512
    return start + of_part[:, None] + (unit * unit_bytes + place % 512)[None, :]


@triton.jit
def _gated(total, dtype: tl.constexpr):
    """[gates and ups, rows] -> [width, rows]"""
    halves = total.to(dtype).to(tl.float32).reshape(2, total.shape[0] // 2, total.shape[1])
    gate, up = tl.split(halves.permute(1, 2, 0))
    return gate / (1.0 + tl.exp(-gate)) * up


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
    IS_GATED: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """Some outputs over some inputs, of BLOCK_ROWS and MORE_ROWS rows: powers of two both, their sum need not be."""
    UNITS: tl.constexpr = BLOCK_OUTPUTS // 16
    HALF: tl.constexpr = BLOCK_OUTPUTS // 2
    padded = tl.cdiv(num_outputs, 64) * 64
    column = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    if IS_GATED:
        place = tl.arange(0, BLOCK_OUTPUTS)
        column = place // HALF * (num_outputs // 2) + tl.program_id(0) * HALF + place % HALF
        of_codes = _of_block(codes, tl.program_id(0) * (UNITS // 2), num_outputs // 32, num_blocks, UNITS, WARPS)
    else:
        of_codes = _of_block(codes, tl.program_id(0) * UNITS, WARPS // 2, num_blocks, UNITS, WARPS)
    split = tl.program_id(1)
    first = split * num_blocks // num_splits
    stop = (split + 1) * num_blocks // num_splits
    row = tl.program_id(2) * (BLOCK_ROWS + MORE_ROWS) + tl.arange(0, BLOCK_ROWS)
    inner = tl.arange(0, 128)
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
        block = tl.load(of_codes + index * 2048)
        factor = tl.load(scale + index * padded + column)[:, None]
        x_block = tl.load(of_x + index * 128, mask=(row < num_rows)[None, :], other=0.0)
        values = _as_matrix(_decoded(block, x.dtype.element_ty, MAY_OVERLAP), UNITS, WARPS)
        # Scales are for sums, of which there are fewer.
        total += tl.dot(values, x_block, input_precision="ieee") * factor
        if MORE_ROWS > 0:
            x_more = tl.load(of_more + index * 128, mask=(more < num_rows)[None, :], other=0.0)
            total_more += tl.dot(values, x_more, input_precision="ieee") * factor
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_BIAS:  # noqa: SIM102
        if split == 0:
            added = tl.load(bias + column, mask=column < num_outputs, other=0.0).to(tl.float32)[:, None]
            total += added
            total_more += added
    is_row, is_output = (row < num_rows)[None, :], (column < num_outputs)[:, None]
    place = output + split * num_rows * num_outputs + column[:, None]
    if IS_GATED:
        total = _gated(total, output.dtype.element_ty)
        is_output = is_row
        num_outputs = num_outputs // 2
        place = output + (tl.program_id(0) * HALF + tl.arange(0, HALF))[:, None]
    tl.store(place + row[None, :] * num_outputs, total.to(output.dtype.element_ty), mask=is_output & is_row)
    if MORE_ROWS > 0:
        is_row = (more < num_rows)[None, :]
        if IS_GATED:
            total_more = _gated(total_more, output.dtype.element_ty)
            is_output = is_row
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
    of_codes = _of_block(codes, tl.program_id(1) * UNITS, WARPS // 2, num_blocks, UNITS, WARPS)
    block = tl.load(of_codes + index * 2048)
    factor = tl.load(scale + index * padded + column)
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = _as_matrix(_decoded(block, tl.bfloat16, MAY_OVERLAP), UNITS, WARPS).to(tl.float32) * factor[:, None]
    place = numbers + column[:, None].to(tl.int64) * (num_blocks * 128) + (index * 128 + tl.arange(0, 128))[None, :]
    tl.store(place, values.to(numbers.dtype.element_ty), mask=(column < num_outputs)[:, None])
