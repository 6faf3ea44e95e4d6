"""Questions of one or more turns in FastChat's layout, which MT-Bench and Spec-Bench share.

Belongs here: reading and checking rows {question_id, category, turns, reference?}, and the samples that they become.
Does not belong here: where the rows come from (mt_bench.py, spec_bench.py), replaying answers (submission.py).

A later turn is asked with the model's own answers to the earlier ones in front of it. Nothing is scored: the answers
are judged by people or models, and the references are kept beside the outputs for them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specbench.errors import UserError, near_name
from specbench.evals.rows import Row
from specbench.evals.task import Sample


@dataclass(frozen=True, slots=True)
class Question:
    """One row."""

    question_id: str
    category: str
    turns: tuple[str, ...]
    #: One for each turn; None where there is none.
    references: tuple[str | None, ...]


def read_questions(rows: Iterable[Row]) -> tuple[Question, ...]:
    """Every row, checked; ids must differ."""
    first: dict[str, str] = {}
    questions = []
    for row in rows:
        question = _question(row)
        if question.question_id in first:
            raise UserError(f"{row.where}: the id {question.question_id!r} is taken by {first[question.question_id]}")
        first[question.question_id] = row.where
        questions.append(question)
    return tuple(questions)


def chosen_questions(
    questions: Sequence[Question], categories: Sequence[str] | None, num_samples: int | None
) -> list[Question]:
    """Those of `categories` (None: all), the categories in turn, so that the first ones are of all kinds."""
    known = dict.fromkeys(question.category for question in questions)
    for category in categories or ():
        if category not in known:
            raise UserError(f"eval.categories: unknown category {category!r}; {near_name(category, known)}")
    seen: Counter[str] = Counter()
    ranked = []
    for question in questions:
        if categories is None or question.category in categories:
            ranked.append((seen[question.category], list(known).index(question.category), question))
            seen[question.category] += 1
    return [question for *_, question in sorted(ranked, key=lambda entry: entry[:2])][:num_samples]


def question_samples(question: Question, prefix: str, max_output_tokens: int) -> list[Sample]:
    """A sample for each turn."""
    return [
        Sample(
            sample_id=f"{prefix}-{question.question_id}",
            max_output_tokens=max_output_tokens,
            messages=({"role": "user", "content": text},),
            turn=turn,
            reference=reference,
            category=question.category,
        )
        for turn, (text, reference) in enumerate(zip(question.turns, question.references, strict=True))
    ]


def _question(row: Row) -> Question:
    value = row.value.get("question_id")
    if isinstance(value, bool) or not isinstance(value, int | str) or str(value).strip() == "":
        raise UserError(f'{row.where}: "question_id" must be a number or a text')
    turns = row.value.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str) and one.strip() for one in turns):
        raise UserError(f'{row.where}: "turns" must be a list of at least one text that is not blank')
    return Question(
        str(value), row.text("category"), tuple(row.checked(turn) for turn in turns), _references(row, len(turns))
    )


def _references(row: Row, num_turns: int) -> tuple[str | None, ...]:
    """A text for each turn; a list of right answers is kept as JSON; missing ones are None."""
    given = row.value.get("reference") or []
    if not isinstance(given, list):
        given = [given]
    texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in given[:num_turns]]
    padded = [text or None for text in texts] + [None] * (num_turns - len(texts))
    return tuple(None if text is None else row.checked(text) for text in padded)
