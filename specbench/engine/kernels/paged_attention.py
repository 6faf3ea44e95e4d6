"""Paged attention on a GPU: any number of rows a request, keys read once for all of them.

Belongs here: the kernel, its torch reference, and how work is cut into programs. Does not belong here: what a layer or
a backend is. One program takes all query heads that share a key head, times as many rows as fit its tile, so that
verifying nine rows reads as much as decoding one. The grid depends on what the host knows (requests, most rows of one,
rows in total); loops run over lengths that only the device knows.

score(row, key) = (query . key * scale + relative(row) . profiles[distance]) * log_scale(row), softmax over the keys up
to the row's own position and within the window; the relative term exists within the profiles' extent.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options

_LOG2_E = math.log2(math.e)
#: Rows times heads of one program, at most, and keys of one turn: both halved where a head takes more bytes than
#: 128 numbers of two bytes, since tiles of queries, keys and values share a multiprocessor's memory.
_MAX_TILE_ROWS = 128
_TILE_KEYS = 64
_MAX_HEAD_BYTES = 256
#: Programs that keep every multiprocessor busy: with fewer, the keys of a request are split.
_FULL_GRID = 256
#: The same of programs that take a fourth of a multiprocessor each; pairs of tile and key head from which on they do.
_FULL_GRID_OF_SMALL, _MIN_SMALL_PAIRS = 512, 128
#: More programs than this run at once only where each takes a fourth.
_MANY_PROGRAMS = 384
_MAX_SPLITS = 16


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Rows of a step, and where the keys of their requests lie."""

    # [num_reqs + 1] int32, row counts summed up
    query_start_loc: Tensor
    # [num_reqs] int64, position of each request's first row
    first_position: Tensor
    # [num_reqs], rows that count: the rest read nothing and give zeros. None: all count
    num_live: Tensor | None
    # [num_reqs, columns] int32: block j of a request is in column j + 1
    block_table: Tensor
    block_size: int
    #: The most rows of one request.
    max_rows: int


