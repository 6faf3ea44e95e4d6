"""The same-token check in words and tables.

Belongs here: sentences and tables of same_token.py. Does not belong here: any figure.
"""

from __future__ import annotations

from specbench.reports.number_format import count, p_value, percent_of, points, points_range
from specbench.reports.same_token import SameToken
from specbench.reports.statistics import CONFIDENCE
from specbench.reports.table import Cell, ReportTable, Section, text_cell

TITLE = "Position 0 at the same tokens"


def same_token_section(check: SameToken) -> Section:
    """The sentence and the counts; the sentence alone where nothing was compared."""
    sentence = same_token_sentence(check)
    if not check.compared:
        return Section(TITLE, (sentence,))
    tables = [_outcome_table(check)] if not check.flips else [_outcome_table(check), _flip_table(check)]
    return Section(TITLE, (sentence, *tables))


def same_token_sentence(check: SameToken) -> str:
    """What was found, in plain words."""
    if not check.num_texts:
        return "No text of both runs to compare at the same tokens" + _left_out(check) + "."
    if not check.compared:
        return f"In {_texts(check)} no step of both runs begins at the same token with drafts, so nothing is compared."
    begin = f"In {_texts(check)} both runs begin a step at {count(check.compared)} same tokens"
    if check.agrees_at_all:
        return f"{begin}: their first drafts agree at all of them, right or wrong alike."
    flips = check.only_base + check.only_new
    alone = f"{count(check.only_base)} in {check.base_label} alone, {count(check.only_new)} in {check.new_label} alone"
    agreed = percent_of(check.compared - flips, check.compared)
    return f"{begin}: their first drafts agree at {agreed} and are right at {alone}. {_verdict(check)}"


def _verdict(check: SameToken) -> str:
    difference = check.difference
    size = points(difference.difference)
    if difference.interval is not None and not difference.is_alike:
        size += f", 95% interval {points_range(difference.interval)}"
    size += f"; exact McNemar p {p_value(check.p_value)}"
    is_seen = check.p_value is not None and check.p_value < 1 - CONFIDENCE and difference.is_visible is not False
    if not is_seen:
        return f"They differ at single tokens, but about as often either way: no difference visible ({size})."
    right = "more" if check.only_new > check.only_base else "less"
    return f"At the same tokens {check.new_label}'s first draft is right {right} often ({size})."


def _texts(check: SameToken) -> str:
    if check.num_identical_texts == check.num_texts:
        said = "identical"
    else:
        said = f"{count(check.num_identical_texts)} identical, the others up to their first difference"
    return f"{count(check.num_texts)} texts of both runs ({said}{_left_out(check)})"


def _left_out(check: SameToken) -> str:
    if not check.num_left_out:
        return ""
    return f"; {count(check.num_left_out)} left out, for another prompt, other earlier turns or no common token"


def _outcome_table(check: SameToken) -> ReportTable:
    rows = [
        ("right in both", check.both),
        (f"right in {check.base_label} alone", check.only_base),
        (f"right in {check.new_label} alone", check.only_new),
        ("wrong in both", check.neither),
        ("all where both begin a step", check.compared),
    ]
    return ReportTable(
        name="same_token_outcomes",
        title="First drafts at the same tokens",
        header=("First draft", "Tokens", "Share"),
        rows=tuple((text_cell(label), Cell(number, count(number)), _share(number, check)) for label, number in rows),
        notes=(
            f"Steps with drafts that begin in the common text: {count(check.base_drafts)} in {check.base_label}, "
            f"{count(check.new_drafts)} in {check.new_label}; common tokens: {count(check.num_common_tokens)}. McNemar "
            "takes tokens for independent; the interval draws samples.",
        ),
    )


def _share(number: int, check: SameToken) -> Cell:
    return Cell(number / check.compared, f"{100 * number / check.compared:.2f}%")


def _flip_table(check: SameToken) -> ReportTable:
    labels = {False: check.base_label, True: check.new_label}
    rest = check.only_base + check.only_new - len(check.flips)
    return ReportTable(
        name="same_token_differences",
        title="Tokens that one run alone had right",
        header=("Sample", "Turn", "Repeat", "Output index", "Right in"),
        rows=tuple(
            (
                text_cell(flip.sample_id),
                *(Cell(number, count(number)) for number in (flip.turn, flip.repeat, flip.output_index)),
                text_cell(labels[flip.is_only_new]),
            )
            for flip in check.flips
        ),
        notes=(f"{count(rest)} more are not listed.",) if rest else (),
    )
