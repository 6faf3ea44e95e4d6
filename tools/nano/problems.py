"""Made-up grade-school word problems in GSM8K's schema, the same for the same seed.

    python -m tools.nano.problems --seed 1 --count 8        # prints JSON lines

Plots are in `stories.py`, wording in `phrasing.py`. Everything is drawn from one `random.Random` a problem, seeded by
(seed, index), so that any range of problems can be made on its own.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TypedDict

from tools.nano.phrasing import scene, solution
from tools.nano.stories import PLOT_WEIGHTS

ANSWER_MARK = "####"
TRAIN_SEED = 1
HELD_OUT_SEED = 2
# Problems 0 .. this of the training stream are what the packaged checkpoint was trained on.
NUM_TRAINING_PROBLEMS = 700_000
NUM_HELD_OUT_PROBLEMS = 320
NUM_EXAMPLE_PROBLEMS = 32

_PLOTS = list(PLOT_WEIGHTS)
_WEIGHTS = list(PLOT_WEIGHTS.values())
_EQUATION = re.compile(r"(\d+(?: [-+*/] \d+)+) = (\d+)")


class Problem(TypedDict):
    """One row in GSM8K's schema; `answer` is one sentence a line and ends with `#### N`."""

    question: str
    answer: str


def make_problem(seed: int, index: int) -> Problem:
    """Problem number `index` of the stream `seed`."""
    rng = Random(f"{seed}/{index}")
    story = rng.choices(_PLOTS, _WEIGHTS)[0](rng)
    told = list(story.told)
    if rng.random() < 0.5:
        told.insert(rng.choice([0, 0, len(told)]), scene(rng, story.hero))
    lines = solution(rng, story.hero, story.steps)
    lines.append(f"{ANSWER_MARK} {story.steps[-1].value}")
    return Problem(question=" ".join([*told, story.asked]), answer="\n".join(lines))


def make_problems(seed: int, count: int, start: int = 0) -> Iterator[Problem]:
    """Problems `start .. start + count` of the stream `seed`."""
    return (make_problem(seed, index) for index in range(start, start + count))


def final_number(text: str) -> int | None:
    """The whole number after the last answer mark, thousands commas dropped; None where there is none."""
    found = re.findall(rf"{ANSWER_MARK}\s*\$?(-?[\d,]*\d)", text)
    return int(found[-1].replace(",", "")) if found else None


def equations(answer: str) -> list[tuple[str, int]]:
    """Each `expression = value` written in an answer, in order."""
    return [(expression, int(value)) for expression, value in _EQUATION.findall(answer)]


def held_out_problems(count: int, num_training: int) -> list[Problem]:
    """Problems of the held-out stream whose question is not among the first `num_training` training questions."""
    training = {problem["question"] for problem in make_problems(TRAIN_SEED, num_training)}
    kept: list[Problem] = []
    index = 0
    while len(kept) < count:
        problem = make_problem(HELD_OUT_SEED, index)
        index += 1
        if problem["question"] not in training:
            kept.append(problem)
    return kept


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(problem) + "\n" for problem in problems), encoding="utf-8")


def main() -> None:
    """Prints problems, or writes the packaged files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seed", type=int, default=TRAIN_SEED)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--write", type=Path, help="folder for test.jsonl (held out) and train.jsonl (few-shot rows)")
    args = parser.parse_args()
    if args.write is None:
        for problem in make_problems(args.seed, args.count):
            print(json.dumps(problem))
        return
    write_jsonl(args.write / "test.jsonl", held_out_problems(NUM_HELD_OUT_PROBLEMS, NUM_TRAINING_PROBLEMS))
    write_jsonl(args.write / "train.jsonl", list(make_problems(TRAIN_SEED, NUM_EXAMPLE_PROBLEMS)))


if __name__ == "__main__":
    main()
