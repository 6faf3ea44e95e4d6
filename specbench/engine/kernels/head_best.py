"""The best ids of a few rows over a head, on a GPU: the product with its matrix, of whose logits no more than the
best of each tile is kept.

A product of few rows takes as long as its matrix takes to arrive; logits in fp32 would be written and read beside it.

Belongs here: greedy ids of a head that nobody wants logits of. Does not belong here: ids of logits that are there
(sampling.py), samples at a temperature (tempered_sampling.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.sampling import ChunkBests

#: Rows that are taken: more are a product that computes, and another's.
MAX_ROWS = 64
_TILE_IDS, _TILE_K = 128, 128
#: Programs of a multiprocessor.
_PROGRAMS = 2


def takes(num_rows: int, weight: Tensor) -> bool:
    """Whether it is for so many rows and such a matrix: in a narrow type, its rows as descriptors want them."""
    return num_rows <= MAX_ROWS and weight.dtype == torch.bfloat16 and weight.stride(0) % 8 == 0


def best_of_head(hidden: Tensor, weight: Tensor, num_ids: int) -> ChunkBests:
    """hidden [R, hidden], weight [num_ids or more, hidden] -> of hidden @ weight.T, summed in fp32, the largest logit
    of each tile of ids and its id (ties: the lowest), columns from num_ids on left out."""
    num_rows, size = hidden.shape
    num_tiles = triton.cdiv(num_ids, _TILE_IDS)
    values = torch.empty(num_rows, num_tiles, dtype=torch.float32, device=hidden.device)
    places = torch.empty(num_rows, num_tiles, dtype=torch.int32, device=hidden.device)
    assert hidden.is_contiguous() and weight.is_contiguous()
    _best_of_tiles[(min(num_tiles, _num_programs(hidden.device)),)](
        hidden,
        TensorDescriptor.from_tensor(weight, [_TILE_IDS, _TILE_K]),
        values,
        places,
        num_rows,
        NUM_TILES=num_tiles,
        NUM_IDS=num_ids,
        HIDDEN=size,
        BLOCK_ROWS=max(16, triton.next_power_of_2(num_rows)),
        BLOCK_IDS=_TILE_IDS,
        BLOCK_K=_TILE_K,
        PRECISION="ieee" if hidden.dtype == torch.float32 else "tf32",
        **launch_options(hidden.device),
        num_warps=4,
        num_stages=3,
    )
    return ChunkBests(values, places)


@cache
def _num_programs(device: torch.device) -> int:
    """So many that each has several tiles in turn, one's end beside another's beginning."""
    if device.type == "cpu":
        return 2
    return _PROGRAMS * torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=("num_rows",))
def _best_of_tiles(
    hidden,
    weight,
    values,
    places,
    num_rows,
    NUM_TILES: tl.constexpr,
    NUM_IDS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """All rows, some tiles of ids. Ids are the rows of the product, since a matrix instruction takes many of those."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_K)
    inputs = hidden + row[:, None] * HIDDEN + k[None, :]
    for tile in tl.range(tl.program_id(0), NUM_TILES, tl.num_programs(0), flatten=True):
        ids = tile * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
        logits = tl.zeros([BLOCK_IDS, BLOCK_ROWS], tl.float32)
        for start in tl.range(0, HIDDEN, BLOCK_K):
            is_input = (row < num_rows)[:, None] & (k < HIDDEN - start)[None, :]
            v = tl.load(inputs + start, mask=is_input, other=0.0)
            w = weight.load([tile * BLOCK_IDS, start])
            logits = tl.dot(w, tl.trans(v), logits, input_precision=PRECISION)
        logits = tl.where((ids < NUM_IDS)[:, None], logits, float("-inf"))
        best = tl.max(logits, 0)
        place = tl.min(tl.where(logits == best[None, :], ids[:, None], NUM_IDS), 0)
        tl.store(values + row * NUM_TILES + tile, best, mask=row < num_rows)
        tl.store(places + row * NUM_TILES + tile, place, mask=row < num_rows)
