"""Each scorer reads exactly what its source reads: counts over the 1319 real labels, and the quirks one by one."""

from __future__ import annotations

import time

import pytest

from specbench.evals.answers import SCORERS, score_text

#: How an answer N is written -> how many of the 1319 correct answers count under each scorer.
COUNTS = {
    "#### {n}": {"last_number": 1319, "official": 1319, "boxed": 0, "robust": 1319},
    "{n}": {"last_number": 1319, "official": 0, "boxed": 0, "robust": 1319},
    "The answer is {n}.": {"last_number": 1319, "official": 0, "boxed": 0, "robust": 1319},
    "\\boxed{{{n}}}": {"last_number": 1319, "official": 0, "boxed": 1319, "robust": 1319},
    "**${n}**": {"last_number": 1319, "official": 0, "boxed": 0, "robust": 1319},
    "#### ${n}": {"last_number": 1319, "official": 0, "boxed": 0, "robust": 1319},
    "####{n}": {"last_number": 1319, "official": 0, "boxed": 0, "robust": 1319},
    "#### {n}.": {"last_number": 1319, "official": 0, "boxed": 0, "robust": 1319},
    "${n}.00": {"last_number": 0, "official": 0, "boxed": 0, "robust": 1319},
    "{n}.0": {"last_number": 0, "official": 0, "boxed": 0, "robust": 1319},
    "#### {n}\nThis took 1 step.": {"last_number": 15, "official": 1319, "boxed": 0, "robust": 1319},
    "It is {n}...": {"last_number": 1319, "official": 0, "boxed": 0, "robust": 1319},
    "\\boxed{{\\${n}}}": {"last_number": 1319, "official": 0, "boxed": 1319, "robust": 1319},
    "It took 2 steps: $x = {n}$, \\boxed{{{n} \\text{{ eggs}}}} in 3 days": {
        "last_number": 29,
        "official": 0,
        "boxed": 1319,
        "robust": 1319,
    },
}


@pytest.mark.parametrize("form", COUNTS)
@pytest.mark.parametrize("scorer", SCORERS)
def test_real_labels_count_by_how_they_are_written(form: str, scorer: str, gsm8k_labels: list[str]) -> None:
    assert len(gsm8k_labels) == 1319
    right = sum(score_text(scorer, form.format(n=label), label)[1] or 0 for label in gsm8k_labels)
    assert right == COUNTS[form][scorer]


def test_real_labels_without_their_sign(gsm8k_labels: list[str]) -> None:
    """Only the scorers without a sign take 10 for -10."""
    right = {
        scorer: sum(score_text(scorer, f"#### {label.lstrip('-')}", label)[1] or 0 for label in gsm8k_labels)
        for scorer in SCORERS
    }
    assert right == {"official": 1317, "last_number": 1319, "boxed": 0, "robust": 1317}


@pytest.mark.parametrize(
    ("scorer", "text", "extracted"),
    [
        ("official", "#### 5 no, #### 6", "5"),
        ("official", "#### 2,880,000", "2880000"),
        ("official", "#### -10", "-10"),
        ("official", "#### 18.", "18."),
        ("official", "eighteen", None),
        ("last_number", "-10", "10"),
        ("last_number", "18.00", "0"),
        ("last_number", "018", None),
        ("last_number", "1,000 and 2,0", "20"),
        ("last_number", "\u0661\u0662", None),
        ("last_number", "none", None),
        ("last_number", "9" * 5000, None),
        ("boxed", "\\boxed{5} then \\boxed{6}", "6"),
        ("boxed", "\\boxed{\\text{about } {7}}", "7"),
        ("boxed", "\\boxed{2{,}880{,}000}", "2880000"),
        ("boxed", "\\boxed{x = 3 + 4 = 7}", "7"),
        ("boxed", "\\boxed{\\frac{1}{2}}", None),
        ("boxed", "\\boxed{5} and \\boxed{6", "5"),
        ("boxed", "\\boxed{}", None),
        ("boxed", "\\boxed {-4\\}}", "-4"),
        ("boxed", "the answer is 5", None),
        ("robust", "\\boxed{5} #### 6, 7", "5"),
        ("robust", "\\boxed{five} #### 6, 7", "6"),
        ("robust", "#### 5\n#### 6 of 7\n8", "6"),
        ("robust", "It is 5.\n####", "5"),
        ("robust", "It is 5.\n#### five\n6", "6"),
        ("robust", "16 - 3 = 13", "13"),
        ("robust", "16-3", "3"),
        ("robust", "about 10-12", "12"),
        ("robust", "loses -10", "-10"),
        ("robust", "loses \u221210", "-10"),
        ("robust", "loses -$10.50", "-10.50"),
        ("robust", "loses $-1,000", "-1000"),
        ("robust", "- 10 apples", "10"),
        ("robust", "(-3)", "-3"),
        ("robust", "gets .5", "0.5"),
        ("robust", "2, 3 and 4,500", "4500"),
        ("robust", "50%", "50"),
        ("robust", "", None),
    ],
)
def test_extraction(scorer: str, text: str, extracted: str | None) -> None:
    assert SCORERS[scorer].extract(text) == extracted


@pytest.mark.parametrize(
    ("scorer", "text", "reference", "score"),
    [
        ("official", "#### 29.00", "29", 0.0),
        ("robust", "#### 29.00", "29", 1.0),
        ("boxed", "\\boxed{029}", "29", 1.0),
        ("robust", "#### 10", "-10", 0.0),
        ("last_number", "10", "-10", 1.0),
        ("robust", "no idea", "29", 0.0),
        ("robust", "29", None, None),
    ],
)
def test_comparison(scorer: str, text: str, reference: str | None, score: float | None) -> None:
    assert score_text(scorer, text, reference)[1] == score


@pytest.mark.parametrize("scorer", SCORERS)
@pytest.mark.parametrize("unit", ["\\boxed{", "1,", "{", "#### ", "9", "-$", "}"])
def test_a_text_that_repeats_itself_is_read_in_linear_time(scorer: str, unit: str) -> None:
    start = time.perf_counter()
    SCORERS[scorer].extract(unit * 50_000)
    assert time.perf_counter() - start < 2
