"""A device without numbers: every cache entry is the text it was computed from, and every read is checked.

A target's entry at position p stands for tokens 0 .. p; a multi-module drafter's for tokens 0 .. p + N, drafts
included; a single module's for 0 .. p + 1; a draft model's for 0 .. p. Before a row runs, each entry that it reads must
be the one that a computation from scratch on this row's own text would give. That finds stale entries, blocks given
away too early, hits on the wrong text and rows that never ran; and no row may be written into a block that others can
see.

The next token is a function of the tokens before it, so the right text of a request is known without any device.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.request import Request
from specbench.engine.scheduling.kv_cache import KVCacheManager
from specbench.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from specbench.engine.scheduling.step import DECODE, PARTIAL_CHUNK, SchedulerOutput
from specbench.generate import GenerateRequest, SamplingParams

VOCAB = 3
Text = tuple[int, ...]


def next_token(text: Sequence[int]) -> int:
    """What the target says after `text`."""
    return hash((text[-1], text[len(text) // 2], len(text))) % VOCAB


def plain_text(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The right output: plain decoding of `num_tokens` tokens."""
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        text.append(next_token(text))
    return text[len(prompt) :]


def group(name: str, window: int | None, **fields: int) -> CacheGroupSpec:
    kind = "full_attention" if window is None else "sliding_window"
    owner = "target" if name.startswith("target") else "draft"
    return CacheGroupSpec(name, owner, kind, ("0",), ((),), 4, window, **fields)


def target_groups(window: int) -> list[CacheGroupSpec]:
    return [group("target_full", None), group("target_window", window), group("target_conv", 4)]


def drafter_groups(drafter: str, k: int, window: int) -> list[CacheGroupSpec]:
    """Groups as the proposers of these names declare them: multi, single, draft_model."""
    if k == 0:
        return []
    declared = {
        "multi": {"num_prompt_lookahead": k, "num_provisional_rows": k - 1},
        "single": {"num_prompt_lookahead": 1, "num_draft_slots": k - 1},
        "draft_model": {"num_draft_slots": k},
    }[drafter]
    return [group(f"{drafter}_full", None, **declared), group(f"{drafter}_window", window, **declared)]


def make_scheduler(
    k: int = 0,
    *,
    drafter: str = "multi",
    window: int = 6,
    block_size: int = 4,
    num_blocks: int = 60,
    budget: int = 16,
    max_num_seqs: int = 4,
    depth: int = 0,
    prefix_caching: bool = True,
    max_model_len: int = 64,
    trim: bool = False,
) -> Scheduler:
    specs = target_groups(window) + drafter_groups(drafter, k, window)
    lookahead = max(spec.num_prompt_lookahead for spec in specs)
    config = SchedulerConfig(max_num_seqs, max(budget, lookahead), max_model_len, k, lookahead, trim, depth)
    return Scheduler(config, KVCacheManager(specs, block_size, [num_blocks] * len(specs), prefix_caching))


@dataclass
class Row:
    """What the device knows of one request."""

    text: list[int]
    num_computed: int
    #: A draft model's own count.
    num_draft_computed: int
    drafts: list[int] = field(default_factory=list)
    #: group -> block ids by table entry; -1 where none was given
    tables: list[dict[int, int]] = field(default_factory=list)
    num_accepted: int = 0
    was_decode: bool = False


@dataclass
class Result:
    """One request's part of an executed step."""

    request: Request
    generation: int
    num_rows: int
    mode: int
    emitted: list[int]
    num_proposed: int


