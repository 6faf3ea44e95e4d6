"""The decomposition of position 0 in words and tables.

Belongs here: sentences and tables of decomposition.py. Does not belong here: any figure.

No sentence says that a drafter is better: within matched history text is still easier here than there.
"""

from __future__ import annotations

from specbench.reports.cells import points_range_cell
from specbench.reports.decomposition import FULLY_ACCEPTED, MIN_CLASS_DRAFTS, Decomposition, HistoryClass, Term
from specbench.reports.number_format import NOT_MEASURED, count, p_value, percent, points, points_range
from specbench.reports.statistics import MIN_SAMPLES, VISIBLE_STANDARD_ERRORS, Interval
from specbench.reports.table import Cell, ReportTable, Section, text_cell

TITLE = "Position 0, taken apart"
_ALIKE = "the same in every sample"
_SEEN = {True: "difference visible", False: "no difference visible", None: "too few samples"}


def decomposition_section(decomposition: Decomposition) -> Section:
    """The sentence, the classes and the terms; the sentence alone where the runs have no class in common."""
    sentence = decomposition_sentence(decomposition)
    if decomposition.mix is None:
        return Section(TITLE, (sentence,))
    return Section(TITLE, (sentence, _class_table(decomposition), _term_table(decomposition)))


def decomposition_sentence(decomposition: Decomposition) -> str:
    """What was found, in plain words."""
    total, base, new = decomposition.total, decomposition.base_label, decomposition.new_label
    if not total.is_matched:
        lacking = " and ".join(
            label for label, drafts in ((base, total.base_drafts), (new, total.new_drafts)) if not drafts
        )
        return f"Nothing to take apart: {lacking} has no draft whose request's previous step drafted too."
    if _is_alike(decomposition):
        return (
            f"Position 0 is accepted at {percent(total.difference.new)} in {base} and in {new}, over drafts with a "
            "previous step: the same in every sample, and behind the same steps."
        )
    shares = f"{percent(total.difference.new)} in {new} against {percent(total.difference.base)} in {base}"
    head = f"Position 0 is accepted at {shares} ({points(total.difference.difference)}, {_said(total)})"
    parts = [f"{head}, over drafts with a previous step.", _mix_sentence(decomposition)]
    parts += [_unmatched_sentence(decomposition), _rate_sentence(decomposition), *_class_sentences(decomposition)]
    return " ".join(part for part in parts if part)


def _is_alike(decomposition: Decomposition) -> bool:
    """Whether no draw of samples shows any difference, as where a run is compared with itself."""
    parts = (decomposition.total.difference, decomposition.mix, decomposition.rate)
    return all(part is not None and part.interval == (0, 0) for part in parts)


def _said(total: HistoryClass) -> str:
    if total.difference.is_alike:
        return _ALIKE
    if total.is_visible is None:
        return f"no interval from under {MIN_SAMPLES} samples"
    if not total.is_visible:
        return f"no difference visible, 95% interval {points_range(total.difference.interval)}"
    return f"95% interval {points_range(total.difference.interval)}"


def _mix_sentence(decomposition: Decomposition) -> str:
    mix, predicted = decomposition.mix, decomposition.predicted
    if mix is None or predicted is None:
        return "The runs have no class of history in common, so nothing can be taken apart."
    base, new = decomposition.base_label, decomposition.new_label
    if sum(one.is_matched for one in decomposition.classes) == 1:
        return "All matched drafts are of one class of history, so their mix explains nothing."
    says = f"{new}'s mix of histories, at {base}'s own rates, predicts {percent(predicted.value)}"
    effect = f"{points(mix.value)} from the mix alone{_bracketed(mix.interval)}"
    follow = "" if decomposition.is_same_k else f"{_rejected_share(decomposition)}: "
    return f"{follow}{says}, {effect}{'' if mix.is_visible is not False else ', no difference visible'}."


def _rejected_share(decomposition: Decomposition) -> str:
    """How much of position 0 each run measures right behind a rejection."""
    rejected = decomposition.classes[0]
    new_share = rejected.new_drafts / decomposition.total.new_drafts
    base_share = rejected.base_drafts / decomposition.total.base_drafts
    return (
        f"{100 * new_share:.1f}% of {decomposition.new_label}'s drafts follow a rejection, against "
        f"{100 * base_share:.1f}% of {decomposition.base_label}'s"
    )


def _unmatched_sentence(decomposition: Decomposition) -> str:
    unmatched = [one.label for one in decomposition.classes if not one.is_matched]
    if not unmatched or decomposition.unmatched is None:
        return ""
    term = decomposition.unmatched
    return f"Drafts that only one run has ({', '.join(unmatched)}) add {points(term.value)}{_bracketed(term.interval)}."


