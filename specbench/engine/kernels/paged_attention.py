"""Paged attention on a GPU: any number of rows a request, keys read once for all of them.

One program takes all query heads that share a key head, times as many rows as fit its tile, so that verifying nine rows
reads as much as decoding one. The grid depends on what the host knows (requests, most rows of one, rows in total);
loops run over lengths that only the device knows. Where keys are split, the last program of a tile to end adds up what
all have stored, or, where that is much, a launch of its own does; either way in the order of the splits.

Belongs here: the kernel, and its torch reference. Does not belong here: how work is cut up (attention_plan.py), what
distances add to scores (attention_bias.py), layers and backends.

score(row, key) = (query . key * scale + relative(row) . profiles[distance]) * log_scale(row), softmax over the keys up
to the row's own position and within the window; the relative term exists within the profiles' extent.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import itertools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.attention_bias import RelativeTerm, bias_by_key, dot_width, first_biased
from specbench.engine.kernels.attention_plan import MAX_COMBINED_PAIRS, TilePlan, plan_tiles
from specbench.engine.kernels.overlap import launch_options
from specbench.engine.kernels.step_rows import PagedBatch

_LOG2_E = math.log2(math.e)


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    relative: RelativeTerm | None = None,
    log_scale: Tensor | None = None,
    plan: TilePlan | None = None,
) -> Tensor:
    """query [T, heads, d], kv_cache [slots + 1, 2, kv_heads, d], log_scale [T] fp32 -> [T, heads, d].

    Query heads that share a key head are neighbours. Heads may be a view of wider rows. Captured in a graph, it must
    follow the kernel that makes its inputs.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    group = num_heads // num_kv_heads
    num_reqs = len(batch.first_position)
    head_bytes = head_dim * query.element_size()
    is_relative = relative is not None
    plan = plan or plan_tiles(
        num_reqs, num_rows, batch.max_rows, group, num_kv_heads, head_bytes, is_relative=is_relative
    )
    output = query.new_empty(num_rows, num_heads, head_dim)
    is_split = plan.num_splits > 1
    partial, lse = output, output
    is_combined = plan.is_combined and batch.arrivals is not None
    if is_split:
        partial = query.new_empty((num_rows, num_heads, plan.num_splits, head_dim), dtype=torch.float32)
        lse = query.new_empty((num_rows, num_heads, plan.num_splits), dtype=torch.float32)
    by_key = query if relative is None else bias_by_key(relative, batch, plan.tile_keys)
    assert query.stride(1) == head_dim and query.stride(2) == 1 and kv_cache.is_contiguous()
    assert batch.block_table.stride(1) == 1 and batch.query_start_loc.is_contiguous()
    assert batch.first_position.is_contiguous() and (batch.num_live is None or batch.num_live.is_contiguous())
    _attend_tile[(plan.num_tiles, num_kv_heads, plan.num_splits)](
        query,
        kv_cache,
        batch.block_table,
        batch.query_start_loc,
        batch.first_position,
        batch.first_position if batch.num_live is None else batch.num_live,
        by_key,
        query if log_scale is None else log_scale,
        output,
        partial,
        lse,
        batch.arrivals if is_combined else lse,
        num_reqs,
        plan.num_splits,
        scale * _LOG2_E,
        query.stride(0),
        batch.block_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=dot_width(head_dim),
        EXTENT=0 if relative is None else relative.profiles.shape[0],
        WIDTH=0 if relative is None else by_key.shape[2],
        WINDOW=window or 0,
        PAGE=batch.block_size,
        HAS_LIVE=batch.num_live is not None,
        HAS_LOG_SCALE=log_scale is not None,
        IS_TILE_A_REQUEST=plan.is_tile_a_request,
        # A loop without masks pays where arithmetic is what takes time, and where most keys are out of bias' reach.
        HAS_PLAIN_LOOP=window is None and (not plan.is_tile_a_request or relative is not None),
        IS_SPLIT=is_split,
        COMBINED_SPLITS=plan.num_splits if is_combined else 0,
        BLOCK_M=plan.tile_rows,
        BLOCK_N=plan.tile_keys,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **launch_options(query.device),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if is_split and not is_combined:
        _combine_splits[(num_rows * num_heads,)](
            partial,
            lse,
            output,
            HEAD_DIM=head_dim,
            BLOCK_D=dot_width(head_dim),
            NUM_SPLITS=plan.num_splits,
            **launch_options(query.device),
            num_warps=4 if plan.num_splits > 8 else 1,
        )
    return output


def new_arrivals(device: torch.device) -> Tensor:
    """Of each tile and key head, the programs that have stored their split, [MAX_COMBINED_PAIRS] int32: none, and none
    again when a launch has ended. One launch at a time may use them."""
    return torch.zeros(MAX_COMBINED_PAIRS, dtype=torch.int32, device=device)


# Index tensors are parts of others and begin wherever: one compiled kernel takes them all.
@triton.jit(
    do_not_specialize=("num_reqs", "num_splits", "table_stride"),
    do_not_specialize_on_alignment=("block_table", "query_start_loc", "first_position", "num_live", "log_scale"),
)
def _attend_tile(
    query,
    kv_cache,
    block_table,
    query_start_loc,
    first_position,
    num_live,
    by_key,
    log_scale,
    output,
    partial,
    lse,
    arrivals,
    num_reqs,
    num_splits,
    scale,
    query_stride,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTENT: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    HAS_LOG_SCALE: tl.constexpr,
    IS_TILE_A_REQUEST: tl.constexpr,
    HAS_PLAIN_LOOP: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    COMBINED_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request, first_row = _place(query_start_loc, num_reqs, ROWS, IS_TILE_A_REQUEST)
    first_token = tl.load(query_start_loc + request) + first_row
    num_rows = tl.load(query_start_loc + request + 1) - first_token
    live = tl.minimum(num_rows, ROWS)
    if HAS_LIVE:
        live = tl.minimum(live, tl.load(num_live + request).to(tl.int32) - first_row)
    first = tl.load(first_position + request).to(tl.int32) + first_row
    start, end = _keys_of_split(first, live, split, num_splits, WINDOW, IS_SPLIT, BLOCK_N)
    table = block_table + request.to(tl.int64) * table_stride + 1
    first_keys = start + tl.arange(0, BLOCK_N)
    block = tl.load(table + first_keys // PAGE, mask=first_keys < end, other=0)

    # What was read so far is as old as the step (see overlap.py).
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if num_rows <= 0:
        return

    m = tl.arange(0, BLOCK_M)
    row = m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_live = row < live
    token = (first_token + row).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_head = (d < HEAD_DIM)[None, :]
    of_query = token[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :]
    q = tl.load(query + of_query, mask=is_live[:, None] & is_head, other=0.0)
    # Where a row's bias of key 0 would lie.
    biased_from = first_biased(first + row, EXTENT, BLOCK_N)
    biases = by_key + ((token * HEADS + head) * WIDTH - biased_from)
    row_factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_LOG_SCALE:
        row_factor = tl.load(log_scale + token, mask=is_live, other=1.0)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    masked_start = start
    if HAS_PLAIN_LOOP:
        plain_end = first - EXTENT + 1 if EXTENT > 0 else first + 1
        masked_start = tl.maximum(tl.minimum(plain_end, end) // BLOCK_N * BLOCK_N, start)
        maximum, total, sums, block = _attend_keys(
            maximum, total, sums, block, q, biases, biased_from, is_live, row_factor, kv_cache, table, kv_head,
            start, masked_start, end, first, row, scale,
            KV_HEADS, HEAD_DIM, BLOCK_D, 0, 0, 0, PAGE, HAS_LOG_SCALE, False, BLOCK_N, PRECISION,
        )  # fmt: skip
    maximum, total, sums, block = _attend_keys(
        maximum, total, sums, block, q, biases, biased_from, is_live, row_factor, kv_cache, table, kv_head,
        masked_start, end, end, first, row, scale,
        KV_HEADS, HEAD_DIM, BLOCK_D, EXTENT, WIDTH, WINDOW, PAGE, HAS_LOG_SCALE, True, BLOCK_N, PRECISION,
    )  # fmt: skip

    # A dead row, and one without keys in this split, is zero.
    total = tl.where(is_live, total, 0.0)
    values = tl.where((total > 0)[:, None], sums / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    is_row = row < tl.minimum(num_rows, ROWS)
    is_stored = is_row[:, None] & is_head
    place = token * HEADS + head
    if IS_SPLIT:
        part = place * num_splits + split
        tl.store(lse + part, tl.where(total > 0, maximum + tl.log2(total), float("-inf")), mask=is_row)
        tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], values, mask=is_stored & (total > 0)[:, None])
    else:
        stored = values.to(output.dtype.element_ty)
        tl.store(output + place[:, None] * HEAD_DIM + d[None, :], stored, mask=is_stored)
    if COMBINED_SPLITS > 0:
        _combine_if_last(
            arrivals + tl.program_id(0) * KV_HEADS + kv_head, partial, lse, output,
            first_token.to(tl.int64) * HEADS + kv_head * GROUP, tl.minimum(num_rows, ROWS) * GROUP,
            HEADS, GROUP, HEAD_DIM, BLOCK_D, COMBINED_SPLITS, BLOCK_M,
        )  # fmt: skip


@triton.jit
def _place(query_start_loc, num_reqs, ROWS: tl.constexpr, IS_TILE_A_REQUEST: tl.constexpr):
    """This program's request, and the first of its rows. Request i has room for its tiles from
    query_start_loc[i] // ROWS + i on, whatever the requests before it hold."""
    index = tl.program_id(0)
    request = index
    tile = 0
    if not IS_TILE_A_REQUEST:
        low = 0
        high = num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            is_after = tl.load(query_start_loc + middle) // ROWS + middle > index
            high = tl.where(is_after, middle, high)
            low = tl.where(is_after, low, middle)
        request = low
        tile = index - (tl.load(query_start_loc + request) // ROWS + request)
    return request, tile * ROWS


@triton.jit
def _keys_of_split(first, live, split, num_splits, WINDOW: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """First key, and one past the last: whole tiles, as even as they come; none without a live row."""
    start = 0
    if WINDOW > 0:
        start = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    end = first + live
    if IS_SPLIT:
        split_keys = tl.cdiv(tl.cdiv(end - start, BLOCK_N), num_splits) * BLOCK_N
        start += split * split_keys
        end = tl.minimum(start + split_keys, end)
    return start, tl.where(live > 0, end, start)


@triton.jit
def _attend_keys(
    maximum, total, sums, block, q, biases, biased_from, is_live, row_factor, kv_cache, table, kv_head,
    start, stop, end, first, row, scale,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXTENT: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_LOG_SCALE: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys start .. stop - 1, in tiles; those from `end` on are not read. Unmasked: every row sees all of them. Block
    numbers are read a tile ahead: keys that wait for theirs in the same turn get half of the pipeline."""
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    STRIDE: tl.constexpr = KV_HEADS * HEAD_DIM
    keys_of_head = kv_cache + kv_head * HEAD_DIM
    for tile_start in tl.range(start, stop, BLOCK_N):
        keys = tile_start + n
        is_key = keys < end
        offset = (block.to(tl.int64) * PAGE + keys % PAGE) * (2 * STRIDE)
        block = tl.load(table + (keys + BLOCK_N) // PAGE, mask=keys + BLOCK_N < end, other=0)
        is_loaded = is_key[:, None] & (d < HEAD_DIM)[None, :]
        k = tl.load(keys_of_head + offset[:, None] + d[None, :], mask=is_loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        distance = (first + row)[:, None] - keys[None, :]
        if EXTENT > 0:
            # All of a tile's keys of a row, or none.
            column = tile_start - biased_from
            is_near = is_live & (column >= 0) & (column < WIDTH)
            of_tile = tl.multiple_of(tile_start, BLOCK_N) + n
            bias = tl.load(biases[:, None] + of_tile[None, :], mask=is_near[:, None], other=0.0)
            scores += bias.to(tl.float32) * 1.4426950408889634
        if HAS_LOG_SCALE:
            scores *= row_factor[:, None]
        if IS_MASKED:
            is_seen = distance >= 0
            if WINDOW > 0:
                is_seen = is_seen & (distance < WINDOW)
            scores = tl.where(is_seen & is_key[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet has nothing to scale.
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp2(scores - shift[:, None])
        kept = tl.exp2(maximum - shift)
        total = total * kept + tl.sum(weights, 1)
        v = tl.load(keys_of_head + STRIDE + offset[:, None] + d[None, :], mask=is_loaded, other=0.0)
        sums = tl.dot(weights.to(v.dtype), v, sums * kept[:, None], input_precision=PRECISION)
        maximum = new_maximum
    return maximum, total, sums, block


@triton.jit
def _combine_if_last(
    arrivals, partial, lse, output, first_place, num_places,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of a tile when all of them are there: `num_places` rows of heads, GROUP neighbours a row."""
    # All threads' stores come before the one thread's that says so.
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == NUM_SPLITS - 1:
        tl.store(arrivals, 0)
        CHUNK: tl.constexpr = min(64 // NUM_SPLITS, BLOCK_M)
        for start in tl.range(0, num_places, CHUNK, num_stages=1):
            m = start + tl.arange(0, CHUNK)
            place = first_place + m // GROUP * HEADS + m % GROUP
            _combine_places(partial, lse, output, place, m < num_places, HEAD_DIM, BLOCK_D, NUM_SPLITS)


@triton.jit
def _combine_splits(
    partial,
    lse,
    output,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """One head of one row."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    _combine_places(partial, lse, output, place, place >= 0, HEAD_DIM, BLOCK_D, NUM_SPLITS)


@triton.jit
def _combine_places(
    partial, lse, output, place, is_place, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, NUM_SPLITS: tl.constexpr
):
    """Parts weighted by their share of the sum of exponentials. Other programs' are not in this multiprocessor's
    cache."""
    d = tl.arange(0, BLOCK_D)
    part = place[:, None] * NUM_SPLITS + tl.arange(0, NUM_SPLITS)[None, :]
    of_split = tl.load(lse + part, mask=is_place[:, None], other=float("-inf"), cache_modifier=".cg")
    maximum = tl.max(of_split, 1)
    share = tl.exp2(of_split - tl.where(maximum == float("-inf"), 0.0, maximum)[:, None])
    total = tl.sum(share, 1)
    is_part = (of_split > float("-inf"))[:, :, None] & (d < HEAD_DIM)[None, None, :]
    of_part = partial + part[:, :, None] * HEAD_DIM + d[None, None, :]
    parts = tl.load(of_part, mask=is_part, other=0.0, cache_modifier=".cg")
    values = tl.sum(parts * share[:, :, None], 1) / tl.where(total > 0, total, 1.0)[:, None]
    is_stored = is_place[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(output + place[:, None] * HEAD_DIM + d[None, :], values.to(output.dtype.element_ty), mask=is_stored)


def paged_attention_reference(
    query: Tensor,
    kv_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    relative: RelativeTerm | None = None,
    log_scale: Tensor | None = None,
) -> Tensor:
    """The same, request by request, in the arithmetic of its inputs."""
    output = torch.zeros_like(query)
    starts = batch.query_start_loc.tolist()
    group = query.shape[1] // kv_cache.shape[2]
    for request, (start, stop) in enumerate(itertools.pairwise(starts)):
        live = stop - start if batch.num_live is None else min(int(batch.num_live[request]), stop - start)
        first = int(batch.first_position[request])
        if live <= 0:
            continue
        rows = slice(start, start + live)
        keys = torch.arange(first + live, device=query.device)
        slots = batch.block_table[request, 1 + keys // batch.block_size].long() * batch.block_size
        k, v = kv_cache[slots + keys % batch.block_size].repeat_interleave(group, 2).unbind(1)
        distance = (first + torch.arange(live, device=query.device))[:, None] - keys
        # [heads, rows, keys]
        scores = torch.einsum("rhd,khd->hrk", query[rows], k) * scale
        if relative is not None:
            extent = len(relative.profiles)
            near = (distance >= 0) & (distance < extent)
            of_distance = torch.einsum("rhc,ec->hre", relative.rows[rows], relative.profiles)
            index = distance.clamp(0, extent - 1).expand(len(scores), -1, -1)
            scores = scores + of_distance.gather(2, index) * near
        if log_scale is not None:
            scores = scores * log_scale[rows, None]
        is_seen = (distance >= 0) & (distance < (window or first + live))
        output[rows] = torch.einsum("hrk,khd->rhd", scores.masked_fill(~is_seen, -math.inf).softmax(-1), v)
    return output
