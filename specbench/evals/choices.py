"""Scorers for questions with choices: which choice a text names.

Belongs here: reading a choice off a text, and when it counts as right. Does not belong here: what is asked (mmau.py).

    official_string_match   MMAU's own script: right when every word of the answer is in the text, and no word of
                            another choice that the answer does not have too. Words are a set, so order is lost; a text
                            that names all choices is wrong; a letter alone says nothing
    choice_parse            the one choice that the text settles on: in its last \\boxed{...}, <answer> or "answer is",
                            else anywhere; as the choice's text, a letter ("(B)", "B.", "B: ..."), or both. Texts win
                            over letters, which may not have been shown. None or several named is an invalid answer

A scorer is part of every number that it yields: the same answers of one model have scored 55 and 79 % by the two kinds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

#: (text, reference, choices) -> (what was read off it, whether that is right).
ChoiceJudge = Callable[[str, str | None, Sequence[str]], tuple[str | None, bool]]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

_WORD = re.compile(r"\b\w+\b")
#: Where a text says that its answer comes now.
_CUES = re.compile(
    r"\\boxed\s*\{|<answer>|\b(?:answer|choice|option)\b(?:\s+(?:is|would\s+be|should\s+be))?\s*[:=]"
    r"|\b(?:answer|choice|option)\s+(?:is|would\s+be|should\s+be)\b",
    re.IGNORECASE,
)
_LEADING_LETTER = re.compile(
    r"""^\W*? (?: (?i:option|choice|answer) \s+ )?
    (?: [(\[{] \s* ([A-Za-z]) \s* [)\]}] | ([A-Za-z]) (?=\))
      | ([A-Z]) (?= \s* (?: $ | [.:\]}*\n<] | ,(?!\s*[A-Z]\b) ) ) )""",
    re.VERBOSE,
)
_MARKED_LETTER = re.compile(r"\(([A-Z])\)|\b(?i:option|choice|answer)\s+([A-Z])\b")


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def official_string_match(text: str, reference: str | None, choices: Sequence[str]) -> tuple[str | None, bool]:
    """MMAU's evaluation.py. A text without a word is no answer."""
    said = set(_words(text))
    if not said:
        return None, False
    extracted = " ".join(text.split())
    if reference is None:
        return extracted, False
    wanted = set(_words(reference))
    others = [set(_words(choice)) for choice in choices]
    unwanted = {word for words in others if words != wanted for word in words - wanted}
    return extracted, wanted <= said and not said & unwanted


def choice_parse(text: str, reference: str | None, choices: Sequence[str]) -> tuple[str | None, bool]:
    """The choice that a text settles on. Choices are compared as texts: of two equal ones either letter will do."""
    chosen = _settled_choice(text, choices)
    return chosen, chosen is not None and chosen == reference


def _settled_choice(text: str, choices: Sequence[str]) -> str | None:
    cues = list(_CUES.finditer(text))
    parts = [*([text[cues[-1].end() :]] if cues else []), text]
    return next((found for part in parts if (found := _choice_in(part, choices)) is not None), None)


def _choice_in(text: str, choices: Sequence[str]) -> str | None:
    whole = [choice for choice in choices if _letters(choice) == _letters(text) and _letters(text)]
    if whole:
        return _closest(text, whole)
    words = _words(text)
    named = _named(words, choices)
    if len(named) == 1:
        return _closest(text, named[0])
    lettered = _lettered(text, choices)
    if lettered is None:
        return None
    choice, rest = lettered
    # Several are named: only a letter with its own choice behind it settles it ("(B) Woman, not Man").
    return choice if not named or _words(rest)[: len(_words(choice))] == _words(choice) else None


def _letters(text: str) -> str:
    """Letters and digits alone: models drop hyphens and apostrophes."""
    return "".join(character for character in text.lower() if character.isalnum())


def _closest(text: str, equal: Sequence[str]) -> str:
    """Of choices that have the same words, the one that is written as in `text`."""
    return next((choice for choice in equal if choice.strip().lower() in text.lower()), equal[0])


def _named(words: Sequence[str], choices: Sequence[str]) -> list[list[str]]:
    """The choices whose words stand in `words` one behind the other, those of the same words together.

    What stands inside a longer choice that was found there is not a find of its own: "no" in "no speech".
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for choice in choices:
        if key := tuple(_words(choice)):
            groups.setdefault(key, []).append(choice)
    taken = [False] * len(words)
    found = []
    for key in sorted(groups, key=len, reverse=True):
        starts = [
            start
            for start in range(len(words) - len(key) + 1)
            if tuple(words[start : start + len(key)]) == key and not all(taken[start : start + len(key)])
        ]
        for start in starts:
            taken[start : start + len(key)] = [True] * len(key)
        if starts:
            found.append(groups[key])
    return found


def _lettered(text: str, choices: Sequence[str]) -> tuple[str, str] | None:
    """The choice whose letter the text begins with, or that alone is marked as one; and what follows the letter."""
    leading = _LEADING_LETTER.search(text)
    marked = list(_MARKED_LETTER.finditer(text))
    if leading is None and len({hit[1] or hit[2] for hit in marked}) != 1:
        return None
    hit = leading or marked[0]
    index = LETTERS.index(next(letter for letter in hit.groups() if letter).upper())
    return (choices[index], text[hit.end() :]) if index < len(choices) else None


CHOICE_SCORERS: dict[str, ChoiceJudge] = {
    "official_string_match": official_string_match,
    "choice_parse": choice_parse,
}
