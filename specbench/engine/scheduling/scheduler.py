"""What runs this step: each request's computed tokens catch up with its tokens and drafts, within one token budget.

Belongs here: admission, the token budget, the chunk rule, confirmed counts. Does not belong here: tensors, what a
proposer or model is called, stop conditions (LLMEngine walks them and hands over the kept tokens).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from specbench.engine.request import InFlight, Request
from specbench.engine.scheduling.kv_cache import KVCacheManager
from specbench.engine.scheduling.step import (
    DECODE,
    FINAL_CHUNK,
    PARTIAL_CHUNK,
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


class Scheduler:
    """Schedules, then settles, one step at a time; up to `pipeline depth` steps may be outstanding between the two."""

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager):
        # A chunk may have to leave num_prompt_lookahead tokens behind and must still make progress.
        assert config.max_num_batched_tokens >= max(1, config.num_prompt_lookahead)
        self.config = config
        self.kv_cache = kv_cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_rows = list(range(config.max_num_seqs - 1, -1, -1))
        self._finished_rows: list[int] = []
        self._next_step = 0

    @property
    def has_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def longest_sequence(self, request: Request) -> int:
        """Tokens that the request can come to hold in the caches: drafts behind its last token, of every step that may
        be outstanding, included."""
        num_rows = (self.config.pipeline_depth + 1) * (self.config.num_speculative_tokens + 1)
        return min(request.max_tokens - 1 + num_rows, self.config.max_model_len)

    def schedule(self) -> SchedulerOutput:
        """One step's work. Empty when nothing can run before an outstanding step settles."""
        output = SchedulerOutput(step=self._next_step, finished_rows=self._finished_rows)
        self._finished_rows = []
        budget = self.config.max_num_batched_tokens
        for request in self.running:
            budget -= self._schedule_request(request, budget, output)
        while self.waiting and self._free_rows and budget > 0:
            request = self.waiting[0]
            if not self.kv_cache.can_admit(self.longest_sequence(request)):
                break
            self.waiting.popleft()
            self._admit(request, output)
            budget -= self._schedule_request(request, budget, output)
        self._next_step += 1
        return output

    def _admit(self, request: Request, output: SchedulerOutput) -> None:
        request.row = self._free_rows.pop()
        request.prefill_end = request.num_tokens
        self.kv_cache.admit(request.row, self.longest_sequence(request))
        self.running.append(request)
        output.new_requests.append(
            NewRequest(
                row=request.row,
                token_ids=request.prompt_token_ids + request.output_token_ids,
                num_computed_tokens=request.num_computed_tokens,
                sampling=request.resolved_sampling,
            )
        )

    def _schedule_request(self, request: Request, budget: int, output: SchedulerOutput) -> int:
        """Add the request's rows to the step; returns how many (0: not in this step)."""
        if request.is_finished:
            return 0  # Its last outstanding step has yet to settle.
        if request.is_prefilling:
            num_tokens = self._chunk_length(request, budget)
            is_final = request.num_computed_upper + num_tokens == request.prefill_end
            mode = FINAL_CHUNK if is_final else PARTIAL_CHUNK
        else:
            num_tokens = self._decode_length(request, budget)
            mode = DECODE
        if num_tokens <= 0:
            return 0
        max_seq_len = request.num_computed_upper + num_tokens
        for group, start, block_ids in self.kv_cache.extend(request.row, max_seq_len):
            output.new_blocks.append(NewBlocks(group, request.row, start, block_ids))
        output.request_ids.append(request.request_id)
        output.generations.append(request.generation)
        output.rows.append(request.row)
        output.modes.append(mode)
        output.num_tokens.append(num_tokens)
        output.max_seq_lens.append(max_seq_len)
        request.in_flight.append(InFlight(num_tokens, {PARTIAL_CHUNK: 0, FINAL_CHUNK: 1, DECODE: num_tokens}[mode]))
        return num_tokens

    def _chunk_length(self, request: Request, budget: int) -> int:
        """The next chunk of the prompt. It never leaves 1 .. lookahead - 1 tokens: a drafter's rows at its end would
        lack tokens that the next chunk knows."""
        left = request.prefill_end - request.num_computed_upper
        num_tokens = min(left, budget)
        num_left_behind = left - num_tokens
        lookahead = self.config.num_prompt_lookahead
        if 0 < num_left_behind < lookahead:
            num_tokens -= lookahead - num_left_behind
        return num_tokens

    def _decode_length(self, request: Request, budget: int) -> int:
        """1 + drafts, fewer near the context's or the budget's end; 0 when the request has to wait for a settle."""
        if request.num_tokens_lower >= request.max_tokens:
            return 0  # The outstanding step fills the caller's cap.
        # While a step is outstanding its proposals are not known here: the device pads missing ones with -1.
        num_drafts = self.config.num_speculative_tokens if request.in_flight else request.num_draft_tokens
        num_drafts = min(num_drafts, self.config.max_model_len - request.num_tokens_upper, budget - 1)
        if self.config.trim_to_max_tokens:
            num_drafts = min(num_drafts, request.max_tokens - request.num_tokens_lower - 1)
        return 1 + num_drafts

    def settle(self, request: Request, num_rejected: int, kept: list[int], num_proposed: int) -> None:
        """Confirm one request's part of its oldest outstanding step.

        num_rejected: rows whose draft was rejected; kept: tokens that survive the stop conditions; num_proposed: drafts
        for the next step. Called once for every request of a step, finished ones included.
        """
        step = request.in_flight.popleft()
        if not request.is_finished or kept:
            request.num_computed_tokens += step.num_rows - num_rejected
            request.output_token_ids.extend(kept)
            request.num_draft_tokens = num_proposed
        if not request.is_finished:
            self.kv_cache.free_behind_windows(request.row, request.num_computed_tokens)
        elif not request.in_flight:
            self._release(request)

    def finish(self, request: Request, reason: str) -> None:
        """Mark the request as finished. Its row and blocks go back when its last outstanding step settles."""
        request.finish_reason = reason

    def _release(self, request: Request) -> None:
        self.running.remove(request)
        self.kv_cache.release(request.row)
        self._free_rows.append(request.row)
        self._finished_rows.append(request.row)
