"""The scorers by name: what each reads off a text, and what that scores.

Belongs here: the table, and judging one text. Does not belong here: how a number (answers.py) or a choice (choices.py)
is read. A scorer is of one of two kinds: numbers need a reference only, choices need what there was to choose from too.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.evals.answers import SCORERS as NUMBER_SCORERS
from specbench.evals.answers import score_text as score_number
from specbench.evals.choices import CHOICE_SCORERS

#: Every name that eval.scorer may take.
SCORER_NAMES = (*NUMBER_SCORERS, *CHOICE_SCORERS)


def score_text(
    scorer: str, text: str, reference: str | None, choices: Sequence[str] = ()
) -> tuple[str | None, float | None]:
    """What `scorer` reads off `text`, and 1.0 or 0.0 for it; no score without a reference.

    `choices` are those of a question with choices, which the scorers of choices need.
    """
    if scorer in NUMBER_SCORERS:
        return score_number(scorer, text, reference)
    judge = CHOICE_SCORERS[scorer]
    extracted, is_right = judge(text, reference, choices)
    return extracted, None if reference is None else float(is_right)


def scorers_for(*, has_choices: bool) -> tuple[str, ...]:
    """The scorers of questions with or without choices."""
    return tuple(CHOICE_SCORERS if has_choices else NUMBER_SCORERS)