def _rate_sentence(decomposition: Decomposition) -> str:
    rate = decomposition.rate
    if rate is None:
        return ""
    if rate.is_visible is None:
        return f"Remaining difference within matched history: {points(rate.value)}, without an interval."
    if not rate.standard_error:
        return f"Within matched history there is no difference: {points(rate.value)}, {_ALIKE}."
    if not rate.is_visible:
        smallest = f"{100 * VISIBLE_STANDARD_ERRORS * rate.standard_error:.2f} pts"
        return (
            f"Within matched history no difference is visible: {points(rate.value)}{_bracketed(rate.interval)}; a true "
            f"one of {smallest} would be seen four times in five."
        )
    sentence = f"Remaining difference within matched history: {points(rate.value)}{_bracketed(rate.interval)}."
    return f"{sentence} {_selection(decomposition)}"


def _class_sentences(decomposition: Decomposition) -> list[str]:
    """Each of the two classes on its own, where there are no more."""
    matched = [one for one in decomposition.classes if one.is_matched]
    if decomposition.is_same_k or len(matched) != 2:
        return []
    return [
        f"{one.label.capitalize()}: {percent(one.difference.new)} against {percent(one.difference.base)}, "
        f"{points(one.difference.difference)}: {_SEEN[one.is_visible]}."
        for one in matched
    ]


def _selection(decomposition: Decomposition) -> str:
    if decomposition.is_same_k:
        return "The same history does not make the same text, so this alone does not tell the drafters apart."
    ks = (decomposition.base_num_speculative_tokens, decomposition.new_num_speculative_tokens)
    return (
        f'It still holds selection by difficulty ("{FULLY_ACCEPTED}" is {ks[0]} of {ks[0]} drafts in '
        f"{decomposition.base_label} and {ks[1]} of {ks[1]} in {decomposition.new_label}), so it alone says nothing "
        "about the drafters."
    )


def _bracketed(interval: Interval | None) -> str:
    return "" if interval is None else f" (95% interval {points_range(interval)})"


def _class_table(decomposition: Decomposition) -> ReportTable:
    header = ("Position 0 after a step", f"{decomposition.base_label} drafts", f"{decomposition.base_label} accepted",
              f"{decomposition.new_label} drafts", f"{decomposition.new_label} accepted", "Δ", "95% interval",
              "Smallest visible", "p (Holm)", "Seen")  # fmt: skip
    rows = [_class_row(one, decomposition.total) for one in (*decomposition.classes, decomposition.total)]
    return ReportTable(
        name="position_0_classes",
        title="Classes of history",
        header=header,
        rows=tuple(rows),
        notes=(
            f"In parentheses: the share of the run's drafts. A class of under {MIN_CLASS_DRAFTS} drafts in a run is "
            "merged with its neighbour. Intervals draw samples and are not adjusted; p is of swapping base and new "
            f"within a sample. Smallest visible: {VISIBLE_STANDARD_ERRORS} paired standard errors.",
        ),
    )


def _class_row(one: HistoryClass, total: HistoryClass) -> tuple[Cell, ...]:
    difference = one.difference
    interval, smallest = None if difference.is_alike else difference.interval, difference.smallest_visible
    seen = "in one run only" if not one.is_matched else _ALIKE if difference.is_alike else _SEEN[one.is_visible]
    return (
        text_cell(one.label),
        _drafts_cell(one.base_drafts, total.base_drafts),
        Cell(difference.base, percent(difference.base)),
        _drafts_cell(one.new_drafts, total.new_drafts),
        Cell(difference.new, percent(difference.new)),
        Cell(difference.difference, points(difference.difference)),
        points_range_cell(interval),
        Cell(smallest, NOT_MEASURED if smallest is None else f"{100 * smallest:.2f} pts"),
        Cell(one.p_value, p_value(one.p_value)),
        text_cell(seen),
    )


def _drafts_cell(drafts: int, total: int) -> Cell:
    return Cell(drafts, f"{count(drafts)} ({100 * drafts / total:.1f}%)")


def _term_table(decomposition: Decomposition) -> ReportTable:
    rows = [
        ("Mix: what the drafts follow", decomposition.mix, decomposition.mix_at_new_rates),
        ("Rate: remaining difference within matched history", decomposition.rate, decomposition.rate_at_base_mix),
    ]
    if not all(one.is_matched for one in decomposition.classes):
        label = "Unmatched: classes that only one run has"
        rows.append((label, decomposition.unmatched, decomposition.unmatched))
    return ReportTable(
        name="position_0_terms",
        title="Terms",
        header=("Term", "Mix first", "95% interval", "Rate first", "95% interval"),
        rows=tuple((text_cell(label), *_term_cells(first), *_term_cells(second)) for label, first, second in rows),
        notes=(
            "Mix first: base's rates at new's mix less at base's, then new's rates less base's at new's mix. Rate "
            "first: the other way round. The terms of an order add up to the difference.",
        ),
    )


def _term_cells(term: Term | None) -> tuple[Cell, Cell]:
    if term is None:
        return text_cell(None), text_cell(None)
    interval = None if term.interval == (0, 0) else term.interval
    return Cell(term.value, points(term.value)), points_range_cell(interval)
