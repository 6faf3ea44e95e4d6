"""Stops inside a verified block: what follows a stop leaves text, ids, counts and records alike."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specbench.generate import GenerateRequest, GenerateResult, SamplingParams
from tests.engine.harness import run
from tests.engine.scripted import EOS, build_folder, scripted_engine

PROMPT = "Say: "
TEXT = "naïve 👩‍👩‍👧 café, 12 + 30 = 42. Ω! The answer is 42. 🎉 Done"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("scripted"))


def generate(folder: Path, k: int, wrong_at=(), missing_at=(), text: str = TEXT, **sampling) -> GenerateResult:
    script = script_of(folder, text)
    engine = scripted_engine(folder, script, k, wrong_at, missing_at)
    params = SamplingParams(**({"max_output_tokens": 200, "logprobs": 0} | sampling))
    return run(engine, [GenerateRequest("r", "s", params, prompt=PROMPT)])["r"]


def script_of(folder: Path, text: str) -> list[int]:
    tokenizer = scripted_engine(folder, [0], 0).tokenizer
    return [*tokenizer.encode(PROMPT + text), EOS, *tokenizer.encode("never seen")]


def wrong_positions(seed: int, length: int) -> set[int]:
    rng = random.Random(seed)
    return {position for position in range(length) if rng.random() < 0.25}


def assert_same(result: GenerateResult, plain: GenerateResult) -> None:
    assert result.output_token_ids == plain.output_token_ids
    assert result.output_text == plain.output_text
    assert result.record.finish_reason == plain.record.finish_reason
    assert result.record.num_output_tokens == len(result.output_token_ids)
    assert [entry.token_id for entry in result.logprobs] == result.output_token_ids
    assert result.logprobs == plain.logprobs
    assert 1 + sum(step.num_emitted for step in result.verify_steps) == len(result.output_token_ids)


@pytest.mark.parametrize("k", range(1, 9))
def test_the_end_of_sequence_ends_text_split_over_block_edges(folder: Path, k: int):
    plain = generate(folder, 0)
    assert plain.output_text == TEXT and plain.record.finish_reason == "stop"
    assert plain.output_token_ids[-1] == EOS, "the stop token counts, and is no text"
    num_trimmed = 0
    for seed in range(6):
        result = generate(folder, k, wrong_positions(seed, 200), wrong_positions(seed + 50, 200))
        assert_same(result, plain)
        num_trimmed += result.verify_steps[-1].num_discarded
    assert num_trimmed > 0, "some block must reach past the end of sequence"


@pytest.mark.parametrize("stop", ["42", "👩‍👧", "é, 1", "🎉", "answer is", "n", " "])
def test_a_stop_string_ends_where_plain_decoding_ends(folder: Path, stop: str):
    plain = generate(folder, 0, stop=(stop,))
    assert plain.output_text == TEXT[: TEXT.index(stop)]
    assert plain.record.finish_reason == "stop"
    for k in range(1, 9):
        for seed in range(3):
            assert_same(generate(folder, k, wrong_positions(seed, 200), stop=(stop,)), plain)


def test_the_earliest_of_several_stops_wins(folder: Path):
    stops = ("Done", "42", "The answer", "café")
    plain = generate(folder, 0, stop=stops)
    assert plain.output_text == TEXT[: TEXT.index("café")]
    assert_same(generate(folder, 8, stop=stops), plain)


def test_every_cap_cuts_at_its_token(folder: Path):
    whole = generate(folder, 0).output_token_ids
    for cap in range(1, len(whole) + 3):
        plain = generate(folder, 0, max_output_tokens=cap)
        assert plain.output_token_ids == whole[:cap]
        # A stop token that is also the last allowed token is a stop.
        assert plain.record.finish_reason == ("length" if cap < len(whole) else "stop")
        assert_same(generate(folder, 8, max_output_tokens=cap), plain)


def test_a_stop_behind_the_cap_does_not_count(folder: Path):
    at = len(script_of(folder, TEXT[: TEXT.index("42")])) - len(script_of(folder, ""))
    for cap, reason in [(at + 1, "length"), (at + 2, "stop")]:
        plain = generate(folder, 0, stop=("42",), max_output_tokens=cap)
        assert plain.record.finish_reason == reason
        assert_same(generate(folder, 8, stop=("42",), max_output_tokens=cap), plain)


def test_a_drafted_end_of_sequence_that_is_rejected_ends_nothing(folder: Path):
    """Token 0 stands in for any wrong draft; here the wrong draft is the end of sequence itself."""
    script = script_of(folder, TEXT)
    engine = scripted_engine(folder, script, 4)
    wrong = len(script_of(folder, TEXT[:10]))
    engine.runner.proposer.script = [*script[:wrong], EOS, *script[wrong + 1 :]]
    params = SamplingParams(200)
    result = run(engine, [GenerateRequest("r", "s", params, prompt=PROMPT)])["r"]
    assert result.output_text == TEXT


def test_ignore_eos_runs_to_the_cap(folder: Path):
    whole = generate(folder, 0).output_token_ids
    for k in (0, 8):
        result = generate(folder, k, ignore_eos=True, max_output_tokens=len(whole) + 4)
        assert result.record.num_output_tokens == len(whole) + 4
        assert result.record.finish_reason == "length"


def test_missing_drafts_are_counted_as_missing(folder: Path):
    length = len(script_of(folder, TEXT))
    result = generate(folder, 4, missing_at=range(2 * length))
    assert {step.num_drafted for step in result.verify_steps} == {0}
    assert {step.num_emitted for step in result.verify_steps} == {1}
    assert_same(result, generate(folder, 0))


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_nothing_ends_a_request_before_min_tokens(folder: Path, k: int):
    """The end of sequence is drafted, and banned; stop strings completed too early do not count."""
    whole = generate(folder, 0).output_token_ids
    for min_tokens in (len(whole) - 2, len(whole) - 1, len(whole), len(whole) + 3):
        result = generate(folder, k, min_tokens=min_tokens)
        assert_same(result, generate(folder, 0, min_tokens=min_tokens))
        kept = max(len(whole), min_tokens) if min_tokens < len(whole) else 200
        assert result.record.num_output_tokens == kept


@pytest.mark.parametrize("k", [0, 1, 8])
def test_a_stop_string_completed_before_min_tokens_is_text(folder: Path, k: int):
    first, second = TEXT.index("42"), TEXT.index("42", TEXT.index("42") + 1)
    num_before = len(script_of(folder, TEXT[:first])) - len(script_of(folder, ""))
    for min_tokens, text in [(num_before + 1, TEXT[:first]), (num_before + 2, TEXT[:second])]:
        # A longer stop beside it keeps the early match among the characters that are looked at again.
        result = generate(folder, k, stop=("42", "never to be found"), min_tokens=min_tokens)
        assert result.output_text == text
        assert_same(result, generate(folder, 0, stop=("42", "never to be found"), min_tokens=min_tokens))


@pytest.mark.parametrize("k", [0, 3])
def test_bad_words_given_as_text_are_not_generated(folder: Path, k: int):
    result = generate(folder, k, bad_words=("answer",), max_output_tokens=80)
    # One token a byte: the word's last byte is what cannot come.
    assert "The answe" in result.output_text and "answer" not in result.output_text
    assert_same(result, generate(folder, 0, bad_words=("answer",), max_output_tokens=80))
