"""The scheduling rule on its own: a fake device that accepts at random, and the counts that must hold at every step."""

import random
from collections import deque

import pytest

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.request import Request, request_key
from specbench.engine.scheduling.kv_cache import KVCacheManager
from specbench.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from specbench.engine.scheduling.step import DECODE, FINAL_CHUNK, PARTIAL_CHUNK
from specbench.generate import GenerateRequest, SamplingParams

BLOCK_SIZE = 4


def make_request(index: int, num_prompt: int, max_output: int) -> Request:
    source = GenerateRequest(f"r{index}", f"s{index}", SamplingParams(max_output))
    return Request(source, list(range(num_prompt)), max_output, 0.0, generation=index)


def make_scheduler(
    k: int = 0, budget: int = 16, max_num_seqs: int = 4, depth: int = 0, max_model_len: int = 64, trim: bool = False
) -> Scheduler:
    config = SchedulerConfig(max_num_seqs, budget, max_model_len, k, k, trim, depth)
    specs = [
        CacheGroupSpec("full", "target", "full_attention", ("0",), ((),), 4, None),
        CacheGroupSpec("window", "draft", "sliding_window", ("0",), ((),), 4, 8, num_provisional_rows=max(k - 1, 0)),
    ]
    return Scheduler(config, KVCacheManager(specs, BLOCK_SIZE, [1 + 16 * max_num_seqs, 200]))


def simulate(scheduler: Scheduler, requests: list[Request], seed: int) -> int:
    """Run to the end with random acceptance; returns the number of steps. Asserts the rules at every step."""
    rng = random.Random(seed)
    config = scheduler.config
    by_row: dict[int, Request] = {}
    outstanding: deque = deque()
    # What the device would hold, by request id: (committed tokens, computed tokens).
    device = {request.request_id: [request.num_prompt_tokens, 0] for request in requests}
    for request in requests:
        scheduler.add(request)
    num_steps = 0
    while scheduler.has_requests:
        output = scheduler.schedule()
        num_steps += 1
        assert num_steps < 5000
        for row in output.finished_rows:
            del by_row[row]
        for new in output.new_requests:
            assert new.row not in by_row, "a row has one occupant"
            by_row[new.row] = next(r for r in requests if r.row == new.row and not r.is_finished)
        assert output.total_tokens <= config.max_num_batched_tokens
        step = []
        for index, row in enumerate(output.rows):
            request, num_rows, mode = by_row[row], output.num_tokens[index], output.modes[index]
            committed, computed = device[request.request_id]
            assert num_rows >= 1
            assert output.max_seq_lens[index] <= config.max_model_len
            accepted = 0
            if mode == DECODE:
                assert computed == committed - 1
                accepted = rng.randint(0, num_rows - 1)
                device[request.request_id] = [committed + accepted + 1, computed + accepted + 1]
            else:
                left = committed - computed - num_rows
                assert (left == 0) == (mode == FINAL_CHUNK)
                assert left >= 0 and not 0 < left < config.num_prompt_lookahead
                device[request.request_id] = [committed + (mode == FINAL_CHUNK), computed + num_rows]
            step.append((request, num_rows, mode, accepted))
        if step:
            outstanding.append(step)
        if outstanding and (len(outstanding) > config.pipeline_depth or not step):
            for request, num_rows, mode, accepted in outstanding.popleft():
                emitted = {PARTIAL_CHUNK: 0, FINAL_CHUNK: 1, DECODE: accepted + 1}[mode]
                kept = [] if request.is_finished else [7] * min(emitted, request.max_tokens - request.num_tokens)
                if not request.is_finished and kept:
                    if request.num_tokens + len(kept) == request.max_tokens:
                        scheduler.finish(request, "length")
                    elif rng.random() < 0.05:
                        scheduler.finish(request, "stop")
                num_proposed = 0 if mode == PARTIAL_CHUNK else rng.choice([config.num_speculative_tokens, 0])
                scheduler.settle(request, num_rows - emitted if mode == DECODE else 0, kept, num_proposed)
    assert scheduler.kv_cache.num_blocks_used == 0
    return num_steps


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_every_request_ends_whatever_is_accepted(k: int, depth: int):
    for seed in range(20):
        rng = random.Random(seed)
        budget = rng.randint(max(k, 1), k + 12)
        scheduler = make_scheduler(k, budget, max_num_seqs=rng.randint(1, 4), depth=depth, trim=bool(seed % 2))
        requests = [make_request(i, rng.randint(1, 40), rng.randint(1, 24)) for i in range(12)]
        simulate(scheduler, requests, seed)
        for request in requests:
            assert request.is_finished
            assert request.num_output_tokens <= request.max_output_tokens


def test_a_prompt_at_the_smallest_budget_makes_progress():
    for num_prompt in range(1, 30):
        scheduler = make_scheduler(k=8, budget=8, max_num_seqs=1)
        simulate(scheduler, [make_request(0, num_prompt, 2)], seed=0)


def test_drafts_stop_at_the_context_end():
    scheduler = make_scheduler(k=8, budget=64, max_num_seqs=1, max_model_len=20)
    request = make_request(0, 15, 5)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.settle(request, 0, [1], num_proposed=8)
    output = scheduler.schedule()
    # 16 tokens are committed; rows at positions 15..19 are the last that the context holds.
    assert output.num_tokens == [5] and output.max_seq_lens == [20]


def test_trim_to_max_tokens_verifies_no_more_than_can_be_kept():
    for trim, expected in [(False, 9), (True, 3)]:
        scheduler = make_scheduler(k=8, budget=64, max_num_seqs=1, trim=trim)
        request = make_request(0, 5, 4)
        scheduler.add(request)
        scheduler.schedule()
        scheduler.settle(request, 0, [1], num_proposed=8)
        assert scheduler.schedule().num_tokens == [expected]


def test_request_key_knows_neither_arrival_nor_request_id():
    assert request_key(1, "a", 0) == request_key(1, "a", 0)
    assert len({request_key(s, i, t) for s in (0, 1) for i in ("a", "b") for t in (0, 1)}) == 8
