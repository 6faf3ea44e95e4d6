"""Experts in codes on a GPU: as experts.py has them, each code converted where it is multiplied.

Half of bf16's bytes are read (FP8), or a quarter and some (NVFP4), of those experts alone that a row chose.

Belongs here: products of FP8 and NVFP4 stacks. Does not belong here: tiles, sums and launches, which are those of
experts.py; dense weights in codes (fp8_linear.py, nvfp4_linear.py); how codes are read (checkpoints/).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.experts import launch_plan, own_tile, store_tile, sum_chosen, swiglu
from specbench.engine.kernels.nvfp4_linear import BLOCK_K, e2m1
from specbench.engine.kernels.router import Choice


class Nvfp4Codes(Protocol):
    """Matrices of experts, [experts, outputs, inputs]; inputs a multiple of BLOCK_K."""

    @property
    def codes(self) -> Tensor:
        """[experts, outputs, inputs / 2] uint8, the even column in the low half."""
        ...

    @property
    def block_scale(self) -> Tensor:
        """[experts, outputs, inputs / 16] float8_e4m3fn."""
        ...

    @property
    def scale(self) -> Tensor:
        """[experts] fp32."""
        ...


class Fp8Codes(Protocol):
    """The same in FP8."""

    @property
    def codes(self) -> Tensor:
        """[experts, outputs, inputs] float8_e4m3fn."""
        ...

    @property
    def scale(self) -> Tensor:
        """[experts, outputs, inputs / 128] fp32."""
        ...


def run_nvfp4_experts(
    x: Tensor, choice: Choice, gate_up: Nvfp4Codes, down: Nvfp4Codes, first_expert: int = 0
) -> Tensor:
    """As run_experts, of gate_up [experts, 2 * width, hidden] (gates first) and down [experts, hidden, width]."""
    gate_up_matrices = _Matrices(gate_up.codes, gate_up.block_scale, gate_up.scale)
    down_matrices = _Matrices(down.codes, down.block_scale, down.scale)
    return _run(x, choice, gate_up_matrices, down_matrices, first_expert, per_byte=2, per_scale=16)


def run_fp8_experts(x: Tensor, choice: Choice, gate_up: Fp8Codes, down: Fp8Codes, first_expert: int = 0) -> Tensor:
    """As run_nvfp4_experts."""
    # An expert has no scale of its own: what stands in its place is not read.
    gate_up_matrices = _Matrices(gate_up.codes, gate_up.scale, gate_up.scale)
    down_matrices = _Matrices(down.codes, down.scale, down.scale)
    return _run(x, choice, gate_up_matrices, down_matrices, first_expert, per_byte=1, per_scale=BLOCK_K)


@dataclass(frozen=True, slots=True)
class _Matrices:
    """What the kernels read, of either form."""

    codes: Tensor
    block_scale: Tensor
    expert_scale: Tensor


def _run(
    x: Tensor, choice: Choice, gate_up: _Matrices, down: _Matrices, first_expert: int, *, per_byte: int, per_scale: int
) -> Tensor:
    """With codes of so many inputs a byte, and so many inputs a scale."""
    num_experts, hidden, num_bytes = down.codes.shape
    width = num_bytes * per_byte
    for each in (gate_up, down):
        assert each.codes.is_contiguous() and each.block_scale.is_contiguous()
    plan = launch_plan(x, choice, num_experts, first_expert, width)
    options = {**plan.options, "PER_BYTE": per_byte, "PER_SCALE": per_scale, "BLOCK_K": BLOCK_K, "num_stages": 3}
    num_entries = choice.experts.numel()
    activated, outputs = x.new_empty(num_entries, width), x.new_empty(num_entries, hidden)
    _gate_up_tile[(triton.cdiv(width, 32), plan.num_tiles)](
        x, gate_up.codes, gate_up.block_scale, gate_up.expert_scale,
        choice.experts, choice.weights, choice.entries, choice.counts, activated, len(x), **options, BLOCK_N=32,
    )  # fmt: skip
    _down_tile[(triton.cdiv(hidden, 64), plan.num_tiles)](
        activated, down.codes, down.block_scale, down.expert_scale,
        choice.experts, choice.entries, choice.counts, outputs, len(x), **options, BLOCK_N=64,
    )  # fmt: skip
    return sum_chosen(outputs, choice, first_expert, num_experts)


@triton.jit
def _input_tile(rows, row, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Where the first inputs of these rows are: each, or of codes in pairs the even ones, [M, BLOCK_K / PER_BYTE]."""
    column = PER_BYTE * tl.arange(0, BLOCK_K // PER_BYTE)
    return rows + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]


