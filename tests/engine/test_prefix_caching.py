"""Shared blocks and preemption in the whole engine: the text, the drafts and the drafter's caches of a cold run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from specbench.engine.llm_engine import LLMEngine
from specbench.errors import UserError
from specbench.generate import GenerateRequest, GenerateResult
from tests.engine.cache_entries import EntryChecker
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.test_speculation import force_accepted, ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 250
N = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=N)


def draw(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def shared_engine(folder: Path, k: int = N, **fields: object) -> LLMEngine:
    return make_engine(folder, k, **({"prefix_caching": True} | fields))


def steps_of(result: GenerateResult) -> list[tuple[int, int]]:
    return [(step.num_drafted, step.num_accepted) for step in result.verify_steps]


def cold(folder: Path, request: GenerateRequest, k: int = N) -> GenerateResult:
    return run(make_engine(folder, k), [request])[request.request_id]


def run_checked(engine: LLMEngine, oracle: Oracle, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
    """One after the other, every entry of every pass checked."""
    checker = EntryChecker(engine, oracle)
    results = [run(engine, [request])[request.request_id] for request in requests]
    assert checker.num_entries
    return results


@pytest.mark.parametrize(("k", "block_size", "step"), [(1, 4, 3), (3, 3, 2), (3, 16, 9), (8, 4, 2), (8, 16, 9)])
def test_hits_of_every_length_leave_drafts_and_entries_as_in_a_cold_run(
    folder: Path, k: int, block_size: int, step: int
):
    """The second request shares 0 .. 3 blocks and some tokens more; where k exceeds the block's size, too."""
    oracle = Oracle(folder)
    prefix = draw(0, 3 * block_size + 2 + k)
    hits = set()
    for shared in range(0, len(prefix), step):
        engine = shared_engine(folder, k, block_size=block_size)
        first = token_request("a", prefix[:shared] + draw(1, 5), 6)
        second = token_request("b", prefix[:shared] + draw(2, 4), 8)
        _, warm = run_checked(engine, oracle, [first, second])
        expected = cold(folder, second, k)
        assert warm.output_token_ids == expected.output_token_ids and steps_of(warm) == steps_of(expected)
        hits.add(warm.record.num_cached_prompt_tokens)
    assert hits == {block_size * count for count in range(len(hits))} and len(hits) >= 3


