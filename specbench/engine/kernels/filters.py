"""Which ids min_p, top_k and top_p leave to each row, as a threshold on its logits: one pass over the vocabulary for
most laws, two for the others, and no sorting.

Belongs here: how to ask, and the order of the launches; sampling/filters.py is the reference. Does not belong here: the
kernels (filter_pivots.py, filter_passes.py, filter_thresholds.py, over what filter_rows.py has in common), and cutting
at thresholds, which kernels do as they read (tempered_sampling.py, drawn_verification.py).

A threshold is the largest value at which something reaches an aim: the number of ids, or their probability.

1. A sample of each row says where it should be. Eight pivots are laid: one above which ids are few, two on either side
   of where the sample has the aim, and five over the rest of the row.
2. A pass measures what lies above each pivot, which says between which two the threshold is, and collects the ids above
   the first and between the next two: it is nearly always among them where the law is flat (the sample is right) or has
   a few likely ids (whatever the sample says).
3. Of the other rows, all above the bracket is known by now, and the sample's ids inside are alike: they say where two
   better pivots should be, and a second pass collects between these.
4. What was collected of a row is moved together, and one program a row finds the threshold among it, or among all ids
   of a row where the bracket was missed twice or has too many ids of one value.

Ids are measured and collected in places that depend on the row alone, and so does the result, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specbench.engine.kernels.filter_passes import measure_and_collect
from specbench.engine.kernels.filter_pivots import lay_pivots, narrow_rows
from specbench.engine.kernels.filter_rows import MEASURE_WIDTH, NUM_PIVOTS, STATE_WIDTH
from specbench.engine.kernels.filter_thresholds import find_thresholds, join_segments
from specbench.engine.kernels.overlap import launch_options


@dataclass(frozen=True, slots=True)
class Sizes:
    """In ids; powers of two."""

    #: What one program of a pass works on.
    chunk: int = 4096
    sample: int = 4096
    #: Ids that are collected at most, of a chunk and of a row.
    segment: int = 1024
    collected: int = 8192


@dataclass(frozen=True, slots=True)
class Filters:
    """Parameters of each row."""

    # [R] fp32; rows at 0 are greedy, and nothing is cut from them
    temperature: Tensor
    # [R] fp32; 0 is off
    min_p: Tensor
    # [R] int64; 0 is off
    top_k: Tensor
    # [R] fp32; 1 is off
    top_p: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What is left of each row: the ids whose logit over temperature is no less than the threshold."""

    # [R] fp32
    threshold: Tensor
    # [R] fp32: logarithm of the sum of their exponentials, of rows at a temperature
    total: Tensor


def kept(logits: Tensor, filters: Filters, sizes: Sizes | None = None) -> Kept:
    """logits [R, vocab] fp32, before temperature.

    min_p first, then top_k, then top_p of what those leave; ids equal to the last one kept are kept. Nothing is
    written to the logits, and nothing depends on the host. A logit over temperature is its product with the rounded
    reciprocal.
    """
    assert logits.stride(1) == 1 and logits.dtype == torch.float32
    num_rows, num_ids = logits.shape
    sizes = sizes or Sizes()
    num_chunks = triton.cdiv(num_ids, sizes.chunk)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=logits.device)

    tensors = (
        logits, logits.stride(0), filters.temperature, filters.min_p, filters.top_k, filters.top_p,
        new(num_rows, NUM_PIVOTS.value), new(num_rows, num_chunks, MEASURE_WIDTH.value),
        new(num_rows, STATE_WIDTH.value), new(num_rows, num_chunks, sizes.segment), 0,
    )  # fmt: skip
    options = {
        "NUM_IDS": num_ids,
        "NUM_CHUNKS": num_chunks,
        "CHUNKS": triton.next_power_of_2(num_chunks),
        "CHUNK": sizes.chunk,
        "SAMPLE": sizes.sample,
        "SEGMENT": sizes.segment,
        "COLLECTED": sizes.collected,
        **launch_options(logits.device),
    }
    result = Kept(new(num_rows), new(num_rows))
    joined = new(num_rows, sizes.collected)
    lay_pivots[(num_rows,)](*tensors, **options, num_warps=8)
    is_fast = logits.is_cuda
    measure_and_collect[(num_rows, num_chunks)](*tensors, **options, IS_SECOND=False, IS_FAST=is_fast, num_warps=8)
    narrow_rows[(num_rows,)](*tensors, **options, num_warps=8)
    measure_and_collect[(num_rows, num_chunks)](*tensors, **options, IS_SECOND=True, IS_FAST=is_fast, num_warps=8)
    join_segments[(num_rows, num_chunks)](*tensors, joined, **options, num_warps=4)
    find_thresholds[(num_rows,)](*tensors, joined, result.threshold, result.total, **options, num_warps=8)
    return result
