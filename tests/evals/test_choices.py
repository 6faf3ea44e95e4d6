"""Scorers of questions with choices: the counts that MMAU's own script gives over its real questions, and what a text
settles on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.evals.choices import LETTERS, choice_parse, official_string_match

Row = dict

CHOICES = ["Man", "Woman", "Child", "Robot"]


@pytest.fixture(scope="module")
def rows(mmau_file: Path) -> list[Row]:
    return json.loads(mmau_file.read_text(encoding="utf-8"))


def letter(row: Row) -> str:
    return LETTERS[row["choices"].index(row["answer"])]


#: How a right answer is written -> how often it is right by the official script, and by the parser.
WAYS: dict[str, tuple[Callable[[Row], str], int, int]] = {
    "the answer alone": (lambda row: row["answer"], 1000, 1000),
    "(A) answer": (lambda row: f"({letter(row)}) {row['answer']}", 967, 1000),
    "A. answer": (lambda row: f"{letter(row)}. {row['answer']}", 967, 1000),
    "a sentence": (lambda row: f"The answer is {row['answer']}.", 907, 1000),
    "without punctuation": (lambda row: re.sub(r"[^\w\s]", "", row["answer"]), 864, 1000),
    # In one row a letter alone is another choice ("C" is a chord there); in another the choices are the letters.
    "a letter": (letter, 2, 998),
    "all choices": (lambda row: ", ".join(row["choices"]), 1, 0),
    "nothing": (lambda row: " \n", 0, 0),
    "thoughts about all, then the answer": (
        lambda row: f"It may be {' or '.join(row['choices'])}. <answer>{row['answer']}</answer>",
        1,
        1000,
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_real_questions(rows: list[Row], way: str) -> None:
    write, official, parsed = WAYS[way]
    assert count_right(official_string_match, rows, write) == official
    assert count_right(choice_parse, rows, write) == parsed


def count_right(judge: Callable, rows: list[Row], write: Callable[[Row], str]) -> int:
    return sum(judge(write(row), row["answer"], row["choices"])[1] for row in rows)


def test_wrong_choices_of_real_questions(rows: list[Row]) -> None:
    """As a set of words a wrong choice can be the right one ("first: neutral, second: frustration")."""
    pairs = [(row, wrong) for row in rows for wrong in dict.fromkeys(row["choices"]) if wrong != row["answer"]]
    assert sum(official_string_match(wrong, row["answer"], row["choices"])[1] for row, wrong in pairs) == 12
    assert not any(choice_parse(wrong, row["answer"], row["choices"])[1] for row, wrong in pairs)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("Woman", "Woman"),
        ("A woman is speaking.", "Woman"),
        ("B", "Woman"),
        ("**B**", "Woman"),
        ("b)", "Woman"),
        ("Answer: (B)", "Woman"),
        ("I think it is option C", "Child"),
        ("A. Woman", "Woman"),
        ("(B) Woman, not the Man", "Woman"),
        ("It could be Man (A) or Woman (B). Final answer: B", "Woman"),
        ("The man says he is a woman. The correct answer is: Robot.", "Robot"),
        ("\\boxed{Child}", "Child"),
        ("man or woman", None),
        ("option C or option D", None),
        ("A, B, C and D", None),
        ("none of them", None),
        ("E", None),
        ("", None),
    ],
)
def test_what_a_text_settles_on(text: str, chosen: str | None) -> None:
    assert choice_parse(text, "Woman", CHOICES) == (chosen, chosen == "Woman")


def test_a_choice_inside_a_longer_one_is_not_named() -> None:
    choices = ["No", "No speech", "Speech"]
    assert choice_parse("There is no speech here.", "No speech", choices) == ("No speech", True)


def test_equal_choices_are_right_by_either_letter() -> None:
    choices = ["Guitar", "Piano", "Guitar"]
    assert choice_parse("(A)", "Guitar", choices) == choice_parse("(C)", "Guitar", choices) == ("Guitar", True)


def test_no_score_without_a_reference() -> None:
    assert choice_parse("Woman", None, CHOICES) == ("Woman", False)
    assert official_string_match("Woman", None, CHOICES) == ("Woman", False)