@triton.jit
def _code_tiles(
    codes, scales, row, COLUMNS: tl.constexpr, PER_BYTE: tl.constexpr, PER_SCALE: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Where the first codes of these outputs are, and their scales: [BLOCK_K / PER_BYTE, N] both, or [N] scales where a
    block has one."""
    byte = tl.arange(0, BLOCK_K // PER_BYTE)
    code_tile = codes + row[None, :] * (COLUMNS // PER_BYTE) + byte[:, None]
    if PER_SCALE == BLOCK_K:
        scale_tile = scales + row * (COLUMNS // PER_SCALE)
    else:
        scale_tile = scales + row[None, :] * (COLUMNS // PER_SCALE) + byte[:, None] // (PER_SCALE // PER_BYTE)
    return code_tile, scale_tile


@triton.jit
def _load_inputs(inputs, is_entry, PER_BYTE: tl.constexpr):
    """Those of even and of odd columns, or, where no codes are in pairs, all of them (twice)."""
    even = tl.load(inputs, mask=is_entry[:, None], other=0.0)
    odd = even
    if PER_BYTE == 2:
        odd = tl.load(inputs + 1, mask=is_entry[:, None], other=0.0)
    return even, odd


@triton.jit
def _load_codes(codes, scales, is_output, dtype: tl.constexpr, PER_BYTE: tl.constexpr):
    """A block's codes, in pairs as whole numbers or each as `dtype` (converted here: later it costs registers, and
    with them a third of the programs that run at once), and their scales."""
    if PER_BYTE == 2:
        code = tl.load(codes, mask=is_output[None, :], other=0).to(tl.int32)
        scale = tl.load(scales, mask=is_output[None, :], other=0.0).to(tl.float32)
    else:
        code = tl.load(codes, mask=is_output[None, :], other=0.0).to(dtype)
        scale = tl.load(scales, mask=is_output, other=0.0)
    return code, scale


@triton.jit
def _add_block(total, even, odd, code, scale, PER_BYTE: tl.constexpr, PRECISION: tl.constexpr):
    """total [M, N] + a block's inputs times its codes with their scales."""
    if PER_BYTE == 2:
        # A code times its scale has at most 6 bits of mantissa: exact in bf16.
        total = tl.dot(even, (e2m1(code & 15) * scale).to(even.dtype), total, input_precision=PRECISION)
        total = tl.dot(odd, (e2m1(code >> 4) * scale).to(odd.dtype), total, input_precision=PRECISION)
    else:
        total += tl.dot(even, code, input_precision=PRECISION) * scale[None, :]
    return total


@triton.jit(do_not_specialize=("num_rows",))
def _gate_up_tile(
    x, codes, scales, expert_scale, experts, weights, entries, counts, activated, num_rows,
    FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, IS_ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, MAY_OVERLAP: tl.constexpr, PER_BYTE: tl.constexpr, PER_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """weight * silu(gate) * up of one tile of entries, some columns."""
    expert, entry, num = own_tile(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M, MAY_OVERLAP
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = n < WIDTH
    inputs = _input_tile(x, entry // CHOSEN, HIDDEN, PER_BYTE, BLOCK_K)
    gate_row = expert.to(tl.int64) * (2 * WIDTH) + n
    gate_codes, gate_scales = _code_tiles(codes, scales, gate_row, HIDDEN, PER_BYTE, PER_SCALE, BLOCK_K)
    # An expert's ups are behind its gates.
    UP_CODES: tl.constexpr = WIDTH * (HIDDEN // PER_BYTE)
    UP_SCALES: tl.constexpr = WIDTH * (HIDDEN // PER_SCALE)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, HIDDEN // BLOCK_K):
        even, odd = _load_inputs(inputs + block * BLOCK_K, is_entry, PER_BYTE)
        here, scale_here = gate_codes + block * (BLOCK_K // PER_BYTE), gate_scales + block * (BLOCK_K // PER_SCALE)
        of_gate, gate_scale = _load_codes(here, scale_here, is_output, even.dtype, PER_BYTE)
        of_up, up_scale = _load_codes(here + UP_CODES, scale_here + UP_SCALES, is_output, even.dtype, PER_BYTE)
        gate = _add_block(gate, even, odd, of_gate, gate_scale, PER_BYTE, PRECISION)
        up = _add_block(up, even, odd, of_up, up_scale, PER_BYTE, PRECISION)
    if PER_BYTE == 2:
        of_expert = tl.load(expert_scale + expert)
        gate *= of_expert
        up *= of_expert
    weight = tl.load(weights + entry, mask=is_entry, other=0.0)
    store_tile(activated, entry, is_entry, n, swiglu(gate, up, weight[:, None]), WIDTH)


@triton.jit(do_not_specialize=("num_rows",))
def _down_tile(
    activated, codes, scales, expert_scale, experts, entries, counts, outputs, num_rows,
    FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, IS_ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, MAY_OVERLAP: tl.constexpr, PER_BYTE: tl.constexpr, PER_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The way back of one tile of entries, some columns."""
    expert, entry, num = own_tile(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M, MAY_OVERLAP
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inputs = _input_tile(activated, entry, WIDTH, PER_BYTE, BLOCK_K)
    row = expert.to(tl.int64) * HIDDEN + n
    down_codes, down_scales = _code_tiles(codes, scales, row, WIDTH, PER_BYTE, PER_SCALE, BLOCK_K)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, WIDTH // BLOCK_K):
        even, odd = _load_inputs(inputs + block * BLOCK_K, is_entry, PER_BYTE)
        here, scale_here = down_codes + block * (BLOCK_K // PER_BYTE), down_scales + block * (BLOCK_K // PER_SCALE)
        code, scale = _load_codes(here, scale_here, n < HIDDEN, even.dtype, PER_BYTE)
        sums = _add_block(sums, even, odd, code, scale, PER_BYTE, PRECISION)
    if PER_BYTE == 2:
        sums *= tl.load(expert_scale + expert)
    store_tile(outputs, entry, is_entry, n, sums, HIDDEN)
