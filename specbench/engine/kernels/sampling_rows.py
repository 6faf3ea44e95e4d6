"""The sampling parameters of a step's logits rows, gathered from the persistent rows in one launch.

Belongs here: the gathering. Does not belong here: what parameters do (filters.py, tempered_sampling.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options

_ROWS = 128


@dataclass(frozen=True, slots=True)
class GatheredRows:
    """Parameters of each logits row."""

    # [R] int64
    keys: Tensor
    top_k: Tensor
    # [R] int64: of the tokens to be sampled
    positions: Tensor
    # [R] fp32
    temperature: Tensor
    min_p: Tensor
    top_p: Tensor


def gather_rows(
    persistent_rows: Tensor, positions: Tensor, token_rows: Tensor | None, whole: Tensor, real: Tensor
) -> GatheredRows:
    """persistent_rows [R] int64. positions [num_tokens] int64, of the step's rows; token_rows [R] int64, which of them
    give logits (None: each, in order). whole [2 or more, any] int64: request keys, then top_k. real [3 or more, any]
    fp32: temperature, min_p, top_p."""
    num_rows = len(persistent_rows)
    assert whole.is_contiguous() and real.is_contiguous() and persistent_rows.is_contiguous()
    whole_rows = torch.empty(3, num_rows, dtype=torch.int64, device=whole.device)
    real_rows = torch.empty(3, num_rows, dtype=torch.float32, device=whole.device)
    _gather[(triton.cdiv(num_rows, _ROWS),)](
        persistent_rows, positions, positions if token_rows is None else token_rows, whole, real, whole_rows, real_rows,
        num_rows, whole.shape[1],
        BLOCK=_ROWS, HAS_TOKEN_ROWS=token_rows is not None, **launch_options(whole.device), num_warps=4,
    )  # fmt: skip
    return GatheredRows(*whole_rows.unbind(0), *real_rows.unbind(0))


@triton.jit(
    do_not_specialize=("num_rows", "num_state_rows"),
    do_not_specialize_on_alignment=("persistent_rows", "positions", "token_rows", "whole", "real"),
)
def _gather(
    persistent_rows, positions, token_rows, whole, real, whole_rows, real_rows, num_rows, num_state_rows,
    BLOCK: tl.constexpr, HAS_TOKEN_ROWS: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    source = tl.load(persistent_rows + row, mask=is_row, other=0)
    token_row = row
    if HAS_TOKEN_ROWS:
        token_row = tl.load(token_rows + row, mask=is_row, other=0)
    position = tl.load(positions + token_row, mask=is_row, other=0) + 1
    tl.store(whole_rows + 2 * num_rows + row, position, mask=is_row)
    for index in tl.static_range(2):
        value = tl.load(whole + index * num_state_rows + source, mask=is_row)
        tl.store(whole_rows + index * num_rows + row, value, mask=is_row)
    for index in tl.static_range(3):
        value = tl.load(real + index * num_state_rows + source, mask=is_row)
        tl.store(real_rows + index * num_rows + row, value, mask=is_row)
