"""The scheduling rule on a symbolic device: right text, no entry ever read that is not what it should be, an end."""

import random

import pytest

from specbench.engine.request import request_key
from specbench.engine.scheduling.step import FINAL_CHUNK
from tests.engine.scheduling.symbolic_device import (
    VOCAB,
    SymbolicDevice,
    make_request,
    make_scheduler,
    run_to_end,
)

DRAFTERS = ("multi", "single", "draft_model")


def random_prompts(rng: random.Random, count: int, longest: int = 40) -> list[list[int]]:
    """Prompts that share prefixes: each goes on from a random point of an earlier one."""
    prompts: list[list[int]] = []
    for _ in range(count):
        start = rng.choice(prompts)[: rng.randint(0, longest - 1)] if prompts and rng.random() < 0.8 else []
        prompts.append(start + [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest - len(start)))])
    return prompts


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_every_request_ends_with_the_right_text(k: int, drafter: str, depth: int):
    num_hits = 0
    for seed in range(12):
        rng = random.Random(seed)
        scheduler = make_scheduler(
            k,
            drafter=drafter,
            window=rng.choice([2, 5, 9, 17]),
            block_size=rng.choice([3, 4, 7]),
            num_blocks=rng.choice([32, 45, 200]),
            budget=rng.randint(max(k, 1), k + 12),
            max_num_seqs=rng.randint(1, 5),
            depth=depth,
            trim=bool(seed % 2),
            prefix_caching=seed % 4 > 0,
        )
        requests = [make_request(i, prompt, rng.randint(1, 24)) for i, prompt in enumerate(random_prompts(rng, 12))]
        run_to_end(SymbolicDevice(scheduler, seed), requests)
        for request in requests:
            assert request.is_finished and 1 <= request.num_output_tokens <= request.max_output_tokens
        num_hits += sum(request.num_cached_prompt_tokens or 0 for request in requests)
    assert num_hits > 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_pool_for_one_request_finishes_32(depth: int):
    rng = random.Random(depth)
    # 63 tokens and 9 rows a step in blocks of 4: 18 blocks, or 20 with another step outstanding
    scheduler = make_scheduler(8, num_blocks=18 + 2 * depth, budget=24, max_num_seqs=8, depth=depth)
    requests = [make_request(i, prompt, 64 - len(prompt)) for i, prompt in enumerate(random_prompts(rng, 32, 40))]
    for request in requests:
        assert scheduler.kv_cache.group_too_small(scheduler.longest_extent(request)) is None
    run_to_end(SymbolicDevice(scheduler, depth), requests)
    assert sum(request.num_preemptions for request in requests) > 10


def test_the_youngest_is_preempted_and_resumes_first():
    scheduler = make_scheduler(3, num_blocks=14, budget=40, max_num_seqs=3, prefix_caching=False)
    requests = [make_request(i, [i % VOCAB] * 12, 20) for i in range(4)]
    device = SymbolicDevice(scheduler)
    for request in requests:
        scheduler.add(request)
    device.rng.random = lambda: 1.0  # no stops
    while not any(request.num_preemptions for request in requests):
        device.step()
    (victim,) = [request for request in requests if request.num_preemptions]
    assert victim is scheduler.waiting[0] and len(scheduler.waiting) > 1
    assert all(victim.generation > request.generation for request in scheduler.running)
    assert victim.num_computed_tokens == victim.num_draft_tokens == 0 and victim.output_token_ids


def test_a_resumed_request_counts_generated_tokens_as_prompt():
    scheduler = make_scheduler(3, prefix_caching=False, budget=64)
    request = make_request(0, [1] * 9, 20)
    device = SymbolicDevice(scheduler)
    device.rng.random = lambda: 1.0
    scheduler.add(request)
    for _ in range(3):
        device.step()
    num_tokens = request.num_tokens
    scheduler._requeue(request)
    output = scheduler.schedule()
    assert output.modes == [FINAL_CHUNK] and output.num_tokens == [num_tokens] == [request.prefill_end]


def test_hits_are_counted_once_in_tokens_of_the_prompt():
    scheduler = make_scheduler(0, num_blocks=100, budget=64)
    device = SymbolicDevice(scheduler)
    first, second = make_request(0, [1] * 18, 3), make_request(1, [1] * 16 + [2] * 11, 3)
    run_to_end(device, [first])
    scheduler.add(second)
    device.step()
    assert (first.num_cached_prompt_tokens, second.num_cached_prompt_tokens) == (0, 16)
    scheduler._requeue(second)
    output = scheduler.schedule()
    assert output.num_tokens == [28 - 24], "it finds its own blocks again"
    assert second.num_cached_prompt_tokens == 16


def test_a_request_with_prompt_logprobs_asks_for_no_hit():
    device = SymbolicDevice(make_scheduler(0, num_blocks=100, budget=64))
    requests = [make_request(0, [1] * 18, 3), make_request(1, [1] * 18, 3, prompt_logprobs=0)]
    for request in requests:
        run_to_end(device, [request])
    assert [request.num_cached_prompt_tokens for request in requests] == [0, None]


def test_a_prompt_at_the_smallest_budget_makes_progress():
    for num_prompt in range(1, 30):
        device = SymbolicDevice(make_scheduler(k=8, budget=8, max_num_seqs=1))
        run_to_end(device, [make_request(0, [1] * num_prompt, 2)])


def test_drafts_stop_at_the_context_end():
    scheduler = make_scheduler(k=8, budget=64, max_num_seqs=1, max_model_len=20)
    request = make_request(0, [1] * 15, 5)
    scheduler.add(request)
    scheduler.schedule()
    scheduler.settle(request, 0, [1], num_proposed=8)
    output = scheduler.schedule()
    # 16 tokens are committed; rows at positions 15..19 are the last that the context holds.
    assert output.num_tokens == [5] and output.max_seq_lens == [20]


def test_trim_to_max_tokens_verifies_no_more_than_can_be_kept():
    for trim, expected in [(False, 9), (True, 3)]:
        scheduler = make_scheduler(k=8, budget=64, max_num_seqs=1, trim=trim)
        request = make_request(0, [1] * 5, 4)
        scheduler.add(request)
        scheduler.schedule()
        scheduler.settle(request, 0, [1], num_proposed=8)
        assert scheduler.schedule().num_tokens == [expected]


def test_a_request_that_can_never_fit_is_told_the_numbers():
    scheduler = make_scheduler(k=8, num_blocks=10)
    extent = scheduler.longest_extent(make_request(0, [1] * 30, 20))
    # 49 tokens at most in the caches, and 9 rows behind them: 58 tokens in blocks of 4
    assert scheduler.kv_cache.group_too_small(extent) == ("target_full", 15, 9)


def test_request_key_knows_neither_arrival_nor_request_id():
    assert request_key(1, "a", 0) == request_key(1, "a", 0)
    assert len({request_key(s, i, t) for s in (0, 1) for i in ("a", "b") for t in (0, 1)}) == 8
