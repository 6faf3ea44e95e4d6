"""Block accounting: what is given comes back once, windows keep what a later row reads, hits suit all groups."""

import pytest

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.scheduling.kv_cache import Extent, KVCacheManager, PrefixHit, window_blocks
from tests.engine.scheduling.symbolic_device import group, make_request

BLOCK_SIZE = 4


def manager(*specs: CacheGroupSpec, num_blocks: int = 100, prefix_caching: bool = False) -> KVCacheManager:
    return KVCacheManager(specs, BLOCK_SIZE, [num_blocks] * len(specs), prefix_caching)


def cached(cache: KVCacheManager, row: int, tokens: list[int], num_computed: int | None = None) -> None:
    """Run a request over `tokens` as the scheduler would: grow, confirm, publish."""
    request = make_request(row, tokens, 1)
    cache.admit(row, cache.make_keys(request))
    cache.extend(row, len(tokens))
    cache.confirm(row, len(tokens) if num_computed is None else num_computed, len(tokens))


def hit_of(cache: KVCacheManager, tokens: list[int]) -> PrefixHit:
    keys = cache.make_keys(make_request(99, tokens, 1))
    assert keys is not None
    return cache.find_hit(keys, len(tokens))


def test_all_blocks_return():
    cache = manager(group("target_full", None), group("target_window", 8))
    for row in range(3):
        cache.admit(row)
        added = cache.extend(row, 16)
        assert [(index, start, len(ids)) for index, start, ids in added] == [(0, 0, 4), (1, 0, 4)]
    assert cache.num_blocks_used == 2 * 3 * 4
    for row in range(3):
        cache.release(row)
    assert cache.num_blocks_used == 0


def test_rejected_rows_keep_their_blocks():
    cache = manager(group("target_full", None))
    cache.admit(0)
    cache.extend(0, 9)
    assert not cache.extend(0, 7)
    assert [start for _, start, _ in cache.extend(0, 13)] == [3]


def test_nothing_is_taken_when_one_pool_has_too_few():
    cache = KVCacheManager([group("target_full", None), group("target_conv", 4)], BLOCK_SIZE, [10, 4])
    cache.admit(0)
    assert cache.extend(0, 4 * BLOCK_SIZE) is None
    assert cache.num_blocks_used == 0
    assert cache.extend(0, 3 * BLOCK_SIZE) is not None


def test_draft_slots_are_part_of_every_growth():
    cache = manager(group("target_full", None), group("draft_full", None, num_draft_slots=3))
    cache.admit(0)
    assert [len(ids) for _, _, ids in cache.extend(0, 5)] == [2, 2]
    assert [len(ids) for _, _, ids in cache.extend(0, 6)] == [1, 1]


def test_admission_counts_promises_windows_and_the_blocks_of_its_own_hit():
    cache = manager(group("target_full", None), group("target_window", 5), num_blocks=11, prefix_caching=True)
    cached(cache, 0, list(range(20)))
    cache.release(0)
    hit = hit_of(cache, list(range(20)))
    assert hit.num_blocks == 4  # one token at least is left to run
    # Ten blocks in all: four are the hit's, six more are free.
    assert cache.can_admit(hit, Extent(40, 4), promised=0)
    assert not cache.can_admit(hit, Extent(41, 4), promised=0)
    assert not cache.can_admit(hit, Extent(40, 4), promised=1)
    assert cache.can_admit(None, Extent(40, 4), promised=0)
    # Held blocks of a hit cost nothing.
    cache.admit(1, None, hit)
    assert cache.can_admit(hit, Extent(40, 4), promised=0)
    assert not cache.can_admit(None, Extent(25, 4), promised=0)


