"""Blocks: each in one state, the least recently used evicted first, nothing found that was evicted or forgotten."""

from specbench.engine.scheduling.block_pool import NULL_BLOCK, BlockPool


def test_blocks_are_unique_and_never_the_null_block():
    pool = BlockPool(6)
    taken = pool.take(5)
    assert sorted(taken) == [1, 2, 3, 4, 5] and NULL_BLOCK not in taken
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.give_back(taken)
    assert (pool.num_free, pool.num_used) == (5, 0)


def test_a_published_block_is_found_until_it_is_evicted_least_recently_used_first():
    pool = BlockPool(4)
    first, second, third = pool.take(3)
    for block_id, key in ((first, b"1"), (second, b"2"), (third, b"3")):
        pool.publish(block_id, key)
    pool.give_back([first, second, third])
    pool.hold(first)  # used again: now the most recent
    pool.give_back([first])
    assert pool.take(1) == [second] and pool.num_evictions == 1
    assert pool.find(b"2") is None and pool.find(b"1") == first
    assert pool.take(1) == [third]
    assert pool.take(1) == [first] and pool.num_evictions == 3


def test_a_block_that_nobody_can_find_is_given_out_before_any_is_evicted():
    pool = BlockPool(3)
    found, other = pool.take(2)
    pool.publish(found, b"k")
    pool.give_back([found, other])
    assert pool.take(1) == [other] and pool.num_evictions == 0


def test_a_block_goes_back_when_its_last_holder_gives_it_back():
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.publish(block_id, b"k")
    pool.hold(block_id)
    pool.give_back([block_id])
    assert pool.num_free == 0
    pool.give_back([block_id])
    assert pool.num_free == 1 and pool.is_evictable(block_id)


def test_the_first_block_under_a_key_keeps_it():
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    assert pool.find(b"k") == first
    pool.give_back([second])
    assert not pool.is_evictable(second)


def test_forgetting_leaves_holders_their_blocks():
    pool = BlockPool(3)
    held, free = pool.take(2)
    pool.publish(held, b"h")
    pool.publish(free, b"f")
    pool.give_back([free])
    pool.forget_all()
    assert pool.find(b"h") is None and pool.find(b"f") is None
    assert (pool.num_free, pool.num_used, pool.num_evictions) == (1, 1, 0)
    pool.give_back([held])
    assert pool.num_free == 2 and not pool.is_evictable(held)
