"""A key is a function of what a block was computed from: all tokens through its end, those ahead, and content."""

from specbench.engine.prefix_keys import ContentSpan, PrefixKeys

SIZE = 4


def keys(prompt: list[int], output: list[int] | None = None, content: tuple[ContentSpan, ...] = ()) -> PrefixKeys:
    return PrefixKeys(SIZE, prompt, [] if output is None else output, content)


def test_every_earlier_token_counts():
    text = list(range(12))
    for changed in range(12):
        other = [*text[:changed], 99, *text[changed + 1 :]]
        for block in range(3):
            is_same = keys(text).key(block, 0) == keys(other).key(block, 0)
            assert is_same == (changed >= (block + 1) * SIZE)


def test_prompt_and_output_are_one_text():
    text = list(range(11))
    for split in range(12):
        for block, lookahead in ((0, 0), (0, 3), (1, 0), (1, 3)):
            assert keys(text[:split], text[split:]).key(block, lookahead) == keys(text).key(block, lookahead)


def test_a_drafters_key_covers_the_tokens_it_reads_ahead_and_no_more():
    text = list(range(12))
    for changed in range(4, 12):
        other = [*text[:changed], 99, *text[changed + 1 :]]
        assert (keys(text).key(0, 3) == keys(other).key(0, 3)) == (changed >= 7)


def test_no_key_before_the_tokens_are_known():
    output: list[int] = []
    growing = keys([1, 2, 3], output)
    assert growing.key(0, 0) is None
    output += [4]
    assert growing.key(0, 0) == keys([1, 2, 3, 4]).key(0, 0) is not None
    assert growing.key(0, 2) is None
    output += [5, 6]
    assert growing.key(0, 2) == keys([1, 2, 3, 4, 5, 6]).key(0, 2) is not None


def test_keys_of_different_lookahead_differ():
    text = list(range(12))
    assert len({keys(text).key(0, lookahead) for lookahead in (0, 1, 3)}) == 3
    # Tokens ahead are not mistaken for the next block's.
    assert keys(text).key(0, SIZE) != keys(text).key(0, 0)


def test_content_behind_placeholders_counts_from_the_block_that_touches_it():
    text = [0] * 16

    def with_clip(digest: bytes, start: int = 5, end: int = 9) -> PrefixKeys:
        return keys(text, content=(ContentSpan(start, end, digest),))

    assert with_clip(b"a").key(0, 0) == with_clip(b"b").key(0, 0) == keys(text).key(0, 0)
    for block in (1, 2, 3):
        assert with_clip(b"a").key(block, 0) != with_clip(b"b").key(block, 0)
        assert with_clip(b"a").key(block, 0) == with_clip(b"a").key(block, 0)
        assert with_clip(b"a").key(block, 0) != with_clip(b"a", start=6).key(block, 0)
    # A drafter's row at the end of block 0 reads placeholder 5.
    assert with_clip(b"a").key(0, 2) != with_clip(b"b").key(0, 2)
    assert with_clip(b"a").key(0, 1) == with_clip(b"b").key(0, 1)
