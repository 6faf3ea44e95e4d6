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
    return compare_texts(requests(len(base)), base, requests(len(new), *failed), new)


def test_identical_whatever_holds_the_tokens() -> None:
    found = compared(samples([1, 2], [3]), samples(array("i", [1, 2]), array("i", [3])))
    assert (found.compared, found.identical, found.differences) == (2, 2, ())
    assert found.is_identical
    assert text_sentence(found) == "Texts: **identical**, token by token, in all 2 outputs compared"
    assert text_table(found, "new") is None


@pytest.mark.parametrize(
    ("base", "new", "at"),
    [([1, 2, 3], [1, 5, 3], 1), ([1, 2, 3], [1, 2], 2), ([], [4], 0), ([1, 2], [1, 2, 3, 4], 2)],
)
def test_the_first_difference(base: list[int], new: list[int], at: int) -> None:
    found = compared(samples(base, [9], text=""), samples(new, [9], text=""))
    (difference,) = found.differences
    assert (difference.first_difference_at, difference.base_length, difference.new_length) == (at, len(base), len(new))
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
    assert found.differences[0].first_difference_at == 2
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
    assert compare_texts(asked, base, asked, list(reversed(base))).is_identical


def test_only_the_first_few_are_listed() -> None:
    found = compared(samples(*([index] for index in range(12))), samples(*([99] for _ in range(12))))
    table = text_table(found, "new")
    assert table is not None
    assert len(table.rows) == 10 and table.notes == ("2 more are in the JSON form of this comparison.",)


def test_nothing_to_compare() -> None:
    found = compared([], [])
    assert not found.is_identical
    assert text_sentence(found) == "Texts: **nothing to compare**"