@pytest.mark.parametrize("window", [1, 4, 5, 8])
@pytest.mark.parametrize("num_provisional_rows", [0, 3, 7])
def test_a_window_keeps_every_position_that_a_later_row_reads(window: int, num_provisional_rows: int):
    spec = group("draft_window", window, num_provisional_rows=num_provisional_rows)
    cache = manager(spec)
    cache.admit(0)
    num_rows = 5
    most_held = 0
    for computed in range(0, 150, 3):
        cache.extend(0, computed + num_rows)
        (table,) = cache.tables_of(0)
        most_held = max(most_held, len(table.held_blocks()))
        first_row = max(computed - num_provisional_rows, 0)
        first_read = max(first_row - (window - 1), 0)
        assert first_read - 2 * BLOCK_SIZE < table.num_freed * BLOCK_SIZE <= first_read
        cache.confirm(0, computed + 3, computed + 4)
    assert most_held <= window_blocks(spec, BLOCK_SIZE, num_rows)
    cache.release(0)
    assert cache.num_blocks_used == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 4),
        ({"num_prompt_lookahead": 1}, 4),
        # 20 tokens known: block 4 ends at 20 and its key needs three tokens behind it.
        ({"num_prompt_lookahead": 3, "num_provisional_rows": 2}, 4),
        # Block 3 ends at 16 and needs 17 .. 24.
        ({"num_prompt_lookahead": 8, "num_provisional_rows": 7}, 3),
    ],
)
def test_a_second_request_of_the_same_text_hits_what_its_groups_can_key(fields: dict, expected: int):
    cache = manager(group("target_full", None), group("draft_full", None, **fields), prefix_caching=True)
    cached(cache, 0, list(range(20)))
    assert hit_of(cache, list(range(20))).num_blocks == expected


def test_a_hit_leaves_a_token_to_run():
    cache = manager(group("target_full", None), prefix_caching=True)
    cached(cache, 0, list(range(24)))
    assert [hit_of(cache, list(range(length))).num_blocks for length in (19, 20, 21, 24)] == [4, 4, 5, 5]


def test_hits_are_the_fixed_point_over_groups():
    """The conv group has lost the block that the full group's longest prefix would need, and the window group's shorter
    prefix lacks a block of its window: each shortens the other's finding until all agree."""
    specs = group("target_full", None), group("target_window", 9), group("target_conv", 4)
    cache = manager(*specs, prefix_caching=True)
    tokens = list(range(100, 141))
    for length in range(5, 42, 4):  # windows pass over every block
        cached(cache, 0, tokens[:length])
        cache.release(0)
    assert hit_of(cache, tokens).num_blocks == 10
    keys = cache.make_keys(make_request(0, tokens, 1))

    def lose(index: int, block: int) -> None:
        pool = cache.pools[index]
        block_id = pool.find(keys.key(block, 0))
        pool._evictable.move_to_end(block_id, last=False)
        pool._evict()

    lose(2, 9)  # a row behind block 9 needs it
    assert hit_of(cache, tokens).num_blocks == 9
    lose(1, 7)  # the windows behind blocks 7 and 8 reach into it
    assert hit_of(cache, tokens).num_blocks == 7
    lose(2, 6)
    lose(0, 3)
    assert hit_of(cache, tokens).num_blocks == 3


def test_a_hit_in_a_window_holds_only_what_rows_behind_it_read():
    cache = manager(group("target_full", None), group("target_window", 6), prefix_caching=True)
    cached(cache, 0, list(range(33)))
    hit = hit_of(cache, list(range(33)))
    assert hit.first_blocks == (0, 6) and [len(ids) for ids in hit.block_ids] == [8, 2]
    cache.release(0)
    cache.admit(1, None, hit)
    assert [pool.num_used for pool in cache.pools] == [8, 2]
    assert cache.tables_of(1)[1].block_ids[:6] == [0] * 6
    cache.release(1)
    assert cache.num_blocks_used == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    cache = manager(group("target_full", None), num_blocks=9, prefix_caching=True)
    cached(cache, 0, list(range(32)), num_computed=32)
    cache.release(0)
    for expected in (6, 5, 4):
        cache.pools[0].take(1 if expected < 6 else 2)
        assert hit_of(cache, list(range(32))).num_blocks == expected