@dataclass(frozen=True, slots=True)
class RelativeTerm:
    """What distances add to scores."""

    # [T, heads, d_rel]
    rows: Tensor
    # [extent, d_rel], by distance
    profiles: Tensor


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How one launch is cut up. `num_tiles` covers the rows: one tile a request, or as many as any mix of row counts
    can need."""

    tile_rows: int
    num_tiles: int
    is_tile_a_request: bool
    num_splits: int
    tile_keys: int
    num_warps: int
    num_stages: int


def plan_tiles(
    num_reqs: int,
    num_rows: int,
    max_rows: int,
    group: int,
    num_kv_heads: int,
    head_bytes: int,
    num_splits: int | None = None,
    *,
    is_relative: bool = False,
) -> TilePlan:
    """From what the host knows: requests, rows in total and of the longest, heads a key head, key heads, bytes of one
    head's query, and whether distances add to scores."""
    is_wide = head_bytes > _MAX_HEAD_BYTES
    max_tile_rows = max(_MAX_TILE_ROWS // 2 if is_wide else _MAX_TILE_ROWS, triton.next_power_of_2(group))
    tile_rows = min(max(16, triton.next_power_of_2(max_rows * group)), max_tile_rows)
    rows_a_tile = tile_rows // group
    is_tile_a_request = max_rows <= rows_a_tile
    num_tiles = num_reqs if is_tile_a_request else num_rows // rows_a_tile + num_reqs
    pipeline = _pipeline(tile_rows, num_tiles * num_kv_heads, is_wide=is_wide, is_relative=is_relative)
    if num_splits is None:
        wanted = pipeline.full_grid // max(num_tiles * num_kv_heads, 1)
        num_splits = min(1 << max(wanted.bit_length() - 1, 0), _MAX_SPLITS)
    return TilePlan(
        tile_rows=tile_rows,
        num_tiles=num_tiles,
        is_tile_a_request=is_tile_a_request,
        num_splits=num_splits,
        tile_keys=pipeline.tile_keys,
        num_warps=pipeline.num_warps,
        num_stages=pipeline.num_stages,
    )


@dataclass(frozen=True, slots=True)
class _Pipeline:
    """How a program reads keys, and how many such programs run at once."""

    tile_keys: int
    num_warps: int
    num_stages: int
    full_grid: int


def _pipeline(tile_rows: int, num_pairs: int, *, is_wide: bool, is_relative: bool) -> _Pipeline:
    """What was fastest on an H200 at 1 to 64 requests of about 1,200 tokens, 8 key heads (4 with relative biases, which
    are read beside the keys); num_pairs: of tile and key head."""
    if is_wide:
        return _Pipeline(_TILE_KEYS // 2, 8 if tile_rows >= 128 else 4, 2, _FULL_GRID)
    if tile_rows <= 16 and num_pairs >= _MIN_SMALL_PAIRS:
        return _Pipeline(_TILE_KEYS, 4, 2, _FULL_GRID_OF_SMALL)
    if tile_rows == 32 and num_pairs > _MANY_PROGRAMS:
        return _Pipeline(_TILE_KEYS // 2, 2, 3, _FULL_GRID)
    if tile_rows == 64 and is_relative:
        return _Pipeline(_TILE_KEYS // 2, 4, 4, _FULL_GRID)
    return _Pipeline(_TILE_KEYS, 8 if tile_rows >= 128 else 4, 3, _FULL_GRID)


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
    if is_split:
        partial = query.new_empty((num_rows, num_heads, plan.num_splits, head_dim), dtype=torch.float32)
        lse = query.new_empty((num_rows, num_heads, plan.num_splits), dtype=torch.float32)
    by_key = query if relative is None else _bias_by_key(relative, batch, plan.tile_keys)
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
        num_reqs,
        plan.num_splits,
        scale * _LOG2_E,
        query.stride(0),
        batch.block_table.stride(0),
        KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=_dot_width(head_dim),
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
        BLOCK_M=plan.tile_rows,
        BLOCK_N=plan.tile_keys,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        **launch_options(query.device),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
    )
    if is_split:
        _combine_splits[(num_rows, num_heads)](
            partial,
            lse,
            output,
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=_dot_width(head_dim),
            NUM_SPLITS=plan.num_splits,
            **launch_options(query.device),
            num_warps=4 if plan.num_splits > 8 else 1,
        )
    return output


def _bias_by_key(relative: RelativeTerm, batch: PagedBatch, tile_keys: int) -> Tensor:
    """[T, heads, width]: made first, and by key, so that a tile of scores reads its biases as they lie. Column 0 of a
    row belongs to the first key of the tile in which its profiles begin (`_first_biased`)."""
    num_rows, num_heads, d_rel = relative.rows.shape
    extent = len(relative.profiles)
    width = triton.cdiv(extent + tile_keys - 1, tile_keys) * tile_keys
    by_key = relative.rows.new_empty(num_rows, num_heads, width)
    assert relative.rows.stride(1) == d_rel and relative.rows.stride(2) == 1 and relative.profiles.is_contiguous()
    num_reqs = len(batch.first_position)
    _bias_tile[(num_rows, triton.cdiv(width, 128))](
        relative.rows,
        relative.profiles,
        by_key,
        batch.query_start_loc,
        batch.first_position,
        num_reqs,
        batch.max_rows,
        relative.rows.stride(0),
        HEADS=num_heads,
        BLOCK_HEADS=_dot_width(num_heads),
        D_REL=d_rel,
        BLOCK_REL=_dot_width(d_rel),
        EXTENT=extent,
        WIDTH=width,
        TILE_KEYS=tile_keys,
        BLOCK_N=128,
        IS_UNIFORM=num_rows == num_reqs * batch.max_rows,
        PRECISION="ieee" if by_key.dtype == torch.float32 else "tf32",
        **launch_options(by_key.device),
        num_warps=4,
    )
    return by_key


def _dot_width(width: int) -> int:
    """The least width that a matrix instruction takes."""
    return max(16, triton.next_power_of_2(width))


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    ROWS: tl.constexpr = BLOCK_M // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request, tile = _place(query_start_loc, num_reqs, ROWS, IS_TILE_A_REQUEST)
    row_start = tl.load(query_start_loc + request)
    num_rows = tl.load(query_start_loc + request + 1) - row_start - tile * ROWS
    live = num_rows
    if HAS_LIVE:
        live = tl.minimum(num_rows, tl.load(num_live + request).to(tl.int32) - tile * ROWS)
    live = tl.minimum(live, ROWS)
    first = tl.load(first_position + request).to(tl.int32) + tile * ROWS

    # Keys of this split: whole tiles, as even as they come.
    end = first + live
    start = 0
    if WINDOW > 0:
        start = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if IS_SPLIT:
        split_keys = tl.cdiv(tl.cdiv(end - start, BLOCK_N), num_splits) * BLOCK_N
        start += split * split_keys
        end = tl.minimum(start + split_keys, end)
    if live <= 0:
        end = start
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
    is_row = row < tl.minimum(num_rows, ROWS)
    is_live = row < live
    token = (row_start + tile * ROWS + row).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    is_in_head = is_live[:, None] & (d < HEAD_DIM)[None, :]
    q = tl.load(
        query + token[:, None] * query_stride + head[:, None] * HEAD_DIM + d[None, :], mask=is_in_head, other=0.0
    )
    # Where a row's bias of key 0 would lie.
    first_biased = _first_biased(first + row, EXTENT, BLOCK_N)
    biases = by_key + ((token * HEADS + head) * WIDTH - first_biased)
    row_factor = tl.full([BLOCK_M], 1.0, tl.float32)
    if HAS_LOG_SCALE:
        row_factor = tl.load(log_scale + token, mask=is_live, other=1.0)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    masked_start = start
    if HAS_PLAIN_LOOP:
        plain_end = tl.minimum(first + 1, end)
        if EXTENT > 0:
            plain_end = tl.minimum(first - EXTENT + 1, end)
        masked_start = tl.maximum(plain_end // BLOCK_N * BLOCK_N, start)
        maximum, total, sums, block = _attend_keys(
            maximum, total, sums, block, q, biases, first_biased, is_live, row_factor, kv_cache, table, kv_head,
            start, masked_start, end, first, row, scale,
            KV_HEADS, HEAD_DIM, BLOCK_D, 0, 0, 0, PAGE, HAS_LOG_SCALE, False, BLOCK_N, PRECISION,
        )  # fmt: skip
    maximum, total, sums, block = _attend_keys(
        maximum, total, sums, block, q, biases, first_biased, is_live, row_factor, kv_cache, table, kv_head,
        masked_start, end, end, first, row, scale,
        KV_HEADS, HEAD_DIM, BLOCK_D, EXTENT, WIDTH, WINDOW, PAGE, HAS_LOG_SCALE, True, BLOCK_N, PRECISION,
    )  # fmt: skip

    # A dead row, and one without keys in this split, is zero.
    total = tl.where(is_live, total, 0.0)
    values = tl.where((total > 0)[:, None], sums / tl.where(total > 0, total, 1.0)[:, None], 0.0)
    place = token * HEADS + head
    is_stored = is_row[:, None] & (d < HEAD_DIM)[None, :]
    if IS_SPLIT:
        place = place * num_splits + split
        tl.store(lse + place, tl.where(total > 0, maximum + tl.log2(total), float("-inf")), mask=is_row)
        is_stored = is_stored & (total > 0)[:, None]
        tl.store(partial + place[:, None] * HEAD_DIM + d[None, :], values, mask=is_stored)
    else:
        tl.store(output + place[:, None] * HEAD_DIM + d[None, :], values.to(output.dtype.element_ty), mask=is_stored)


@triton.jit
def _place(query_start_loc, num_reqs, ROWS: tl.constexpr, IS_TILE_A_REQUEST: tl.constexpr):
    """This program's request and tile in it. Request i has room for its tiles from query_start_loc[i] // ROWS + i on,
    whatever the requests before it hold."""
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
    return request, tile


@triton.jit
def _attend_keys(
    maximum, total, sums, block, q, biases, first_biased, is_live, row_factor, kv_cache, table, kv_head,
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
            column = tile_start - first_biased
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
def _first_biased(position, EXTENT: tl.constexpr, TILE_KEYS: tl.constexpr):
    """First key of the tile in which the profiles of a row begin."""
    return tl.maximum(position - EXTENT + 1, 0) // TILE_KEYS * TILE_KEYS


@triton.jit
def _request_of_row(query_start_loc, num_reqs, row):
    low = 0
    high = num_reqs
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(query_start_loc + middle) > row
        high = tl.where(is_after, middle, high)
        low = tl.where(is_after, low, middle)
    return low


@triton.jit(
    do_not_specialize=("num_reqs", "max_rows"),
    do_not_specialize_on_alignment=("query_start_loc", "first_position"),
)
def _bias_tile(
    rows,
    profiles,
    by_key,
    query_start_loc,
    first_position,
    num_reqs,
    max_rows,
    row_stride,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    D_REL: tl.constexpr,
    BLOCK_REL: tl.constexpr,
    EXTENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_UNIFORM: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """All heads of one row, some keys; zeros where the profiles do not reach."""
    token = tl.program_id(0)
    request = token // max_rows
    if not IS_UNIFORM:
        request = _request_of_row(query_start_loc, num_reqs, token)
    position = tl.load(first_position + request).to(tl.int32) + token - tl.load(query_start_loc + request)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    distance = position - _first_biased(position, EXTENT, TILE_KEYS) - column
    head = tl.arange(0, BLOCK_HEADS)
    c = tl.arange(0, BLOCK_REL)
    is_head, is_near, is_part = head < HEADS, (distance >= 0) & (distance < EXTENT), c < D_REL
    own = rows + token.to(tl.int64) * row_stride
    r = tl.load(own + head[:, None] * D_REL + c[None, :], mask=is_head[:, None] & is_part[None, :], other=0.0)
    p = tl.load(profiles + distance[:, None] * D_REL + c[None, :], mask=is_near[:, None] & is_part[None, :], other=0.0)
    biases = tl.where(is_near[None, :], tl.dot(r, tl.trans(p), input_precision=PRECISION), 0.0)
    place = by_key + (token.to(tl.int64) * HEADS + head)[:, None] * WIDTH + column[None, :]
    tl.store(place, biases.to(by_key.dtype.element_ty), mask=is_head[:, None] & (column < WIDTH)[None, :])
    # At the end: it runs beside the kernel that makes attention's inputs (see overlap.py).
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _combine_splits(
    partial,
    lse,
    output,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """One row of one head: parts weighted by their share of the sum of exponentials."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, NUM_SPLITS)
    d = tl.arange(0, BLOCK_D)
    of_split = tl.load(lse + place * NUM_SPLITS + split)
    maximum = tl.max(of_split, 0)
    share = tl.exp2(of_split - tl.where(maximum == float("-inf"), 0.0, maximum))
    total = tl.sum(share, 0)
    parts = tl.load(
        partial + (place * NUM_SPLITS + split)[:, None] * HEAD_DIM + d[None, :],
        mask=(of_split > float("-inf"))[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    values = tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + place * HEAD_DIM + d, values.to(output.dtype.element_ty), mask=d < HEAD_DIM)


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
