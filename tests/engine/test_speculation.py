"""With speculation on, output equals plain decoding token for token: fp32, whatever k, chunking, batch and stops."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specbench.engine.sampling import verification
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=8)


def ragged_prompts(count: int, seed: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, list[int]]:
    requests = [token_request(f"r{i}", prompt, 24) for i, prompt in enumerate(ragged_prompts(8, seed=0))]
    return outputs(make_engine(folder), requests)


@pytest.mark.parametrize("k", range(1, 9))
def test_greedy_output_equals_plain_decoding(folder: Path, plain: dict[str, list[int]], k: int):
    requests = [token_request(f"r{i}", prompt, 24) for i, prompt in enumerate(ragged_prompts(8, seed=0))]
    assert outputs(make_engine(folder, k), requests) == plain
    for batch_size in range(1, 8):
        part = requests[: batch_size + 1]
        speculative = outputs(make_engine(folder, k, max_num_seqs=batch_size), part)
        assert speculative == {request.request_id: plain[request.request_id] for request in part}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [8, 9, 11, 16])
def test_chunking_and_pipelining_change_nothing(folder: Path, plain: dict[str, list[int]], budget: int, depth: int):
    requests = [token_request(f"r{i}", prompt, 24) for i, prompt in enumerate(ragged_prompts(8, seed=0))]
    for k in (0, 3, 8):
        engine = make_engine(folder, k, max_num_batched_tokens=budget, pipeline_depth=depth)
        assert outputs(engine, requests) == plain


def test_two_requests_of_one_prompt_emit_the_same(folder: Path):
    prompt = ragged_prompts(1, seed=5)[0]
    results = outputs(make_engine(folder, 4), [token_request(name, prompt, 20) for name in ("a", "b")])
    assert results["a"] == results["b"]


def force_accepted(monkeypatch: pytest.MonkeyPatch, wanted: list[int], vocab_size: int) -> None:
    """Let the target agree with exactly the next `wanted` number of drafts, and emit something else behind them."""
    counts = iter(wanted)

    def forced(sampled_ids, draft_ids, num_drafts, samples):
        sampled_ids = sampled_ids.clone()
        for request in range(len(sampled_ids)):
            if num_drafts[request] > 0:
                accepted = min(next(counts), int(num_drafts[request]))
                sampled_ids[request, :accepted] = draft_ids[request, :accepted]
                if accepted < num_drafts[request]:
                    sampled_ids[request, accepted] = (draft_ids[request, accepted] + 1) % vocab_size
        return verification.sample_and_match(sampled_ids, draft_ids, num_drafts, samples)

    monkeypatch.setattr("specbench.engine.execution.stages.sample_and_match", forced)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("restriction", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9}])
def test_sampled_output_equals_plain_sampling(folder: Path, temperature: float, restriction: dict):
    requests = [
        token_request(f"r{i}", prompt, 20, temperature=temperature, seed=11, **restriction)
        for i, prompt in enumerate(ragged_prompts(5, seed=3))
    ]
    expected = outputs(make_engine(folder), requests)
    assert len({tuple(ids) for ids in expected.values()}) == 5
    for k in (1, 4, 8):
        assert outputs(make_engine(folder, k, max_num_seqs=3), requests) == expected


def test_a_seed_means_the_same_alone_and_in_company(folder: Path):
    prompts = ragged_prompts(4, seed=9)
    requests = [token_request(f"r{i}", prompt, 12, temperature=1.0, seed=2) for i, prompt in enumerate(prompts)]
    together = outputs(make_engine(folder, 2), requests)
    for request in reversed(requests):
        assert outputs(make_engine(folder, 2), [request])[request.request_id] == together[request.request_id]
    other_seed = token_request("r0", prompts[0], 12, temperature=1.0, seed=3)
    assert outputs(make_engine(folder, 2), [other_seed])["r0"] != together["r0"]


def test_caps_and_stop_tokens_inside_a_block_end_where_plain_decoding_ends(folder: Path, plain: dict[str, list[int]]):
    prompts = ragged_prompts(8, seed=0)
    for index, prompt in enumerate(prompts):
        emitted = plain[f"r{index}"]
        for at in (0, 1, 4, 9):
            stop_id = emitted[at]
            first = emitted.index(stop_id)
            request = token_request("stop", prompt, 24, stop_token_ids=(stop_id,))
            result = run(make_engine(folder, 8), [request])["stop"]
            assert result.output_token_ids == emitted[: first + 1]
            assert result.record.finish_reason == "stop"
            capped = run(make_engine(folder, 8), [token_request("cap", prompt, at + 1)])["cap"]
            assert capped.output_token_ids == emitted[: at + 1]
            assert capped.record.finish_reason == "length"


@pytest.mark.parametrize("k", [1, 3, 8])
def test_records_count_every_token_once(folder: Path, monkeypatch: pytest.MonkeyPatch, k: int):
    rng = random.Random(k)
    force_accepted(monkeypatch, [rng.randint(0, k) for _ in range(10_000)], VOCAB)
    requests = [token_request(f"r{i}", prompt, 30) for i, prompt in enumerate(ragged_prompts(6, seed=1))]
    results = run(make_engine(folder, k, max_num_seqs=4), requests)
    seen: set[int] = set()
    for result in results.values():
        position = 1
        for index, step in enumerate(result.verify_steps):
            assert step.step == index and step.output_index == position
            assert step.num_emitted + step.num_discarded == step.num_accepted + 1
            assert step.is_trimmed == (step.num_discarded > 0)
            assert 0 <= step.num_accepted <= step.num_drafted <= k
            position += step.num_emitted
            seen.add(step.num_accepted)
        assert position == result.record.num_output_tokens == len(result.output_token_ids) == 30
    assert seen == set(range(k + 1)), "every accepted count occurs"


def test_the_context_end_is_reached_and_not_passed(folder: Path):
    prompt = ragged_prompts(1, seed=4)[0][:10]
    request = token_request("long", prompt, 1000)
    expected = run(make_engine(folder, 0, max_model_len=48), [request])["long"]
    assert expected.record.num_output_tokens == 48 - len(prompt)
    assert expected.record.finish_reason == "length"
    for k in (1, 5, 8):
        for depth in (0, 1):
            result = run(make_engine(folder, k, max_model_len=48, pipeline_depth=depth), [request])["long"]
            assert result.output_token_ids == expected.output_token_ids
