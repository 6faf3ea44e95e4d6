"""The blocks of one cache group: free, held, or free but still worth finding.

Belongs here: who holds a block, under which key it can be found, which one is evicted first. Does not belong here: how
a key is made (prefix_keys.py), who may publish or free what and when (cache_rules.py, kv_cache.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

#: Never given out: always zeros. What a table entry before the sequence's start, or before its window, stands for.
NULL_BLOCK = 0


class BlockPool:
    """Every block but the null block is in exactly one of three states.

    - held by one request or more (`num_holders`), published or not;
    - free without a key: its content means nothing;
    - free with a key: its content can be found again until the block is evicted, least recently used first.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.num_evictions = 0
        #: block id -> requests that hold it
        self.num_holders = [0] * num_blocks
        # Free without a key; the next one given out is the last.
        self._free = list(range(num_blocks - 1, NULL_BLOCK, -1))
        # Free with a key, least recently used first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be given out, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - 1 - self.num_free

    def take(self, count: int) -> list[int]:
        """Blocks for one holder, without a key. The caller has looked at `num_free`."""
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block_id in block_ids:
            self.num_holders[block_id] = 1
        return block_ids

    def _evict(self) -> int:
        block_id, _ = self._evictable.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        self.num_evictions += 1
        return block_id

    def find(self, key: bytes) -> int | None:
        """The block that was published under `key`, if it has not been evicted."""
        return self._block_of.get(key)

    def hold(self, block_id: int) -> None:
        """One more holder of a published block."""
        if self.num_holders[block_id] == 0:
            del self._evictable[block_id]
        self.num_holders[block_id] += 1

    def publish(self, block_id: int, key: bytes) -> None:
        """Make a held block findable: from now on it is not written. The first block under a key keeps it."""
        assert self.num_holders[block_id] > 0
        if key not in self._block_of and block_id not in self._key_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def give_back(self, block_ids: Iterable[int]) -> None:
        """One holder less of each; blocks given back first are evicted first."""
        for block_id in block_ids:
            self.num_holders[block_id] -= 1
            if self.num_holders[block_id] == 0:
                if block_id in self._key_of:
                    self._evictable[block_id] = None
                else:
                    self._free.append(block_id)

    def is_evictable(self, block_id: int) -> bool:
        return block_id in self._evictable

    def forget_all(self) -> None:
        """Nothing can be found any more; holders keep their blocks."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._block_of.clear()
        self._key_of.clear()
