"""Made-up problems: the arithmetic is right, the same seed gives the same rows, held-out rows are held out."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from tools.nano.problems import (
    HELD_OUT_SEED,
    TRAIN_SEED,
    equations,
    final_number,
    held_out_problems,
    make_problem,
    make_problems,
)
from tools.nano.stories import PLOT_WEIGHTS

ASSETS = Path(__file__).parents[2] / "specbench" / "assets" / "nano_problems"
OPERATIONS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: Fraction(a, b),
}


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (ASSETS / name).read_text(encoding="utf-8").splitlines()]


def value(expression: str) -> Fraction:
    """The two-operand expression's value."""
    left, operation, right = expression.split()
    return OPERATIONS[operation](int(left), int(right))


def assert_sound(problem: dict) -> None:
    lines = problem["answer"].split("\n")
    steps = equations(problem["answer"])
    assert len(steps) >= 2
    for expression, result in steps:
        assert value(expression) == result >= 0, problem
    assert lines[-1] == f"#### {steps[-1][1]}"
    assert final_number(problem["answer"]) == steps[-1][1]
    assert problem["question"].endswith("?")


def test_every_equation_is_right_and_the_last_is_the_answer():
    for problem in make_problems(TRAIN_SEED, 3000):
        assert_sound(problem)


def test_the_check_of_equations_notices_a_wrong_one():
    problem = make_problem(TRAIN_SEED, 0)
    expression, result = equations(problem["answer"])[0]
    wrong = problem["answer"].replace(f"{expression} = {result}", f"{expression} = {result + 1}")
    with pytest.raises(AssertionError):
        assert_sound({**problem, "answer": wrong})


def test_the_first_step_uses_numbers_of_the_question():
    words = {"half": "2", "third": "3", "quarter": "4", "fifth": "5", "twice": "2", "three times": "3",
             "four times": "4", "five times": "5", "percent": "10 5 4 2"}  # fmt: skip
    for problem in make_problems(TRAIN_SEED, 500):
        question = problem["question"]
        spelled = [number for word, digits in words.items() if word in question for number in digits.split()]
        for number in equations(problem["answer"])[0][0].split()[::2]:
            assert number in question or number in spelled, problem


def test_a_seed_gives_the_same_problems_alone_and_in_a_range():
    together = list(make_problems(7, 20))
    assert together == list(make_problems(7, 20))
    assert together[13] == make_problem(7, 13)
    assert together != list(make_problems(8, 20))


def test_all_plots_and_operations_occur():
    text = " ".join(problem["answer"] for problem in make_problems(TRAIN_SEED, 400))
    assert all(f" {operation} " in text for operation in OPERATIONS)
    assert len(PLOT_WEIGHTS) >= 12


@pytest.mark.parametrize(("text", "number"), [
    ("so\n#### 12", 12), ("#### $1,250<|end_message|>", 1250), ("#### -3.", -3), ("####7 then #### 8", 8), ("12", None),
])  # fmt: skip
def test_the_final_number_is_found_in_any_format(text, number):
    assert final_number(text) == number


def test_packaged_rows_are_sound_and_held_out():
    test_rows, train_rows = read("test.jsonl"), read("train.jsonl")
    assert len(test_rows) >= 320 and len(train_rows) == 32
    for row in test_rows + train_rows:
        assert set(row) == {"question", "answer"}
        assert_sound(row)
    questions = {row["question"] for row in test_rows}
    assert len(questions) == len(test_rows)
    # All training questions take a minute to make; the first ones stand for them here.
    assert not questions & {problem["question"] for problem in make_problems(TRAIN_SEED, 20_000)}
    assert train_rows == list(make_problems(TRAIN_SEED, 32))


def test_held_out_problems_skip_training_questions(monkeypatch):
    first = make_problem(HELD_OUT_SEED, 0)
    monkeypatch.setattr("tools.nano.problems.make_problems", lambda seed, count, start=0: iter([first]))
    kept = held_out_problems(2, num_training=1)
    assert kept == [make_problem(HELD_OUT_SEED, 1), make_problem(HELD_OUT_SEED, 2)]
