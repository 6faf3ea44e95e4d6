"""Which blocks a request may use: one pool a cache group, and one block table a request and group.

Belongs here: growing tables, hits, publishing, freeing, who fits. Does not belong here: what a block's key or a rule
is (prefix_keys.py, cache_rules.py), who runs (scheduler.py), tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.prefix_keys import PrefixKeys
from specbench.engine.request import Request
from specbench.engine.scheduling import cache_rules
from specbench.engine.scheduling.block_pool import NULL_BLOCK, BlockPool


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def window_blocks(spec: CacheGroupSpec, block_size: int, num_step_rows: int) -> int:
    """Blocks that one request of a windowed group can hold at once while `num_step_rows` rows, drafting's own among
    them, are written.

    The window behind the first row, the rows that a drafter may still rewrite, the step's rows; one block more because
    none of these need start on a block's edge, and one because windows are looked at once a block.
    """
    assert spec.window is not None
    num_tokens = spec.window - 1 + spec.num_provisional_rows + num_step_rows
    return num_blocks_for(num_tokens, block_size) + 2


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a request reaches into the caches."""

    #: Its tokens, those that one step may add behind them included.
    num_tokens: int
    #: Rows that it writes before windows are freed again: a chunk's, or those of every step that may be outstanding.
    num_step_rows: int


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading blocks of a request that are in the caches of every group."""

    num_blocks: int
    #: group -> index of the first block that rows behind the hit read: 0, or where the window begins
    first_blocks: tuple[int, ...]
    #: group -> ids of blocks first_blocks[group] .. num_blocks - 1
    block_ids: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class BlockTable:
    """One request's blocks in one group: entry i holds positions [i * block_size, (i + 1) * block_size)."""

    block_ids: list[int] = field(default_factory=list)
    #: Entries [0, num_freed) lie behind the window; they are back in the pool, or were never held.
    num_freed: int = 0

    def held_blocks(self) -> list[int]:
        return self.block_ids[self.num_freed :]


@dataclass(slots=True)
class RequestBlocks:
    """One request's tables. All groups grow together, to the length that the one with most draft slots needs.

    What was given for rows that were rejected stays: the next growth starts behind it.
    """

    #: None without prefix caching.
    keys: PrefixKeys | None
    #: group -> table
    tables: list[BlockTable]
    num_blocks: int
    #: publication -> entries [0, n) of its groups that were offered to other requests, or came from them: never written
    #: again
    num_published: list[int]
    #: Confirmed tokens from which on a group has another block to publish.
    next_publish: int = 0
    #: Confirmed tokens at which windows are looked at again: once a block.
    next_free: int = 0


@dataclass(frozen=True, slots=True)
class Publication:
    """Groups whose blocks become final at the same time, under the same keys."""

    #: Stands for all of them.
    spec: CacheGroupSpec
    groups: tuple[int, ...]


