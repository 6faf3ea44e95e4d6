"""Block accounting: what is given comes back once, windows keep what a later row can still read or rewrite."""

import pytest

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.scheduling.kv_cache import NULL_BLOCK, KVCacheManager, window_blocks

BLOCK_SIZE = 4


def spec(name: str, window: int | None, num_provisional_rows: int = 0) -> CacheGroupSpec:
    kind = "full_attention" if window is None else "sliding_window"
    return CacheGroupSpec(name, "target", kind, ("0",), ((),), 4, window, num_provisional_rows=num_provisional_rows)


def test_blocks_are_unique_and_all_return():
    cache = KVCacheManager([spec("full", None), spec("window", 8)], BLOCK_SIZE, [20, 20])
    seen: list[set[int]] = [set(), set()]
    for row in range(3):
        cache.admit(row, 16)
        for group, start, block_ids in cache.extend(row, 16):
            assert start == 0 and NULL_BLOCK not in block_ids
            assert not seen[group] & set(block_ids)
            seen[group] |= set(block_ids)
    assert cache.num_blocks_used == 2 * 3 * 4
    for row in range(3):
        cache.release(row)
    assert cache.num_blocks_used == 0


def test_rejected_rows_keep_their_blocks():
    cache = KVCacheManager([spec("full", None)], BLOCK_SIZE, [20])
    cache.admit(0, 40)
    cache.extend(0, 9)
    assert cache.extend(0, 7) == []
    assert [start for _, start, _ in cache.extend(0, 13)] == [3]


def test_admission_counts_what_running_requests_may_still_need():
    cache = KVCacheManager([spec("full", None)], BLOCK_SIZE, [11])
    cache.admit(0, 24)
    cache.extend(0, 1)
    assert cache.can_admit(16)
    assert not cache.can_admit(17)
    assert cache.fits_ever(40) and not cache.fits_ever(41)


@pytest.mark.parametrize("window", [1, 4, 5, 8])
@pytest.mark.parametrize("num_provisional_rows", [0, 3, 7])
def test_a_window_keeps_every_position_that_a_later_row_can_read(window: int, num_provisional_rows: int):
    group = spec("window", window, num_provisional_rows)
    cache = KVCacheManager([group], BLOCK_SIZE, [100])
    cache.admit(0, 200)
    num_rows = 5
    most_held = 0
    for computed in range(0, 150, 3):
        cache.extend(0, computed + num_rows)
        table = cache._tables[0][0]
        most_held = max(most_held, len(table.live_blocks()))
        first_row = max(computed - num_provisional_rows, 0)
        first_read = max(first_row - (window - 1), 0)
        assert table.num_freed * BLOCK_SIZE <= first_read
        cache.free_behind_windows(0, computed + 3)
    assert most_held <= window_blocks(group, BLOCK_SIZE, num_rows)
    cache.release(0)
    assert cache.num_blocks_used == 0