class SymbolicDevice:
    """Runs a scheduler's steps in order."""

    def __init__(self, scheduler: Scheduler, seed: int = 0):
        self.scheduler = scheduler
        self.specs = scheduler.kv_cache.specs
        self.block_size = scheduler.kv_cache.block_size
        self.rng = random.Random(seed)
        self.rows: dict[int, Row] = {}
        self.requests: dict[int, Request] = {}
        #: (group, block id, offset) -> what the entry was computed from
        self.entries: dict[tuple[int, int, int], Text] = {}
        self.outstanding: deque[list[Result]] = deque()
        self.num_rows_checked = 0

    # ---- One step

    def step(self) -> list[Request]:
        """Schedule and execute one step, settle the one that is due; returns the requests that are gone."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        assert output.num_requests or self.outstanding or not scheduler.has_requests, "nothing can ever run"
        if output.num_requests:
            self.outstanding.append(self.execute(output))
        if len(self.outstanding) > scheduler.config.pipeline_depth or (self.outstanding and not output.num_requests):
            return self.settle(self.outstanding.popleft())
        return []

    def execute(self, output: SchedulerOutput) -> list[Result]:
        running = {request.row: request for request in self.scheduler.running}
        assert output.total_tokens <= self.scheduler.config.max_num_batched_tokens
        for new in output.new_requests:
            tables: list[dict[int, int]] = [{} for _ in self.specs]
            self.rows[new.row] = Row(list(new.token_ids), new.num_computed_tokens, new.num_computed_tokens, [], tables)
        for blocks in output.new_blocks:
            table = self.rows[blocks.row].tables[blocks.group]
            for entry, block_id in enumerate(blocks.block_ids, blocks.start):
                assert entry not in table
                table[entry] = block_id
        results = []
        for index, row_id in enumerate(output.rows):
            num_rows, mode = output.num_tokens[index], output.modes[index]
            row = self.rows[row_id]
            assert row.num_computed + num_rows <= output.max_seq_lens[index] <= self.scheduler.config.max_model_len
            emitted = self._run_target(row, num_rows, mode)
            num_proposed = self._draft(row, num_rows, mode, len(emitted))
            request = running[row_id]
            results.append(Result(request, request.generation, num_rows, mode, emitted, num_proposed))
        return results

    def settle(self, results: list[Result]) -> list[Request]:
        gone = []
        for result in results:
            request, kept = result.request, []
            if not request.is_finished and result.emitted:
                kept = result.emitted[: request.max_tokens - request.num_tokens]
                if self.rng.random() < 0.04:
                    kept = kept[: self.rng.randint(1, len(kept))]
                    self.scheduler.finish(request, "stop")
                elif request.num_tokens + len(kept) == request.max_tokens:
                    self.scheduler.finish(request, "length")
            num_rejected = result.num_rows - len(result.emitted) if result.mode == DECODE else 0
            self.scheduler.settle(request, num_rejected, kept, result.num_proposed)
            if request.is_finished and not request.in_flight:
                gone.append(request)
        return gone

    # ---- The target

    def _run_target(self, row: Row, num_rows: int, mode: int) -> list[int]:
        first, newest = row.num_computed, row.num_computed + num_rows - 1
        if mode == DECODE:
            assert first == len(row.text) - 1
            drafts = (row.drafts + [-1] * num_rows)[: num_rows - 1]
            text = tuple(row.text + drafts)
        else:
            assert newest < len(row.text)
            text = tuple(row.text)
        for index, spec in enumerate(self.specs):
            if spec.owner == "target":
                self._run_rows(row, index, first, newest, text, lookahead=0)
        accepted: list[int] = []
        if mode == DECODE:
            for draft in drafts:
                if draft != next_token(row.text + accepted):
                    break
                accepted.append(draft)
        row.num_accepted, row.was_decode = len(accepted), mode == DECODE
        row.num_computed += num_rows if mode != DECODE else len(accepted) + 1
        emitted = [] if mode == PARTIAL_CHUNK else [*accepted, next_token(row.text + accepted)]
        row.text += emitted
        return emitted

    def _run_rows(self, row: Row, index: int, first: int, newest: int, text: Text, lookahead: int) -> None:
        """Rows first .. newest of one group: write each, then check what it reads."""
        window = self.specs[index].window
        for position in range(first, newest + 1):
            assert position + lookahead < len(text), "a row needs a token that nobody knows yet"
            self._write(row, index, position, text[: position + 1 + lookahead])
        for position in range(first, newest + 1):
            oldest = 0 if window is None else max(0, position - window + 1)
            for read in range(oldest, position + 1):
                assert self._read(row, index, read) == text[: read + 1 + lookahead], (
                    f"{self.specs[index].name}: row {position} of {first}..{newest} reads a wrong entry at {read}"
                )
            self.num_rows_checked += 1

    def _slot(self, row: Row, index: int, position: int) -> tuple[int, int, int]:
        block_id = row.tables[index].get(position // self.block_size, 0)
        return index, block_id, position % self.block_size

    def _read(self, row: Row, index: int, position: int) -> Text | None:
        slot = self._slot(row, index, position)
        assert self.scheduler.kv_cache.pools[index].num_holders[slot[1]], "a row reads a block that was given back"
        return self.entries.get(slot)

    def _write(self, row: Row, index: int, position: int, text: Text) -> None:
        slot = self._slot(row, index, position)
        pool = self.scheduler.kv_cache.pools[index]
        assert slot[1] != 0, "the null block is never written"
        assert pool.num_holders[slot[1]] == 1, "a block that others hold is never written"
        assert slot[1] not in pool._key_of, "a block that others can find is never written"
        self.entries[slot] = text

    # ---- The drafter

    def _draft(self, row: Row, num_rows: int, mode: int, num_emitted: int) -> int:
        """The drafter's pass; returns how many drafts it leaves: right ones but for one of them."""
        k = self.scheduler.config.num_speculative_tokens
        if k == 0:
            return 0
        is_partial = mode == PARTIAL_CHUNK
        drafts = [] if is_partial else self._make_drafts(row.text, k)
        text = tuple(row.text + drafts)
        newest = row.num_computed - 1
        first = newest + 1 - (num_emitted if mode == DECODE else num_rows)
        num_stale = min(max(k - 1 - row.num_accepted, 0), first) if mode == DECODE else 0
        for index, spec in enumerate(self.specs):
            if spec.name.startswith("multi"):
                self._run_rows(row, index, first - num_stale, newest, text, lookahead=k)
            elif spec.name.startswith("single"):
                self._run_rows(row, index, first, newest, text, lookahead=1)
                for position in range(newest + 1, newest + k if drafts else 0):
                    self._write(row, index, position, (*text[: position + 1], -2))
            elif spec.name.startswith("draft_model"):
                # It runs every committed token that it has not run, then its own drafts but the last.
                end = newest if is_partial else newest + len(drafts)
                self._run_rows(row, index, row.num_draft_computed, end, text, lookahead=0)
        row.num_draft_computed = row.num_computed + (0 if is_partial else 1)
        row.num_draft_computed = min(row.num_draft_computed, len(row.text))
        row.drafts = drafts[: self.rng.choice([k, k, self.rng.randint(0, k)])] if drafts else []
        return len(row.drafts)

    def _make_drafts(self, text: list[int], k: int) -> list[int]:
        num_right = self.rng.randint(0, k)
        drafts: list[int] = []
        for index in range(k):
            right = next_token(text + drafts)
            drafts.append(right if index != num_right else (right + 1) % VOCAB)
        return drafts

    # ---- What must hold between steps

    def check_blocks(self) -> None:
        """Every block is free, evictable or held; holders are counted; keys and blocks are one to one."""
        kv_cache = self.scheduler.kv_cache
        assert {request.row for request in self.scheduler.running} == set(kv_cache._requests)
        for index, pool in enumerate(kv_cache.pools):
            holders = [0] * pool.num_blocks
            for blocks in kv_cache._requests.values():
                table = blocks.tables[index]
                assert len(table.block_ids) == blocks.num_blocks
                for block_id in table.held_blocks():
                    holders[block_id] += 1
            assert holders == pool.num_holders
            free, evictable = set(pool._free), set(pool._evictable)
            held = {block_id for block_id, count in enumerate(holders) if count}
            assert len(pool._free) == len(free)
            assert not free & evictable and not (free | evictable) & held
            assert free | evictable | held == set(range(1, pool.num_blocks))
            assert {key: block_id for block_id, key in pool._key_of.items()} == pool._block_of
            assert evictable <= set(pool._key_of) and not free & set(pool._key_of)


def make_request(index: int, prompt: Sequence[int], max_output: int, **sampling: Any) -> Request:
    source = GenerateRequest(f"r{index}", f"s{index}", SamplingParams(max_output, **sampling))
    return Request(source, list(prompt), max_output, 0.0, generation=index)


def run_to_end(device: SymbolicDevice, requests: Sequence[Request]) -> int:
    """Add all, run until all are gone, check their text; returns the number of steps."""
    for request in requests:
        device.scheduler.add(request)
    num_steps = 0
    gone: list[Request] = []
    while device.scheduler.has_requests:
        gone += device.step()
        device.check_blocks()
        num_steps += 1
        assert num_steps < 20_000
    assert sorted(request.generation for request in gone) == sorted(request.generation for request in requests)
    for request in requests:
        right = plain_text(request.prompt_token_ids, request.num_output_tokens)
        assert request.output_token_ids == right
    assert device.scheduler.kv_cache.num_blocks_used == 0
    return num_steps
