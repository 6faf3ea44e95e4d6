"""What runs this step: each request's computed tokens catch up with its tokens and drafts, within one token budget.

Belongs here: admission, the token budget, the chunk rule, preemption, confirmed counts. Does not belong here: tensors,
blocks (kv_cache.py), what a proposer or model is called, stop conditions (LLMEngine walks them and hands over the kept
tokens).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from specbench.engine.content.placement import content_between
from specbench.engine.request import InFlight, Request
from specbench.engine.scheduling.kv_cache import Extent, KVCacheManager, PrefixHit
from specbench.engine.scheduling.step import (
    DECODE,
    FINAL_CHUNK,
    PARTIAL_CHUNK,
    ContentWindow,
    NewBlocks,
    NewRequest,
    SchedulerOutput,
)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    #: k: the most drafts that a proposer leaves for a step.
    num_speculative_tokens: int
    #: Prompt tokens beyond its own position that a drafter's row reads: N for multi-module drafting.
    num_prompt_lookahead: int
    trim_to_max_tokens: bool
    #: Steps that may be outstanding when the next one is scheduled.
    pipeline_depth: int

    @property
    def num_step_rows(self) -> int:
        """Rows of a decoding request in all steps that may be outstanding."""
        return (self.pipeline_depth + 1) * (self.num_speculative_tokens + 1)

    @property
    def num_chunk_rows(self) -> int:
        """The most rows of a prompt in all steps that may be outstanding."""
        return (self.pipeline_depth + 1) * self.max_num_batched_tokens


class Scheduler:
    """Schedules, then settles, one step at a time; up to `pipeline depth` steps may be outstanding between the two.

    Requests run in the order in which they came. When blocks run out, the youngest running request loses its own and
    waits, at the head of the queue, to be computed again; so the oldest always goes on, and everything ends.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager):
        # A chunk may have to leave num_prompt_lookahead tokens behind and must still make progress.
        assert config.max_num_batched_tokens >= max(1, config.num_prompt_lookahead)
        self.config = config
        self.kv_cache = kv_cache
        self.waiting: deque[Request] = deque()
        #: Oldest first.
        self.running: list[Request] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        #: Rows whose request has left, and preemptions, since the last step that ran.
        self._left_rows: list[int] = []
        self._num_preempted = 0
        self._num_evicted_before = 0
        self._next_step = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> bool:
        """End a request early. Whether it is gone at once: one with a step outstanding goes when that settles, and one
        that had come to its end by then keeps its reason."""
        if not request.is_finished:
            self.finish(request, "aborted")
        if request in self.waiting:
            self.waiting.remove(request)
        elif request.in_flight:
            return False
        else:
            self._leave(request)
        return True

    def longest_extent(self, request: Request) -> Extent:
        """All that the request can come to hold: drafts behind its last token, of every step that may be outstanding,
        included."""
        num_tokens = min(request.max_tokens - 1 + self.config.num_step_rows, self.config.max_model_len)
        return Extent(num_tokens, max(self.config.num_step_rows, self.config.num_chunk_rows))

    # ---- One step's work

    def schedule(self) -> SchedulerOutput:
        """One step's work. Empty when nothing can run before an outstanding step settles."""
        output = SchedulerOutput(step=self._next_step)
        budget = self.config.max_num_batched_tokens
        num_preempted_before = self._num_preempted
        index = 0
        while index < len(self.running):  # preemption takes from its end
            budget -= self._schedule_request(self.running[index], budget, output)
            index += 1
        if self._num_preempted == num_preempted_before and not any(one.is_preempted for one in self.running):
            self._admit_waiting(budget, output)
        assert output.num_requests or not output.new_requests, "an admitted request has room to run"
        if output.num_requests:
            output.finished_rows, self._left_rows = self._left_rows, []
            output.num_preempted, self._num_preempted = self._num_preempted, 0
            num_evicted = self.kv_cache.num_evictions
            output.num_evicted_blocks = num_evicted - self._num_evicted_before
            self._num_evicted_before = num_evicted
            self._next_step += 1
        return output

    def _admit_waiting(self, budget: int, output: SchedulerOutput) -> None:
        promised = None
        while self.waiting and self._free_rows and budget > 0:
            request = self.waiting[0]
            if promised is None:
                promised = sum(self._blocks_promised(one) for one in self.running)
            hit = self._find_hit(request)
            if not self.kv_cache.can_admit(hit, self._extent(request), promised):
                return
            self.waiting.popleft()
            self._admit(request, hit, output)
            budget -= self._schedule_request(request, budget, output)
            promised += self._blocks_promised(request)

    def _extent(self, request: Request) -> Extent:
        """What the request needs until it decodes: its tokens so far and the rows of its first decode steps."""
        longest = self.longest_extent(request)
        return Extent(min(request.num_tokens + self.config.num_step_rows, longest.num_tokens), longest.num_step_rows)

    def _blocks_promised(self, request: Request) -> int:
        """Blocks of a group without a window that a running request lacks for the rest of its prompt."""
        if not request.is_prefilling or request.is_finished or request.is_preempted:
            return 0
        return self.kv_cache.num_blocks_missing(request.row, self._extent(request).num_tokens)

    def _find_hit(self, request: Request) -> PrefixHit | None:
        if request.prefix_keys is None:
            request.prefix_keys = self.kv_cache.make_keys(request)
        if request.prefix_keys is None or request.needs_prompt_logprobs:
            return None
        return self.kv_cache.find_hit(request.prefix_keys, request.num_tokens)

    def _admit(self, request: Request, hit: PrefixHit | None, output: SchedulerOutput) -> None:
        request.row = self._free_rows.pop()
        request.prefill_end = request.num_tokens
        if hit is not None:
            request.num_computed_tokens = hit.num_blocks * self.kv_cache.block_size
            if request.num_cached_prompt_tokens is None:  # what it finds of its own later on is no hit
                request.num_cached_prompt_tokens = request.num_computed_tokens
        shared = self.kv_cache.admit(request.row, request.prefix_keys, hit)
        self.running.append(request)
        output.new_requests.append(
            NewRequest(
                row=request.row,
                token_ids=request.prompt_token_ids + request.output_token_ids,
                num_computed_tokens=request.num_computed_tokens,
                sampling=request.resolved_sampling,
            )
        )
        self._add_blocks(request.row, shared, output)

    def _add_blocks(self, row: int, added: Sequence[tuple[int, int, Sequence[int]]], output: SchedulerOutput) -> None:
        for group, start, block_ids in added:
            output.new_blocks.append(NewBlocks(group, row, start, block_ids))

    def _schedule_request(self, request: Request, budget: int, output: SchedulerOutput) -> int:
        """Add the request's rows to the step; returns how many (0: not in this step)."""
        if request.finish_reason is not None or request.is_preempted:
            return 0  # Its last outstanding step has yet to settle.
        num_computed = request.num_computed_upper
        if num_computed < request.prefill_end:
            num_tokens = self._chunk_length(request.prefill_end - num_computed, budget)
            mode = FINAL_CHUNK if num_computed + num_tokens == request.prefill_end else PARTIAL_CHUNK
        else:
            num_tokens = self._decode_length(request, budget)
            mode = DECODE
        if num_tokens <= 0:
            return 0
        max_seq_len = num_computed + num_tokens
        added = self.kv_cache.extend(request.row, max_seq_len)
        if added is None:
            added = self._make_room(request, max_seq_len)
            if added is None:
                return 0
        if added:
            self._add_blocks(request.row, added, output)
        if request.content:
            output.content += self._content_windows(request, mode, max_seq_len, output.num_requests)
        output.request_ids.append(request.request_id)
        output.generations.append(request.generation)
        output.rows.append(request.row)
        output.modes.append(mode)
        output.num_tokens.append(num_tokens)
        output.max_seq_lens.append(max_seq_len)
        request.begin_step(InFlight(num_tokens, num_tokens if mode == DECODE else int(mode == FINAL_CHUNK)))
        return num_tokens

    def _content_windows(self, request: Request, mode: int, max_seq_len: int, index: int) -> list[ContentWindow]:
        """The positions of the placeholders that the request's rows can read: one window or none.

        Rows are those of the step, and before a verification's up to lookahead - 1 that a drafter runs again. They read
        the token at their position, or one up to `lookahead` positions on.
        """
        lookahead = self.config.num_prompt_lookahead
        start = request.num_computed_lower
        if mode == DECODE:
            start = max(0, start - max(0, lookahead - 2))
        pieces = content_between(request.content, start, max_seq_len + lookahead)
        return [ContentWindow(index, pieces[0].start, pieces[-1].end, pieces)] if pieces else []

    def _chunk_length(self, num_left: int, budget: int) -> int:
        """The next chunk of the prompt. It never leaves 1 .. lookahead - 1 tokens: a drafter's rows at its end would
        lack tokens that the next chunk knows."""
        num_tokens = min(num_left, budget)
        num_left_behind = num_left - num_tokens
        lookahead = self.config.num_prompt_lookahead
        if 0 < num_left_behind < lookahead:
            num_tokens -= lookahead - num_left_behind
        return num_tokens

    def _decode_length(self, request: Request, budget: int) -> int:
        """1 + drafts, fewer near the context's or the budget's end; 0 when the request has to wait for a settle."""
        # While a step is outstanding its proposals are not known here: the device pads missing ones with -1.
        num_drafts = self.config.num_speculative_tokens if request.in_flight else request.num_draft_tokens
        if request.in_flight and request.num_tokens_lower >= request.max_tokens:
            return 0  # The outstanding step fills the caller's cap.
        num_drafts = min(num_drafts, self.config.max_model_len - request.num_tokens_upper, budget - 1)
        if self.config.trim_to_max_tokens:
            num_drafts = min(num_drafts, request.max_tokens - request.num_tokens_lower - 1)
        return 1 + num_drafts

    # ---- Preemption

    def _make_room(self, request: Request, num_tokens: int) -> Sequence[tuple[int, int, Sequence[int]]] | None:
        """Preempt the youngest until the request can grow. None: it was preempted itself, or has to wait for the
        blocks of one that leaves when its outstanding step settles."""
        while not any(one.is_finished or one.is_preempted for one in self.running):
            victim = self.running[-1]
            if victim.in_flight:
                victim.is_preempted = True
                return None
            self._requeue(victim)
            if victim is request:
                return None
            added = self.kv_cache.extend(request.row, num_tokens)
            if added is not None:
                return added
        return None

    def _requeue(self, request: Request) -> None:
        """Give up row, blocks and drafts, and wait ahead of all others. What was generated stays: on readmission it
        counts as prompt, so that known tokens take the place of drafts."""
        self._leave(request)
        self._num_preempted += 1
        request.num_preemptions += 1
        request.is_preempted = False
        request.row = -1
        request.num_computed_tokens = 0
        request.num_draft_tokens = 0
        self.waiting.appendleft(request)

    # ---- Settling

    def settle(self, request: Request, num_rejected: int, kept: list[int], num_proposed: int) -> None:
        """Confirm one request's part of its oldest outstanding step.

        num_rejected: rows whose draft was rejected; kept: tokens that survive the stop conditions; num_proposed: drafts
        for the next step. Called once for every request of a step, finished ones included.
        """
        step = request.end_step()
        is_finished = request.finish_reason is not None
        if kept or not is_finished:
            request.num_computed_tokens += step.num_rows - num_rejected
            request.output_token_ids.extend(kept)
            request.num_draft_tokens = num_proposed
            self.kv_cache.confirm(request.row, request.num_computed_tokens, request.num_tokens)
        if is_finished:
            if not request.in_flight:
                self._leave(request)
        elif request.is_preempted and not request.in_flight:
            self._requeue(request)

    def finish(self, request: Request, reason: str) -> None:
        """Mark the request as finished. Its row and blocks go back when its last outstanding step settles."""
        request.finish_reason = reason

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.kv_cache.release(request.row)
        self._free_rows.append(request.row)
        self._left_rows.append(request.row)
