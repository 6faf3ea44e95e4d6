"""Texts of two runs, token by token."""

from __future__ import annotations

from array import array

import pytest

from specbench.records import RequestRecord, SampleRecord
from specbench.reports.text_difference import TextComparison, compare_texts, text_sentence, text_table
from tests.reports.event_logs import make_request, make_sample


def samples(*outputs: list[int], text: str = "a") -> list[SampleRecord]:
    return [make_sample(f"s{index}", 1.0, output_token_ids=ids, output_text=text) for index, ids in enumerate(outputs)]


def requests(count: int, *failed: int) -> list[RequestRecord]:
    return [make_request(f"s{index}", finish_reason="error" if index in failed else "stop") for index in range(count)]


def compared(base: list[SampleRecord], new: list[SampleRecord], *failed: int) -> TextComparison:
    return compare_texts(requests(len(base)), base, requests(len(new), *failed), new, "official")


def test_identical_whatever_holds_the_tokens() -> None:
    found = compared(samples([1, 2], [3]), samples(array("i", [1, 2]), array("i", [3])))
    assert (found.compared, found.identical, found.differing) == (2, 2, ())
    assert found.is_identical
    assert text_sentence(found) == "Texts: **identical**, token by token, in all 2 outputs compared"


@pytest.mark.parametrize(
    ("base", "new", "at"),
    [([1, 2, 3], [1, 5, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [4], 0), ([1, 2], [1, 2, 3, 4], 2)],
)
def test_the_first_difference(base: list[int], new: list[int], at: int) -> None:
    found = compared(samples(base, [9], text=""), samples(new, [9], text=""))
    (one,) = found.differing
    assert (one.first_difference_at, one.base.length, one.new.length) == (at, len(base), len(new))
    assert text_sentence(found) == "Texts: **different** in 1 of 2 outputs compared token by token"


def test_failed_and_missing_samples_are_counted_apart() -> None:
    found = compared(samples([1], [2], [3]), samples([1], [9]), 1)
    assert (found.compared, found.identical, found.failed, found.only_base, found.only_new) == (1, 1, 1, 1, 0)
    assert not found.is_identical
    assert "1 failed in either run; 1 only in the base run" in text_sentence(found)


def test_without_token_ids_characters_are_compared() -> None:
    base = [make_sample("s0", 1.0, output_token_ids=[], output_text="abc")]
    new = [make_sample("s0", 1.0, output_token_ids=[7], output_text="abd")]
    found = compared(base, new)
    assert found.differing[0].first_difference_at == 2
    assert found.as_characters == 1


def test_other_prompts_are_counted() -> None:
    base = [make_sample("s0", 1.0, prompt_token_ids=[1, 2])]
    new = [make_sample("s0", 1.0, prompt_token_ids=array("i", [1, 3]))]
    assert compared(base, new).different_prompts == 1
    assert compared(base, base).different_prompts == 0
    assert compared([make_sample("s0", 1.0)], [make_sample("s0", 1.0, prompt="p")]).different_prompts == 1


def test_turns_and_repeats_are_told_apart() -> None:
    base = [make_sample("s0", 1.0, turn=turn, output_token_ids=[turn]) for turn in range(2)]
    asked = [make_request(f"t{turn}", sample_id="s0", turn=turn) for turn in range(2)]
    assert compare_texts(asked, base, asked, list(reversed(base)), None).is_identical


def test_only_the_first_few_are_listed_and_those_that_differ_first() -> None:
    base = [[index] for index in range(12)]
    new = [[99 if index == 11 else index] for index in range(12)]
    table = text_table(compared(samples(*base), samples(*new)), "base", "new")
    assert table is not None
    assert [row[0].text for row in table.rows] == ["s11", *(f"s{index}" for index in range(9))]
    assert table.notes == ("2 more are in the JSON form of this comparison.",)


def test_outputs_as_a_pull_request_lists_them() -> None:
    """Length, and how it ended: at the limit or with an answer."""
    cut = make_sample("cut", None, output_token_ids=range(16384), is_truncated=True)
    ended = make_sample("ended", 1.0, output_token_ids=range(4709), extracted={"official": "70"})
    asked = [make_request("cut", finish_reason="length"), make_request("ended")]
    found = compare_texts(asked, [cut, ended], asked, [cut, ended], "official")
    table = text_table(found, "main", "this branch")
    assert table is not None
    assert table.header[3:] == ("main", "this branch", "Token by token")
    assert [[cell.text for cell in row[3:]] for row in table.rows] == [
        ["16,384 tokens (hit the limit)", "16,384 tokens (hit the limit)", "identical"],
        ["4,709 tokens, answer 70", "4,709 tokens, answer 70", "identical"],
    ]


def test_nothing_to_compare() -> None:
    found = compared([], [])
    assert not found.is_identical
    assert text_sentence(found) == "Texts: **nothing to compare**"
