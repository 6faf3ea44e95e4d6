"""Experts in codes on a GPU: as experts.py has them, each code converted where it is multiplied.

Half of bf16's bytes are read (FP8), or a quarter and some (NVFP4), of those experts alone that a row chose.

Belongs here: products of FP8 and NVFP4 stacks. Does not belong here: tiles, sums and launches, which are those of
experts.py; dense weights in codes (fp8_linear.py, nvfp4_linear.py); how codes are read (checkpoints/).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from typing import Protocol

import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.experts import launch_plan, sum_chosen, tile_entries
from specbench.engine.kernels.nvfp4_linear import BLOCK_K, e2m1
from specbench.engine.kernels.overlap import launch_options
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
    num_experts, hidden, _ = down.codes.shape
    width = 2 * down.codes.shape[2]
    plan = launch_plan(x, choice, num_experts, first_expert, width)
    for each in (gate_up, down):
        assert each.codes.is_contiguous() and each.block_scale.is_contiguous()
    num_entries = choice.experts.numel()
    activated, outputs = x.new_empty(num_entries, width), x.new_empty(num_entries, hidden)
    launch = launch_options(x.device)
    _nvfp4_gate_up_tile[(triton.cdiv(width, 32), plan.num_tiles)](
        x, gate_up.codes, gate_up.block_scale, gate_up.scale,
        choice.experts, choice.weights, choice.entries, choice.counts, activated, len(x),
        **plan.options, **launch, BLOCK_N=32, HALF=BLOCK_K // 2, num_warps=4, num_stages=3,
    )  # fmt: skip
    _nvfp4_down_tile[(triton.cdiv(hidden, 64), plan.num_tiles)](
        activated, down.codes, down.block_scale, down.scale,
        choice.experts, choice.entries, choice.counts, outputs, len(x),
        **plan.options, **launch, BLOCK_N=64, HALF=BLOCK_K // 2, num_warps=4, num_stages=3,
    )  # fmt: skip
    return sum_chosen(outputs, choice, first_expert, num_experts)


def run_fp8_experts(x: Tensor, choice: Choice, gate_up: Fp8Codes, down: Fp8Codes, first_expert: int = 0) -> Tensor:
    """As run_nvfp4_experts."""
    num_experts, hidden, width = down.codes.shape
    plan = launch_plan(x, choice, num_experts, first_expert, width)
    for each in (gate_up, down):
        assert each.codes.is_contiguous() and each.scale.is_contiguous()
    num_entries = choice.experts.numel()
    activated, outputs = x.new_empty(num_entries, width), x.new_empty(num_entries, hidden)
    launch = launch_options(x.device)
    _fp8_gate_up_tile[(triton.cdiv(width, 32), plan.num_tiles)](
        x, gate_up.codes, gate_up.scale, choice.experts, choice.weights, choice.entries, choice.counts, activated,
        len(x), **plan.options, **launch, BLOCK_N=32, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    _fp8_down_tile[(triton.cdiv(hidden, 64), plan.num_tiles)](
        activated, down.codes, down.scale, choice.experts, choice.entries, choice.counts, outputs,
        len(x), **plan.options, **launch, BLOCK_N=64, BLOCK_K=BLOCK_K, num_warps=4, num_stages=3,
    )  # fmt: skip
    return sum_chosen(outputs, choice, first_expert, num_experts)


@triton.jit
def _add_product(total, even, odd, pair, scale, PRECISION: tl.constexpr):
    """total [M, N] + inputs of even and odd columns [M, HALF] times codes [HALF, N] with their scales."""
    # A code times its scale has at most 6 bits of mantissa: exact in bf16.
    total = tl.dot(even, (e2m1(pair & 15) * scale).to(even.dtype), total, input_precision=PRECISION)
    return tl.dot(odd, (e2m1(pair >> 4) * scale).to(odd.dtype), total, input_precision=PRECISION)


@triton.jit(do_not_specialize=("num_rows",))
def _nvfp4_gate_up_tile(
    x,
    codes,
    block_scale,
    scale,
    experts,
    weights,
    entries,
    counts,
    activated,
    num_rows,
    FIRST_EXPERT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
):
    """weight * silu(gate) * up of one tile of entries, some columns."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, entry, num = tile_entries(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, HALF)
    is_weight = (n < WIDTH)[None, :]
    inputs = x + (entry // CHOSEN).to(tl.int64)[:, None] * HIDDEN + 2 * byte[None, :]
    row = expert.to(tl.int64) * (2 * WIDTH) + n
    gates = codes + row[None, :] * (HIDDEN // 2) + byte[:, None]
    # Eight bytes are the sixteen columns of a scale.
    gate_scales = block_scale + row[None, :] * (HIDDEN // 16) + byte[:, None] // 8
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, HIDDEN // (2 * HALF)):
        even = tl.load(inputs + block * 2 * HALF, mask=is_entry[:, None], other=0.0)
        odd = tl.load(inputs + block * 2 * HALF + 1, mask=is_entry[:, None], other=0.0)
        g = tl.load(gates + block * HALF, mask=is_weight, other=0).to(tl.int32)
        u = tl.load(gates + WIDTH * (HIDDEN // 2) + block * HALF, mask=is_weight, other=0).to(tl.int32)
        of_gates = tl.load(gate_scales + block * (HALF // 8), mask=is_weight, other=0.0).to(tl.float32)
        of_ups = tl.load(gate_scales + WIDTH * (HIDDEN // 16) + block * (HALF // 8), mask=is_weight, other=0.0)
        gate = _add_product(gate, even, odd, g, of_gates, PRECISION)
        up = _add_product(up, even, odd, u, of_ups.to(tl.float32), PRECISION)
    of_expert = tl.load(scale + expert)
    gate *= of_expert
    weight = tl.load(weights + entry, mask=is_entry, other=0.0)
    values = gate / (1.0 + tl.exp(-gate)) * (up * of_expert) * weight[:, None]
    place = activated + entry.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(place, values.to(activated.dtype.element_ty), mask=is_entry[:, None] & is_weight)


@triton.jit(do_not_specialize=("num_rows",))
def _nvfp4_down_tile(
    activated,
    codes,
    block_scale,
    scale,
    experts,
    entries,
    counts,
    outputs,
    num_rows,
    FIRST_EXPERT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
):
    """The way back of one tile of entries, some columns."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, entry, num = tile_entries(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, HALF)
    is_weight = (n < HIDDEN)[None, :]
    inputs = activated + entry.to(tl.int64)[:, None] * WIDTH + 2 * byte[None, :]
    row = expert.to(tl.int64) * HIDDEN + n
    downs = codes + row[None, :] * (WIDTH // 2) + byte[:, None]
    scales = block_scale + row[None, :] * (WIDTH // 16) + byte[:, None] // 8
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, WIDTH // (2 * HALF)):
        even = tl.load(inputs + block * 2 * HALF, mask=is_entry[:, None], other=0.0)
        odd = tl.load(inputs + block * 2 * HALF + 1, mask=is_entry[:, None], other=0.0)
        pair = tl.load(downs + block * HALF, mask=is_weight, other=0).to(tl.int32)
        of_block = tl.load(scales + block * (HALF // 8), mask=is_weight, other=0.0).to(tl.float32)
        sums = _add_product(sums, even, odd, pair, of_block, PRECISION)
    sums *= tl.load(scale + expert)
    place = outputs + entry.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(place, sums.to(outputs.dtype.element_ty), mask=is_entry[:, None] & is_weight)


@triton.jit(do_not_specialize=("num_rows",))
def _fp8_gate_up_tile(
    x,
    codes,
    scale,
    experts,
    weights,
    entries,
    counts,
    activated,
    num_rows,
    FIRST_EXPERT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """weight * silu(gate) * up of one tile of entries, some columns."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, entry, num = tile_entries(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_weight = n < WIDTH
    inputs = x + (entry // CHOSEN).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    row = expert.to(tl.int64) * (2 * WIDTH) + n
    gates = codes + row[None, :] * HIDDEN + k[:, None]
    factors = scale + row * (HIDDEN // BLOCK_K)
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, HIDDEN // BLOCK_K):
        v = tl.load(inputs + block * BLOCK_K, mask=is_entry[:, None], other=0.0)
        g = tl.load(gates + block * BLOCK_K, mask=is_weight[None, :], other=0.0).to(v.dtype)
        u = tl.load(gates + WIDTH * HIDDEN + block * BLOCK_K, mask=is_weight[None, :], other=0.0).to(v.dtype)
        of_gates = tl.load(factors + block, mask=is_weight, other=0.0)
        of_ups = tl.load(factors + WIDTH * (HIDDEN // BLOCK_K) + block, mask=is_weight, other=0.0)
        gate += tl.dot(v, g, input_precision=PRECISION) * of_gates[None, :]
        up += tl.dot(v, u, input_precision=PRECISION) * of_ups[None, :]
    weight = tl.load(weights + entry, mask=is_entry, other=0.0)
    values = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    place = activated + entry.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(place, values.to(activated.dtype.element_ty), mask=is_entry[:, None] & is_weight[None, :])


@triton.jit(do_not_specialize=("num_rows",))
def _fp8_down_tile(
    activated,
    codes,
    scale,
    experts,
    entries,
    counts,
    outputs,
    num_rows,
    FIRST_EXPERT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The way back of one tile of entries, some columns."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, entry, num = tile_entries(
        experts, entries, counts, num_rows, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    is_weight = n < HIDDEN
    inputs = activated + entry.to(tl.int64)[:, None] * WIDTH + k[None, :]
    row = expert.to(tl.int64) * HIDDEN + n
    downs = codes + row[None, :] * WIDTH + k[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for block in tl.range(0, WIDTH // BLOCK_K):
        v = tl.load(inputs + block * BLOCK_K, mask=is_entry[:, None], other=0.0)
        w = tl.load(downs + block * BLOCK_K, mask=is_weight[None, :], other=0.0).to(v.dtype)
        factor = tl.load(scale + row * (WIDTH // BLOCK_K) + block, mask=is_weight, other=0.0)
        sums += tl.dot(v, w, input_precision=PRECISION) * factor[None, :]
    place = outputs + entry.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(place, sums.to(outputs.dtype.element_ty), mask=is_entry[:, None] & is_weight[None, :])
