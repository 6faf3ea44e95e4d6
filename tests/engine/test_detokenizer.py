"""Text streamed in any pieces, joined, is the text of the whole."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from specbench.engine.detokenizer import IncrementalDetokenizer
from specbench.engine.tokenizer import Tokenizer

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


def byte_level() -> Tokenizer:
    """One token a byte, a few longer ones, two special tokens and an added token that is not special."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = ["\u0120the", "ing", "\u00f0\u0141", "\u013a\u0122"]
    vocab = {token: index for index, token in enumerate(alphabet + words)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|start|>"])
    backend.add_tokens([AddedToken("<a b>"), AddedToken("plain")])
    return Tokenizer(backend, None, Path("."))


def byte_fallback() -> Tokenizer:
    """As SentencePiece models have it: marked spaces, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "\u2581", "\u2581a", "a", "b", "\u2581cd", "\u00e9", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: index for index, token in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend, None, Path("."))


def in_pieces(detokenizer: IncrementalDetokenizer, ids: list[int], sizes: random.Random) -> str:
    text, start = "", 0
    while start < len(ids):
        size = sizes.randint(1, 9)
        text += detokenizer.push(ids[start : start + size])
        start += size
    return text + detokenizer.flush()


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback()], ids=["byte_level", "byte_fallback"])
def test_any_tokens_in_any_pieces(tokenizer: Tokenizer) -> None:
    """Invalid bytes, special tokens and ids outside the vocabulary included."""
    draw = random.Random(0)
    for _ in range(2000):
        ids = [draw.randrange(tokenizer.vocab_size + 3) for _ in range(draw.randint(0, 20))]
        assert in_pieces(tokenizer.new_detokenizer(), ids, draw) == tokenizer.decode(ids)


def test_valid_text_in_any_pieces() -> None:
    tokenizer, draw = byte_level(), random.Random(1)
    text = f"na\u00efve \u6f22\u5b57 {FAMILY} the end, \u0928\u092e\u0938\u094d\u0924\u0947 \U0001f600" * 3
    ids = tokenizer.encode(text)
    assert len(ids) > len(text)
    for _ in range(50):
        assert in_pieces(tokenizer.new_detokenizer(), ids, draw) == text


def test_a_character_is_held_until_its_last_byte() -> None:
    tokenizer = byte_level()
    detokenizer = tokenizer.new_detokenizer()
    ids = tokenizer.encode("\U0001f600")
    assert [detokenizer.push((token,)) for token in ids] == ["", "", "", "\U0001f600"]
    assert detokenizer.flush() == ""


def test_an_output_that_ends_inside_a_character() -> None:
    tokenizer = byte_level()
    detokenizer = tokenizer.new_detokenizer()
    ids = tokenizer.encode("a\U0001f600")[:3]
    assert detokenizer.push(ids) == "a"
    assert detokenizer.flush() == "\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"


def test_a_broken_byte_does_not_hold_back_the_rest() -> None:
    tokenizer = byte_level()
    detokenizer = tokenizer.new_detokenizer()
    broken = tokenizer.encode("\U0001f600")[:1]
    assert detokenizer.push(broken * 1000).count("\ufffd") == 999
    assert detokenizer.push(tokenizer.encode("ok")) == "\ufffdok"


def test_special_tokens_are_no_text_even_inside_a_character() -> None:
    tokenizer = byte_level()
    first, *rest = tokenizer.encode("\u00e9")
    end = tokenizer.token_id("<|end|>")
    assert end is not None
    detokenizer = tokenizer.new_detokenizer()
    assert detokenizer.push([first, end, *rest, end]) == "\u00e9"