class KVCacheManager:
    """Gives blocks to requests by row; shares, frees and publishes them by the three rules."""

    def __init__(
        self, specs: Sequence[CacheGroupSpec], block_size: int, num_blocks: Sequence[int], prefix_caching: bool = False
    ):
        self.specs = tuple(specs)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pools = [BlockPool(count) for count in num_blocks]
        self._groups = list(zip(self.pools, self.specs, strict=True))
        self._windowed = [index for index, spec in enumerate(self.specs) if spec.window is not None]
        self._publications = _publications(self.specs)
        self._num_draft_slots = max((spec.num_draft_slots for spec in specs), default=0)
        self._nothing_hit = PrefixHit(0, (0,) * len(self.specs), ((),) * len(self.specs))
        #: row -> blocks
        self._requests: dict[int, RequestBlocks] = {}

    @property
    def num_blocks_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    @property
    def num_evictions(self) -> int:
        return sum(pool.num_evictions for pool in self.pools)

    # ---- Who fits

    def blocks_needed(self, spec: CacheGroupSpec, extent: Extent) -> int:
        """The most blocks of one group that a request of this extent holds at once."""
        whole = num_blocks_for(extent.num_tokens + self._num_draft_slots, self.block_size)
        if spec.window is None:
            return whole
        return min(whole, window_blocks(spec, self.block_size, extent.num_step_rows + self._num_draft_slots))

    def group_too_small(self, extent: Extent) -> tuple[str, int, int] | None:
        """(group, blocks needed, blocks there are) of a group that cannot hold the extent at all."""
        for pool, spec in self._groups:
            needed = self.blocks_needed(spec, extent)
            if needed > pool.num_blocks - 1:
                return spec.name, needed, pool.num_blocks - 1
        return None

    def can_admit(self, hit: PrefixHit | None, extent: Extent, promised: int) -> bool:
        """Whether the request fits beside what is held, and beside `promised` blocks of each group without a window
        that running requests will need for the rest of their prompts."""
        for (pool, spec), hit_ids in zip(self._groups, (hit or self._nothing_hit).block_ids, strict=True):
            missing = self.blocks_needed(spec, extent) - len(hit_ids)
            available = pool.num_free - sum(pool.is_evictable(block_id) for block_id in hit_ids)
            if missing > available - (promised if spec.window is None else 0):
                return False
        return True

    def num_blocks_missing(self, row: int, num_tokens: int) -> int:
        """Blocks that the row's tables lack to hold `num_tokens` tokens and the draft slots behind them."""
        needed = num_blocks_for(num_tokens + self._num_draft_slots, self.block_size)
        return max(0, needed - self._requests[row].num_blocks)

    # ---- Hits

    def find_hit(self, keys: PrefixKeys, num_tokens: int) -> PrefixHit:
        """The longest prefix, in blocks, that every group has: one token at least is left to run.

        A fixed point: groups differ in what they need of a prefix (all of it; a window's worth; tokens behind it), and
        each may only shorten what the others have found.
        """
        longest = (num_tokens - 1) // self.block_size
        while longest > 0:
            hit = longest
            for pool, spec in self._groups:
                hit = self._group_hit(pool, spec, keys, hit)
            if hit == longest:
                return self._blocks_of_hit(keys, hit)
            longest = hit
        return self._nothing_hit

    def _group_hit(self, pool: BlockPool, spec: CacheGroupSpec, keys: PrefixKeys, longest: int) -> int:
        """Blocks of the longest prefix of at most `longest` blocks that this group has."""
        if spec.window is None:
            return next((index for index in range(longest) if self._find(pool, spec, keys, index) is None), longest)
        candidate = longest
        for index in range(longest - 1, -1, -1):
            if index < self._first_read(spec, candidate):
                return candidate
            if self._find(pool, spec, keys, index) is None:
                candidate = index
        return candidate

    def _first_read(self, spec: CacheGroupSpec, num_blocks: int) -> int:
        """Index of the first block that a row behind `num_blocks` blocks reads."""
        if spec.window is None:
            return 0
        return max(0, num_blocks * self.block_size - (spec.window - 1)) // self.block_size

    def _find(self, pool: BlockPool, spec: CacheGroupSpec, keys: PrefixKeys, index: int) -> int | None:
        key = keys.key(index, cache_rules.num_key_lookahead_tokens(spec))
        return None if key is None else pool.find(key)

    def _blocks_of_hit(self, keys: PrefixKeys, num_blocks: int) -> PrefixHit:
        first_blocks, block_ids = [], []
        for pool, spec in self._groups:
            first = self._first_read(spec, num_blocks)
            found = [self._find(pool, spec, keys, index) for index in range(first, num_blocks)]
            first_blocks.append(first)
            block_ids.append(tuple(block_id for block_id in found if block_id is not None))
        return PrefixHit(num_blocks, tuple(first_blocks), tuple(block_ids))

    def forget_all(self) -> None:
        """Empty the prefix cache; running requests keep their blocks."""
        for pool in self.pools:
            pool.forget_all()

    # ---- One request, from admission to release

    def make_keys(self, request: Request) -> PrefixKeys | None:
        if not self.prefix_caching:
            return None
        spans = [placed.span for placed in request.content]
        return PrefixKeys(self.block_size, request.prompt_token_ids, request.output_token_ids, spans)

    def admit(
        self, row: int, keys: PrefixKeys | None = None, hit: PrefixHit | None = None
    ) -> list[tuple[int, int, Sequence[int]]]:
        """Give the row its tables, with the blocks of a hit in them. Returns (group, start entry, block ids)."""
        hit = hit or self._nothing_hit
        blocks = RequestBlocks(keys, [], hit.num_blocks, [hit.num_blocks] * len(self._publications))
        shared: list[tuple[int, int, Sequence[int]]] = []
        for group, pool in enumerate(self.pools):
            first, block_ids = hit.first_blocks[group], hit.block_ids[group]
            for block_id in block_ids:
                pool.hold(block_id)
            blocks.tables.append(BlockTable([NULL_BLOCK] * first + list(block_ids), first))
            if block_ids:
                shared.append((group, first, block_ids))
        self._requests[row] = blocks
        return shared

    def extend(self, row: int, num_tokens: int) -> Sequence[tuple[int, int, Sequence[int]]] | None:
        """Grow the row's tables to hold `num_tokens` tokens and the draft slots behind them.

        Returns (group, start entry, new block ids); None, and nothing changes, when a pool has too few.
        """
        blocks = self._requests[row]
        missing = -(-(num_tokens + self._num_draft_slots) // self.block_size) - blocks.num_blocks
        if missing <= 0:
            return ()
        if any(pool.num_free < missing for pool in self.pools):
            return None
        added = []
        for group, (pool, table) in enumerate(zip(self.pools, blocks.tables, strict=True)):
            block_ids = pool.take(missing)
            table.block_ids.extend(block_ids)
            added.append((group, blocks.num_blocks, block_ids))
        blocks.num_blocks += missing
        return added

    def confirm(self, row: int, num_computed: int, num_kept: int) -> None:
        """The row has this many confirmed computed and kept tokens: publish what is final, then free what no later row
        reads."""
        blocks = self._requests[row]
        if blocks.keys is not None and num_computed >= blocks.next_publish:
            self._publish(blocks, blocks.keys, num_computed, num_kept)
        if num_computed >= blocks.next_free:
            self._free_behind_windows(blocks, num_computed)

    def _publish(self, blocks: RequestBlocks, keys: PrefixKeys, num_computed: int, num_kept: int) -> None:
        next_publish = []
        for index, publication in enumerate(self._publications):
            spec, start = publication.spec, blocks.num_published[index]
            end = cache_rules.num_publishable_tokens(num_computed, num_kept, spec) // self.block_size
            for entry in range(start, end):
                key = keys.key(entry, cache_rules.num_key_lookahead_tokens(spec))
                assert key is not None, "a block is published before the tokens that its entries read are known"
                for group in publication.groups:
                    table = blocks.tables[group]
                    if entry >= table.num_freed:
                        self.pools[group].publish(table.block_ids[entry], key)
            blocks.num_published[index] = max(start, end)
            next_publish.append((max(start, end) + 1) * self.block_size + spec.num_provisional_rows)
        blocks.next_publish = min(next_publish)

    def _free_behind_windows(self, blocks: RequestBlocks, num_computed: int) -> None:
        for group in self._windowed:
            table = blocks.tables[group]
            num_freed = cache_rules.num_unread_tokens(num_computed, self.specs[group]) // self.block_size
            if num_freed > table.num_freed:
                self.pools[group].give_back(table.block_ids[table.num_freed : num_freed])
                table.num_freed = num_freed
        blocks.next_free = (num_computed // self.block_size + 1) * self.block_size

    def release(self, row: int) -> None:
        """Everything that the row holds goes back; the end of a prefix is evicted before its beginning."""
        for pool, table in zip(self.pools, self._requests.pop(row).tables, strict=True):
            pool.give_back(reversed(table.held_blocks()))

    def tables_of(self, row: int) -> list[BlockTable]:
        """The row's tables, one a group."""
        return self._requests[row].tables


def _publications(specs: Sequence[CacheGroupSpec]) -> list[Publication]:
    groups: dict[tuple[int, int], list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault((spec.num_provisional_rows, spec.num_prompt_lookahead), []).append(index)
    return [Publication(specs[indices[0]], tuple(indices)) for indices in groups.values()]
