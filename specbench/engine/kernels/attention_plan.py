"""How paged attention is cut into programs: rows and keys of a tile, splits of the keys, and how they are read.

From what the host knows alone, so that a recorded launch suits whatever lengths the device finds. Belongs here: what
was fastest, and why. Does not belong here: the kernel (paged_attention.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

#: Rows times heads of one program, at most, and keys of one turn: both halved where a head takes more bytes than
#: 128 numbers of two bytes, since tiles of queries, keys and values share a multiprocessor's memory.
_MAX_TILE_ROWS = 128
_TILE_KEYS = 64
_MAX_HEAD_BYTES = 256
#: Programs that keep every multiprocessor busy: with fewer, the keys of a request are split.
_FULL_GRID = 256
#: The same of programs that take a fourth of a multiprocessor each; pairs of tile and key head from which on they do.
_FULL_GRID_OF_SMALL, _MIN_SMALL_PAIRS = 512, 128
#: Fewer pairs than this, each of many rows, read half as many keys a turn, of which more are on their way.
_FEW_PAIRS = 128
#: More programs than this run at once only where each takes a fourth.
_MANY_PROGRAMS = 384
_MAX_SPLITS = 16
#: Rows of a tile whose many splits its last program adds up faster than a launch of its own does.
_MAX_COMBINED_ROWS = 12
#: Pairs of tile and key head whose splits are added up so, at most.
MAX_COMBINED_PAIRS = _FULL_GRID_OF_SMALL // 2


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
    #: Whether the last program of a tile adds up its splits, where arrivals are counted.
    is_combined: bool = False


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
        is_combined=_is_combined(num_splits, max_rows * group, num_tiles * num_kv_heads),
    )


def _is_combined(num_splits: int, num_rows: int, num_pairs: int) -> bool:
    """By times of 1 to 32 requests of 1 to 9 rows: of four or eight splits a launch of its own was always faster."""
    is_faster = num_splits == 2 or (num_splits == _MAX_SPLITS and num_rows <= _MAX_COMBINED_ROWS)
    return is_faster and num_pairs <= MAX_COMBINED_PAIRS


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
    if tile_rows == 64 and (is_relative or num_pairs < _FEW_PAIRS):
        return _Pipeline(_TILE_KEYS // 2, 4, 4, _FULL_GRID)
    return _Pipeline(_TILE_KEYS, 8 if tile_rows >= 128 else 4, 3, _FULL_GRID)