def test_continuations_that_part_right_behind_a_blocks_edge(folder: Path):
    oracle, prefix = Oracle(folder), draw(0, 16)
    for ahead in (0, 1, 4, N - 1, N):  # the tokens behind the edge that are the same
        engine = shared_engine(folder)
        common = draw(3, ahead)
        first = token_request("a", prefix + common + draw(4, N + 2), 10)
        second = token_request("b", prefix + common + draw(5, N + 2), 10)
        _, warm = run_checked(engine, oracle, [first, second])
        assert warm.record.num_cached_prompt_tokens == (16 if ahead == N else 4 * ((16 + ahead - N) // 4))
        assert steps_of(warm) == steps_of(cold(folder, second))


def test_a_third_request_never_takes_the_firsts_block_in_mid_prefix(folder: Path):
    """A = P + a, B = P + b, C = P + b + c: P's last block is in the caches twice, written before a and before b."""
    oracle, prefix, a, b, c = Oracle(folder), draw(0, 16), draw(1, 12), draw(2, 16), draw(3, 9)
    requests = [token_request(name, prompt, 8) for name, prompt in
                (("a", prefix + a), ("b", prefix + b), ("c", prefix + b + c))]  # fmt: skip
    results = run_checked(shared_engine(folder), oracle, requests)
    assert results[2].record.num_cached_prompt_tokens == 32 - N
    for request, result in zip(requests, results, strict=True):
        expected = cold(folder, request)
        assert result.output_token_ids == expected.output_token_ids and steps_of(result) == steps_of(expected)


def test_a_second_run_of_the_first_request_says_the_same(folder: Path):
    prefix = draw(0, 21)
    requests = [token_request(name, prefix + draw(seed, 7), 20) for name, seed in (("a", 1), ("b", 2), ("a2", 1))]
    first, other, again = run_checked(shared_engine(folder), Oracle(folder), requests)
    assert again.output_token_ids == first.output_token_ids != other.output_token_ids
    assert again.record.num_cached_prompt_tokens > other.record.num_cached_prompt_tokens > 0


def test_generated_tokens_are_found_as_a_prompt(folder: Path):
    """The next turn of a conversation goes on behind what was generated."""
    engine, prompt = shared_engine(folder), draw(0, 10)
    first = run(engine, [token_request("a", prompt, 30)])["a"]
    following = prompt + first.output_token_ids + draw(1, 5)
    second = token_request("b", following, 8)
    (warm,) = run_checked(engine, Oracle(folder), [second])
    # 40 tokens with 39 computed; those that the last drafts may still have been in are not published.
    assert warm.record.num_cached_prompt_tokens >= 39 - (N - 1) - 3
    assert warm.output_token_ids == cold(folder, second).output_token_ids


def test_resetting_forgets(folder: Path):
    engine, request = shared_engine(folder), token_request("a", draw(0, 30), 4)
    run(engine, [request])
    engine.reset_prefix_cache()
    assert run(engine, [request])["a"].record.num_cached_prompt_tokens == 0
    assert run(engine, [request])["a"].record.num_cached_prompt_tokens > 0


def test_requests_with_prompt_logprobs_run_every_row(folder: Path):
    engine, prompt = shared_engine(folder), draw(0, 30)
    run(engine, [token_request("a", prompt, 4)])
    result = run(engine, [token_request("b", prompt, 4, prompt_logprobs=0)])["b"]
    assert result.record.num_cached_prompt_tokens is None
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == 30


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [0, 3, 8])
def test_a_busy_engine_says_what_plain_decoding_says(folder: Path, k: int, depth: int):
    """Many requests over few prefixes, few blocks, chunks: hits, evictions and preemptions at once."""
    rng = random.Random(7)
    prefixes = [draw(seed, 30) for seed in range(3)]
    prompts = [rng.choice(prefixes)[: rng.randint(8, 30)] + draw(100 + i, rng.randint(1, 9)) for i in range(24)]
    requests = [token_request(f"r{i}", prompt, rng.randint(4, 40)) for i, prompt in enumerate(prompts)]
    expected = outputs(make_engine(folder, max_model_len=96), requests)
    fields = {"max_model_len": 96, "num_blocks": 34, "max_num_batched_tokens": 20, "pipeline_depth": depth}
    results = run(shared_engine(folder, k, **fields), requests)
    assert {name: result.output_token_ids for name, result in results.items()} == expected
    assert sum(result.record.num_preemptions for result in results.values()) > 0
    assert sum(result.record.num_cached_prompt_tokens or 0 for result in results.values()) > 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_pool_for_one_request_finishes_32_with_plain_results(folder: Path, prefix_caching: bool):
    prompts = ragged_prompts(32, seed=4, longest=30)
    requests = [token_request(f"r{i}", prompt, 10) for i, prompt in enumerate(prompts)]
    expected = outputs(make_engine(folder, max_model_len=48), requests)
    engine = make_engine(folder, N, max_model_len=48, num_blocks=13, prefix_caching=prefix_caching)
    results = run(engine, requests)
    assert {name: result.output_token_ids for name, result in results.items()} == expected


@pytest.mark.parametrize(("num_prompt", "prefix_caching"), [(1, False), (5, True), (20, True)])
def test_preemption_at_every_step_changes_nothing(folder: Path, num_prompt: int, prefix_caching: bool):
    """Preempted once before step 1, 2, 3, ... of its life."""
    oracle, request = Oracle(folder), token_request("r", draw(num_prompt, num_prompt), 8)
    expected = cold(folder, request)
    num_steps, num_preemptions = 0, 1
    while num_preemptions:
        num_steps += 1
        engine = make_engine(folder, N, max_num_batched_tokens=12, prefix_caching=prefix_caching)
        checker = EntryChecker(engine, oracle)
        engine.add_request(request, 0.0)
        result = step_and_preempt(engine, at_step=num_steps)
        assert result.output_token_ids == expected.output_token_ids
        assert checker.num_entries
        num_preemptions = result.record.num_preemptions
    assert num_steps > 3


def step_and_preempt(engine: LLMEngine, at_step: int) -> GenerateResult:
    """Run the one request to its end; take its blocks away after so many steps, if it lives that long."""
    for step in range(10_000):
        if step == at_step and engine.scheduler.running:
            (request,) = engine.scheduler.running
            engine.scheduler._requeue(request)
        finished, _ = engine.step()
        if finished:
            assert engine.scheduler.kv_cache.num_blocks_used == 0
            return finished[0]
    raise AssertionError("no end")


def test_preemption_between_rejections_leaves_every_entry_right(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """All pairs of accepted counts around a preemption; blocks and rows are taken over by others meanwhile."""
    oracle, rng = Oracle(folder), random.Random(3)
    force_accepted(monkeypatch, [rng.randint(0, N) for _ in range(10_000)], VOCAB)
    engine = shared_engine(folder, max_num_seqs=3, max_num_batched_tokens=24, num_blocks=33)
    checker = EntryChecker(engine, oracle)
    for index in range(10):
        prompt = draw(index % 2, rng.randint(1, 3 * N)) + draw(50 + index, rng.randint(1, 4))
        engine.add_request(token_request(f"r{index}", prompt, 24), 0.0)
    num_preempted = 0
    while engine.has_requests:
        idle = [request for request in engine.scheduler.running if not request.in_flight]
        if idle and rng.random() < 0.15:
            engine.scheduler._requeue(idle[-1])
            num_preempted += 1
        engine.step()
    assert num_preempted > 5 and checker.num_entries > 5_000
    assert engine.scheduler.kv_cache.num_blocks_used == 0


def test_a_resumed_prefill_ends_in_a_step_without_drafts(folder: Path):
    engine = make_engine(folder, N)
    engine.add_request(token_request("r", draw(0, 6), 14), 0.0)
    result = step_and_preempt(engine, at_step=2)
    resumed = [step for step in result.verify_steps if step.num_drafted == 0]
    assert result.record.num_preemptions == 1 and len(resumed) == 1
    assert (resumed[0].num_accepted, resumed[0].num_emitted) == (0, 1)
    assert 1 + sum(step.num_emitted for step in result.verify_steps) == result.record.num_output_tokens


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(folder: Path):
    engine = make_engine(folder, N, max_model_len=128, num_blocks=33)
    engine.add_request(token_request("fits", draw(0, 100), 27), 0.0)
    small = make_engine(folder, 0, max_model_len=64, num_blocks=17)
    small.scheduler.kv_cache.pools[0].num_blocks = 9  # as if the pool were smaller than the longest request
    with pytest.raises(UserError, match=r"request r: 40 prompt and 24 output tokens.*need 16 blocks.*which has 8"):
        small.add_request(token_request("r", draw(0, 40), 30), 0.0)
    with pytest.raises(UserError, match=r"cache.num_blocks: 16 blocks of 4 tokens hold less than one request"):
        make_engine(folder, 0, max_model_len=64, num_blocks=16)


def test_only_what_runs_can_be_aborted_and_what_has_ended_keeps_its_reason(folder: Path):
    prompt = draw(0, 12)
    text = outputs(shared_engine(folder), [token_request("r", prompt, 6)])["r"]
    engine = shared_engine(folder, pipeline_depth=1)
    engine.add_request(token_request("r", prompt, 6, stop_token_ids=(text[2],)), 0.0)
    request = engine.scheduler.waiting[0]
    while not request.is_finished:
        assert engine.step()[0] == []
    assert request.in_flight and engine.abort("r") is None
    (result,), _ = engine.step()
    assert result.record.finish_reason == "stop" and result.output_token_ids == text[:3]
    with pytest.raises(UserError, match=r"request id 'r' is not running: it has ended, or was never added"):
        engine.abort("r")


def test_an_aborted_request_gives_everything_back_once(folder: Path):
    for depth in (0, 1):
        engine = shared_engine(folder, pipeline_depth=depth)
        for index in range(3):
            engine.add_request(token_request(f"r{index}", draw(index, 12), 20), 0.0)
        engine.step()
        results = {"r1": engine.abort("r1")} if depth == 0 else {}
        if depth == 1:
            assert engine.abort("r1") is None
        while engine.has_requests:
            finished, _ = engine.step()
            results |= {result.record.request_id: result for result in finished}
        assert {name: result.record.finish_reason for name, result in results.items()} == {
            "r0": "length", "r1": "aborted", "r2": "length",
        }  # fmt: skip
        assert engine.scheduler.kv_cache.num_blocks_used == 0
