"""A stop string ends a request where one-token decoding would, however its tokens arrive."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from specbench.engine.stop_strings import StopMatch, StopMatcher
from specbench.engine.tokenizer import Tokenizer
from specbench.errors import UserError

LONG_TOKENS = ["hello", "abSTOPcd", "STOP", "lo\u0120STOPx", "xy", "STOP\u00f0\u0141"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """One token a byte, and a few of several characters."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(alphabet + LONG_TOKENS)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "STOPPER"])
    return Tokenizer(backend, None, Path("."))


def walk(tokenizer: Tokenizer, stops: Sequence[str], ids: Sequence[int]) -> StopMatch | None:
    matcher = StopMatcher(stops, tokenizer.new_detokenizer())
    for token_id in ids:
        if (match := matcher.push(token_id)) is not None:
            return match
    return None


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    """Whole tokens by their names; other texts byte by byte."""
    ids: list[int] = []
    for token in tokens:
        whole = tokenizer.token_id(token)
        ids += tokenizer.encode(token) if whole is None else [whole]
    return ids


@pytest.mark.parametrize("num_before", range(10))
def test_a_stop_at_each_place_keeps_its_last_token(tokenizer: Tokenizer, num_before: int) -> None:
    """However many tokens were verified behind it: the walk ends at the token that completes the match."""
    ids = ids_of(tokenizer, "x" * num_before, "STOP", "yyyyyyyy")
    match = walk(tokenizer, ["STOP"], ids)
    assert match == StopMatch("STOP", num_before + 1, "x" * num_before, 4)


def test_a_stop_over_several_tokens(tokenizer: Tokenizer) -> None:
    match = walk(tokenizer, ["STOP"], ids_of(tokenizer, "abST", "OP", "rest"))
    assert match == StopMatch("STOP", 6, "ab", 4)
    match = walk(tokenizer, ["hello STOP"], ids_of(tokenizer, "hel", "lo\u0120STOPx", "more"))
    assert match == StopMatch("hello STOP", 4, "", 11)


def test_a_stop_inside_one_token(tokenizer: Tokenizer) -> None:
    match = walk(tokenizer, ["STOP"], ids_of(tokenizer, "hello", "abSTOPcd", "hello"))
    assert match == StopMatch("STOP", 2, "helloab", 6)


def test_no_stop_and_half_a_stop(tokenizer: Tokenizer) -> None:
    assert walk(tokenizer, ["STOP"], ids_of(tokenizer, "hello ST")) is None
    assert walk(tokenizer, ["STOP"], ids_of(tokenizer, "SSTO STO PSTOSTO")) is None
    assert walk(tokenizer, [], ids_of(tokenizer, "hello")) is None
    match = walk(tokenizer, ["aab"], ids_of(tokenizer, "aaab"))
    assert match is not None
    assert match.text == "a"


def test_the_first_of_several(tokenizer: Tokenizer) -> None:
    """By where it begins in the text, whatever the order of the list; the longest of those that begin together."""
    for stops in (["cd", "STOP", "bST"], ["bST", "cd", "STOP"]):
        match = walk(tokenizer, stops, ids_of(tokenizer, "abSTOPcd"))
        assert match == StopMatch("bST", 1, "a", 7)
    match = walk(tokenizer, ["ab", "abSTOP"], ids_of(tokenizer, "abSTOPcd"))
    assert match == StopMatch("abSTOP", 1, "", 8)
    # A stop that was completed at an earlier token has ended the request already.
    match = walk(tokenizer, ["abcdef", "cd"], ids_of(tokenizer, "a", "b", "c", "d", "e", "f"))
    assert match == StopMatch("cd", 4, "ab", 2)


def test_a_stop_of_characters_that_are_split_over_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok \U0001f600\u00e9 more")
    match = walk(tokenizer, ["\U0001f600\u00e9"], ids)
    assert match == StopMatch("\U0001f600\u00e9", 3 + 4 + 2, "ok ", 2)
    # The first byte of another character is not the stop.
    assert walk(tokenizer, ["\u00e9"], tokenizer.encode("\u00e8\u00ea")) is None


def test_a_stop_with_the_start_of_a_character_behind_it(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "ab", "STOP\u00f0\u0141")
    match = walk(tokenizer, ["STOP"], ids)
    assert match is not None
    assert (match.num_tokens, match.text) == (3, "ab")
    assert tokenizer.split_channels(ids, match.num_cut_chars).answer_text == "ab"


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert walk(tokenizer, ["STOP", "<|end|>"], ids_of(tokenizer, "STOPPER", "<|end|>")) is None
    match = walk(tokenizer, ["STOP"], ids_of(tokenizer, "aST", "<|end|>", "OP"))
    assert match == StopMatch("STOP", 6, "a", 4)


def test_an_empty_stop_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="empty stop string"):
        StopMatcher(["a", ""], tokenizer.new_detokenizer())


def test_random_texts_against_a_search_of_the_whole(tokenizer: Tokenizer) -> None:
    draw = random.Random(0)
    names = ["a", "b", "ab", "xy", "hello", "\u00e9", "<|end|>"]
    for _ in range(3000):
        ids = ids_of(tokenizer, *(draw.choice(names) for _ in range(draw.randint(1, 15))))
        stops = ["".join(draw.choice("abxyhelo\u00e9") for _ in range(draw.randint(1, 4))) for _ in range(3)]
        match = walk(tokenizer, stops, ids)
        texts = [tokenizer.decode(ids[:count]) for count in range(len(ids) + 1)]
        num_tokens = next((n for n, text in enumerate(texts) if any(stop in text for stop in stops)), None)
        if num_tokens is None:
            assert match is None
            continue
        assert match is not None
        text = texts[num_tokens]
        assert match.num_tokens == num_tokens
        assert match.text == text[: min(text.find(stop) for stop in stops if stop in text)]
        assert text[: len(text) - match.num_cut_chars] == match.text


def test_a_long_text_costs_its_length(tokenizer: Tokenizer) -> None:
    ids = ids_of(tokenizer, "hello") * 100_000
    start = time.perf_counter()
    assert walk(tokenizer, ["STOP", "Question", "<|separator|>"], ids) is None
    assert time.perf_counter() - start < 5
