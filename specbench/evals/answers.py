"""Scorers for numeric answers: what is read off a text, and when it counts as right.

Belongs here: extraction and comparison, one scorer an entry of SCORERS. Does not belong here: which text is judged
(task.py hands in the answer channel).

A scorer is part of every number that it yields. The same correct answers score anything from 0 to 100 % by how they
are written:

    official      the first "#### N", commas dropped, compared as text (OpenAI's grade-school-math)
    last_number   commas dropped, the last run of digits (vLLM's and SGLang's gsm8k scripts, quirks included: no sign,
                  no point, a leading zero is invalid; the reference is read in the same way, so -10 counts as 10)
    boxed         the last \\boxed{...}, which must hold one number (behind its last "=", if it has one), compared as a
                  number; no such box is an invalid answer
    robust        the last \\boxed{...}, else the first number on the line of the last ####, else the last number;
                  compared as a decimal number, sign kept, "$", thousands commas and units read over
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

_OFFICIAL = re.compile(r"#### (\-?[0-9\.\,]+)")
_DIGITS = re.compile(r"\d+")
_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")
_NUMBER = re.compile(
    r"""
    (?: (?<![\w.,)}\]]) (?P<sign>[-+]) )?   # a sign, unless it stands behind an operand
    (?: \$ \s? (?P<inner_sign>-)? )?
    (?P<digits> [0-9]{1,3}(?:,[0-9]{3})+(?![0-9]) | [0-9]+ )
    (?P<fraction> \.[0-9]+ )?
    | (?<![\w.]) (?P<bare_sign>-)? (?P<bare_fraction> \.[0-9]+ )
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Scorer:
    """One way to judge: `extract` reads an answer off a text, or None, which is an invalid answer."""

    extract: Callable[[str], str | None]
    #: Reads the reference, such as "18", "-3" or "2,880,000".
    extract_reference: Callable[[str], str | None]
    equals: Callable[[str, str], bool]


def score_text(scorer: str, text: str, reference: str | None) -> tuple[str | None, float | None]:
    """What `scorer` reads off `text`, and 1.0 or 0.0 for it; no score without a reference."""
    chosen = SCORERS[scorer]
    extracted = chosen.extract(text)
    if reference is None:
        return extracted, None
    expected = chosen.extract_reference(reference)
    is_right = extracted is not None and expected is not None and chosen.equals(extracted, expected)
    return extracted, float(is_right)


def extract_official(text: str) -> str | None:
    found = _OFFICIAL.search(text)
    return found[1].strip().replace(",", "") if found else None


def extract_last_number(text: str) -> str | None:
    runs = _DIGITS.findall(text.replace(",", ""))
    if not runs:
        return None
    try:
        return str(ast.literal_eval(runs[-1]))
    except SyntaxError:  # a leading zero, and digits that are not 0 to 9
        return None


def extract_boxed(text: str) -> str | None:
    box = _last_box(text)
    return None if box is None else _only_number(box)


def extract_robust(text: str) -> str | None:
    box = _last_box(text)
    if box is not None and (number := _only_number(box)) is not None:
        return number
    _, marker, tail = text.rpartition("####")
    if marker and (number := _first_number(tail)) is not None:
        return number
    return _last_number(text)


def _last_box(text: str) -> str | None:
    """What stands in the closed \\boxed{...} that opens last, inner braces balanced. One pass: boxes may repeat."""
    open_braces: list[re.Match[str]] = []
    start, end = -1, -1
    for found in _BRACES.finditer(text):
        if found[0] == "}" and open_braces:
            opening = open_braces.pop()
            if len(opening[0]) > 1 and opening.end() > start:
                start, end = opening.end(), found.start()
        elif found[0][-1] == "{" and found[0] != "\\{":
            open_braces.append(found)
    return None if start < 0 else text[start:end]


def _only_number(box: str) -> str | None:
    """The number in a box; None where there is none or a choice, as in a fraction."""
    numbers = _numbers(box.rpartition("=")[2])
    return numbers[0] if len(numbers) == 1 else None


def _first_number(text: str) -> str | None:
    """The first number on the first line."""
    numbers = _numbers(text.partition("\n")[0])
    return numbers[0] if numbers else None


def _last_number(text: str) -> str | None:
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[str]:
    """Every number in `text` as a plain decimal."""
    plain = text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$").replace("\\,", "")
    return [_decimal_text(found) for found in _NUMBER.finditer(plain)]


def _decimal_text(found: re.Match[str]) -> str:
    is_negative = "-" in (found["sign"], found["inner_sign"], found["bare_sign"])
    fraction = found["fraction"] or found["bare_fraction"] or ""
    return ("-" if is_negative else "") + (found["digits"] or "0").replace(",", "") + fraction


def _same_text(extracted: str, expected: str) -> bool:
    return extracted == expected


def _same_number(extracted: str, expected: str) -> bool:
    return Decimal(extracted) == Decimal(expected)


SCORERS: dict[str, Scorer] = {
    "official": Scorer(extract_official, lambda reference: extract_official(f"#### {reference}"), _same_text),
    "last_number": Scorer(extract_last_number, extract_last_number, _same_text),
    "boxed": Scorer(extract_boxed, _last_number, _same_number),
    "robust": Scorer(extract_robust, _last_number, _same_number),
}
