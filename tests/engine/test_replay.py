"""The output check finds what is wrong with emitted tokens, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specbench.engine import replay
from specbench.engine.layers.metadata import AttentionMetadata, TargetOutput
from specbench.engine.replay import check_output
from tests.engine.harness import make_engine, run, token_request
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=8)


@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize("budget", [16, 256])
def test_what_the_engine_emits_is_identical(folder: Path, k: int, budget: int):
    requests = [token_request(f"r{i}", prompt, 20) for i, prompt in enumerate(ragged_prompts(11, seed=0))]
    engine = make_engine(folder, k, max_num_seqs=4, max_num_batched_tokens=budget)
    results = list(run(engine, requests).values())
    check = check_output(engine, results, limit=10)
    assert (check.status, check.compared, check.identical) == ("identical", 10, 10)
    assert check.max_logit_difference is not None and check.max_logit_difference < 1e-4
    # The check leaves the engine fit for use.
    assert run(engine, requests)["r0"].output_token_ids == next(
        result.output_token_ids for result in results if result.record.request_id == "r0"
    )


@pytest.mark.parametrize("at", [0, 7, 19])
def test_one_wrong_token_is_a_mismatch_where_it_stands(folder: Path, at: int):
    requests = [token_request(f"r{i}", prompt, 20) for i, prompt in enumerate(ragged_prompts(3, seed=0))]
    engine = make_engine(folder, 4)
    results = list(run(engine, requests).values())
    wrong = list(results[1].output_token_ids)
    wrong[at] = (wrong[at] + 1) % 250
    results[1] = replace(results[1], output_token_ids=wrong)
    check = check_output(engine, results, limit=32)
    assert check.status == "mismatch" and check.mismatches == 1 and check.identical == 2
    first = check.differences[0]
    assert (first["request_id"], first["output_index"]) == (results[1].record.request_id, at)
    assert first["margin"] > 0 and first["emitted"] == wrong[at]


@pytest.mark.parametrize("k", [0, 4])
def test_what_a_batch_rounds_otherwise_is_a_near_tie(folder: Path, k: int, monkeypatch: pytest.MonkeyPatch):
    """Where kernels go by how many requests there are: one request alone is compared with several of it."""
    engine = make_engine(folder, k)
    (result,) = run(engine, [token_request("r", [5, 6, 7], 10)]).values()
    runner_up = check_output(engine, [replace(result, output_token_ids=[0] * 10)], limit=1)
    assert runner_up.status == "mismatch" and runner_up.max_logit_difference < 1e-4
    forward = engine.model.forward

    def rounded(embeds: torch.Tensor, metadata: AttentionMetadata, caches: dict) -> TargetOutput:
        output = forward(embeds, metadata, caches)
        return replace(output, hidden_states=output.hidden_states * (10 if metadata.paged.num_reqs > 1 else 1))

    engine.model.forward = rounded
    # Ten times the logits are no rounding: what breaks rows must not excuse tokens that are wrong.
    broken = check_output(engine, [replace(result, output_token_ids=[0] * 10)], limit=1)
    assert broken.max_logit_difference > 0.1 and broken.status == "mismatch"
    assert broken.allowed_margin < broken.largest_margin < 2 * broken.max_logit_difference
    monkeypatch.setitem(replay._MOST_ROUNDING, "float32", 100.0)
    again = check_output(engine, [replace(result, output_token_ids=[0] * 10)], limit=1)
    assert again.status == "near_ties" and again.allowed_margin == 2 * again.max_logit_difference


def test_logits_that_are_no_numbers_are_no_agreement(folder: Path):
    """An argmax over NaN is the same for target, drafts and replay."""
    engine = make_engine(folder, 4)
    results = list(run(engine, [token_request("r", [5, 6, 7], 10)]).values())
    compute_logits = engine.model.compute_logits
    engine.model.compute_logits = lambda hidden: compute_logits(hidden) * float("nan")
    check = check_output(engine, results, limit=8)
    assert (check.status, check.reason) == ("mismatch", "logits that are not finite")


def test_nothing_to_check_is_said(folder: Path):
    engine = make_engine(folder, 2)
    assert check_output(engine, [], limit=32).status == "not_checked"
    assert check_output(engine, [], limit=0).status == "not_checked"


#: What a greedy request may ask for.
ASKED = [
    {"repetition_penalty": 1.5, "frequency_penalty": 0.2},
    {"logit_bias": ((3, 4.0),), "presence_penalty": 1.0},
    {"allowed_token_ids": tuple(range(0, 250, 3))},
    {"bad_word_token_ids": tuple((token_id,) for token_id in range(0, 250, 2))},
    {"min_tokens": 20, "stop_token_ids": tuple(range(100, 250)), "logprobs": 2},
    {},
]


@pytest.mark.parametrize("k", [0, 4])
def test_penalties_and_bans_are_replayed(folder: Path, k: int):
    prompts = ragged_prompts(len(ASKED), seed=2)
    requests = [token_request(f"r{i}", prompts[i], 20, **asked) for i, asked in enumerate(ASKED)]
    engine = make_engine(folder, k)
    results = list(run(engine, requests).values())
    check = check_output(engine, results, limit=10)
    assert (check.status, check.identical) == ("identical", len(ASKED))
    # Without its parameters every text but the last is another one's.
    check = check_output(engine, [replace(result, sampling=None) for result in results], limit=10)
    assert (check.status, check.mismatches) == ("mismatch", len(ASKED) - 1)


def test_a_banned_token_is_a_mismatch_of_finite_margin(folder: Path):
    engine = make_engine(folder, 4)
    (result,) = run(engine, [token_request("r", [5, 6, 7], 10)]).values()
    asked = replace(result.sampling, bad_word_token_ids=((result.output_token_ids[4],),))
    check = check_output(engine, [replace(result, sampling=asked)], limit=8)
    assert check.status == "mismatch"
    assert check.largest_margin is not None and 1e30 < check.largest_margin < float("inf")
