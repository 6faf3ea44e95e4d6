"""Which blocks a request may use: one pool and one block table a cache group.

Belongs here: block ids, counts, windows. Does not belong here: tensors, models, or what a block holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specbench.engine.cache_group import CacheGroupSpec

#: Never given out: always zeros. What a table entry before the sequence's start stands for.
NULL_BLOCK = 0


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def window_blocks(spec: CacheGroupSpec, block_size: int, num_step_rows: int) -> int:
    """Blocks that one request of a windowed group can hold at once while `num_step_rows` rows are written.

    The window behind the first row, the rows that a drafter may still rewrite, the step's rows, and one block more
    because none of these need start on a block's edge.
    """
    assert spec.window is not None
    return (
        num_blocks_for(spec.window - 1 + spec.num_provisional_rows + num_step_rows + spec.num_draft_slots, block_size)
        + 1
    )


class BlockPool:
    """Free blocks of one cache group."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - 1 - len(self._free)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), "admission lets no request start that could run out of blocks"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, block_ids: list[int]) -> None:
        self._free.extend(reversed(block_ids))


@dataclass(slots=True)
class BlockTable:
    """One request's blocks in one group: entry i holds positions [i * block_size, (i + 1) * block_size)."""

    block_ids: list[int] = field(default_factory=list)
    #: Entries [0, num_freed) have left the window and went back to the pool.
    num_freed: int = 0

    def live_blocks(self) -> list[int]:
        return self.block_ids[self.num_freed :]


class KVCacheManager:
    """Gives blocks to requests by row, frees those that leave a window, and says who fits.

    Without preemption a request is admitted only if everything that it can come to need is free: the blocks of its
    longest possible sequence in full-attention groups. Windowed pools hold what `max_num_seqs` requests need.
    """

    def __init__(self, specs: list[CacheGroupSpec], block_size: int, num_blocks: list[int]):
        self.specs = specs
        self.block_size = block_size
        self.pools = [BlockPool(count) for count in num_blocks]
        #: row -> a table a group.
        self._tables: dict[int, list[BlockTable]] = {}
        #: row -> blocks reserved in each full-attention group.
        self._reserved: dict[int, int] = {}

    @property
    def num_blocks_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    def blocks_of_longest(self, num_tokens: int) -> int:
        return num_blocks_for(num_tokens + max((s.num_draft_slots for s in self.specs), default=0), self.block_size)

    def _full_attention_pools(self) -> list[BlockPool]:
        return [pool for pool, spec in zip(self.pools, self.specs, strict=True) if spec.window is None]

    def fits_ever(self, num_tokens: int) -> bool:
        needed = self.blocks_of_longest(num_tokens)
        return all(needed <= pool.num_blocks - 1 for pool in self._full_attention_pools())

    def can_admit(self, num_tokens: int) -> bool:
        """Whether a request that may grow to `num_tokens` cannot run out of blocks, whatever the others do."""
        promised = sum(self._reserved.values()) + self.blocks_of_longest(num_tokens)
        return all(promised <= pool.num_blocks - 1 for pool in self._full_attention_pools())

    def admit(self, row: int, num_tokens: int) -> None:
        self._tables[row] = [BlockTable() for _ in self.specs]
        self._reserved[row] = self.blocks_of_longest(num_tokens)

    def extend(self, row: int, num_tokens: int) -> list[tuple[int, int, list[int]]]:
        """Grow the row's tables to hold `num_tokens` tokens. Returns (group, start entry, new block ids).

        What was given for rows that were rejected stays with the request: the next growth starts behind it.
        """
        needed = num_blocks_for(num_tokens + max((s.num_draft_slots for s in self.specs), default=0), self.block_size)
        added = []
        for group, table in enumerate(self._tables[row]):
            missing = needed - len(table.block_ids)
            if missing > 0:
                block_ids = self.pools[group].take(missing)
                added.append((group, len(table.block_ids), block_ids))
                table.block_ids.extend(block_ids)
        return added

    def free_behind_windows(self, row: int, num_computed_tokens: int) -> None:
        """Give back the blocks that no later row can read or rewrite.

        The next row is at position num_computed_tokens. A drafter may first run its provisional rows again: they read
        a window of their own, so that many positions more are kept.
        """
        for spec, pool, table in zip(self.specs, self.pools, self._tables[row], strict=True):
            if spec.window is None:
                continue
            first_kept = num_computed_tokens - spec.num_provisional_rows - (spec.window - 1)
            num_freed = max(first_kept, 0) // self.block_size
            if num_freed > table.num_freed:
                pool.give_back(table.block_ids[table.num_freed : num_freed])
                table.num_freed = num_freed

    def release(self, row: int) -> None:
        for pool, table in zip(self.pools, self._tables.pop(row), strict=True):
            pool.give_back(table.live_blocks())
        del self._reserved[row]
