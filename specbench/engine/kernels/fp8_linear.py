"""x weight^T of few rows with a weight of FP8 codes, each converted where it is used: half the bytes of bf16.

A program has two blocks of codes on the way to its registers before it waits for x (see overlap.py), and while it
multiplies. The product is left as partial sums (see few_rows.py).

Does not belong here: experts (expert_codes.py), NVFP4 (nvfp4_linear.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options

#: Columns of the weight that share a scale.
BLOCK_K = 128
#: Rows that one tile holds at most; more are computed faster with the weight converted as a whole.
MAX_ROWS = 64
_BLOCK_OUTPUTS = 64
#: Programs that keep every multiprocessor busy, and blocks of one, each a turn of an unrolled loop.
_FULL_GRID = 384
_MAX_BLOCKS = 8
_MAX_EARLY_OUTPUTS = 8192


def plan_splits(num_outputs: int, num_inputs: int) -> int:
    """Parts of the inputs whose sums keep a GPU busy; equal ones if there need not be many more for that."""
    num_blocks, num_tiles = num_inputs // BLOCK_K, triton.cdiv(num_outputs, _BLOCK_OUTPUTS)
    wanted = min(max(triton.cdiv(_FULL_GRID, num_tiles), triton.cdiv(num_blocks, _MAX_BLOCKS)), num_blocks)
    return next((splits for splits in range(wanted, 2 * wanted) if num_blocks % splits == 0), wanted)


def fp8_sums(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, num_splits: int) -> Tensor:
    """x: [T, K], T at most MAX_ROWS; codes: [N, K] float8_e4m3fn; scale: [K / 128, N] fp32; bias: [N]. Returns fp32
    [splits, T, N], whose sum over splits is the product."""
    num_rows, num_outputs = len(x), len(codes)
    assert num_rows <= MAX_ROWS and x.is_contiguous() and codes.is_contiguous() and scale.is_contiguous()
    sums = torch.empty(num_splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    block_rows = max(16, triton.next_power_of_2(num_rows))
    _fp8_tile[(triton.cdiv(num_outputs, _BLOCK_OUTPUTS), num_splits)](
        x,
        codes,
        scale,
        codes if bias is None else bias,
        sums,
        num_rows,
        INPUTS=codes.shape[1],
        OUTPUTS=num_outputs,
        BLOCK_ROWS=block_rows,
        BLOCK_OUTPUTS=_BLOCK_OUTPUTS,
        BLOCK_K=BLOCK_K,
        SPLITS=num_splits,
        HAS_BIAS=bias is not None,
        # Of very many programs, most have not begun when a next kernel's first could: a step took longer with those.
        STARTS_NEXT=num_outputs <= _MAX_EARLY_OUTPUTS,
        **launch_options(x.device),
        # More rows would take more registers than a thread has.
        num_warps=4 if block_rows == 16 else 8,
    )
    return sums


def fp8_linear_reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The same, whole, with the weight in the type of x."""
    return F.linear(x, converted(codes, scale.T).to(x.dtype), bias)


def converted(codes: Tensor, scale: Tensor) -> Tensor:
    """The weight in fp32, [N, K]; scale: [N, K / 128]."""
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


@triton.jit(do_not_specialize=("num_rows",))
def _fp8_tile(
    x,
    codes,
    scale,
    bias,
    sums,
    num_rows,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    STARTS_NEXT: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """Some outputs over some inputs. The loop is unrolled, since codes that are carried from turn to turn are taken out
    of their words and put together again."""
    NUM_BLOCKS: tl.constexpr = INPUTS // BLOCK_K
    MOST_BLOCKS: tl.constexpr = (NUM_BLOCKS + SPLITS - 1) // SPLITS
    column = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    split = tl.program_id(1)
    first = split * NUM_BLOCKS // SPLITS
    num_blocks = MOST_BLOCKS
    if NUM_BLOCKS % SPLITS > 0:
        num_blocks = (split + 1) * NUM_BLOCKS // SPLITS - first
    row = tl.arange(0, BLOCK_ROWS)
    inner = tl.arange(0, BLOCK_K)
    is_row = (row < num_rows)[None, :]
    is_column = column < OUTPUTS
    of_codes = codes + column[:, None].to(tl.int64) * INPUTS + (first * BLOCK_K + inner)[None, :]
    of_x = x + row[None, :] * INPUTS + (first * BLOCK_K + inner)[:, None]
    of_scale = scale + first * OUTPUTS + column
    block = tl.load(of_codes, mask=is_column[:, None] & (num_blocks > 0), other=0.0)
    following = tl.load(of_codes + BLOCK_K, mask=is_column[:, None] & (num_blocks > 1), other=0.0)
    if MAY_OVERLAP:
        if STARTS_NEXT:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_block = tl.load(of_x, mask=is_row & (num_blocks > 0), other=0.0)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    for index in tl.static_range(MOST_BLOCKS):
        factor = tl.load(of_scale + index * OUTPUTS, mask=is_column & (index < num_blocks), other=0.0)
        # What the next turn multiplies, and codes of the one after it, are on the way while this one does.
        is_next, is_after = index + 1 < num_blocks, index + 2 < num_blocks
        x_following = tl.load(of_x + (index + 1) * BLOCK_K, mask=is_row & is_next, other=0.0)
        after = tl.load(of_codes + (index + 2) * BLOCK_K, mask=is_column[:, None] & is_after, other=0.0)
        values = _decoded(block, x.dtype.element_ty, MAY_OVERLAP)
        total += tl.dot(values, x_block, input_precision="ieee") * factor[:, None]
        block = following
        following = after
        x_block = x_following
    if HAS_BIAS:  # noqa: SIM102
        if split == 0:
            total += tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)[:, None]
    place = sums + (split * num_rows + row[None, :]) * OUTPUTS + column[:, None]
    tl.store(place, total, mask=is_row & is_column[:, None])
