"""Why position 0 differs between two runs: because of what its drafts follow, or because of the drafts.

Belongs here: classes of history, the split of the difference into mix, rate and unmatched. Does not belong here:
resampling (statistics.py), text (decomposition_section.py), outcomes one to one (same_token.py).

A draft at position 0 is more often accepted where text is easy, and the previous step tells how easy it is. With k = 1
nearly every token begins a step; with k = 8 only the one behind a chain, and most chains end in a rejection: position 0
is then measured on hard text. So drafts are split by what the request's previous step did. Over classes that both runs
have, with w the share of drafts and r the accepted share (primes are new):

    mix       = sum (w' - w) r       what the other mix of histories makes of base's own rates
    rate      = sum w' (r' - r)      what remains within matched history
    unmatched                        the difference of all drafts, less that of the classes that both runs have

and mix + rate + unmatched is the difference. Shares are those among matched classes, so that a class which one run
lacks moves `unmatched` alone. The other order (mix with r', rate with w) is given too: what differs between the orders
is owed to both. A matched history is not a matched text: with different k "fully accepted" means one easy token here
and eight there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.reports.drafted_run import DraftedRun
from specbench.reports.sample_sums import sample_index
from specbench.reports.statistics import (
    CONFIDENCE,
    Difference,
    Interval,
    Ratios,
    bootstrap,
    holm,
    leaves_out_zero,
    num_counted,
    paired_difference,
    percentile_interval,
    quotient,
    standard_error,
    swap_test,
)
from specbench.reports.step_columns import StepColumns

#: A class with fewer drafts in either run is merged with its neighbour.
MIN_CLASS_DRAFTS = 20
REJECTED, FULLY_ACCEPTED = "rejected", "fully accepted"
#: Level of the marks, after Holm over the classes.
LEVEL = 1 - CONFIDENCE


@dataclass(frozen=True, slots=True)
class Term:
    """A part of the difference, as a fraction (0.01 is one point)."""

    value: float
    interval: Interval | None
    standard_error: float | None

    @property
    def is_visible(self) -> bool | None:
        """Whether the interval leaves out 0; None without an interval."""
        return leaves_out_zero(self.interval)


@dataclass(frozen=True, slots=True)
class HistoryClass:
    """Position-0 drafts that follow the same kind of step."""

    #: What the previous step did.
    label: str
    base_drafts: int
    base_hits: int
    new_drafts: int
    new_hits: int
    #: Of the accepted share.
    difference: Difference
    #: Of the paired swap test, Holm-adjusted over the classes; None for an unmatched class.
    p_value: float | None

    @property
    def is_matched(self) -> bool:
        return self.base_drafts > 0 and self.new_drafts > 0

    @property
    def is_visible(self) -> bool | None:
        """None where there is no interval, for want of samples."""
        if self.p_value is None or self.difference.interval is None:
            return None
        return self.p_value < LEVEL


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The difference at position 0, over the drafts whose request's previous step drafted too."""

    base_label: str
    new_label: str
    base_num_speculative_tokens: int
    new_num_speculative_tokens: int
    #: In the order of what the previous step accepted.
    classes: tuple[HistoryClass, ...]
    #: All of these drafts.
    total: HistoryClass
    #: Base's rates at new's mix. None where the runs have no class in common, as all terms.
    predicted: Term | None
    mix: Term | None
    rate: Term | None
    unmatched: Term | None
    #: The terms in the other order.
    mix_at_new_rates: Term | None
    rate_at_base_mix: Term | None

    @property
    def is_same_k(self) -> bool:
        return self.base_num_speculative_tokens == self.new_num_speculative_tokens


def decompose(base: DraftedRun, new: DraftedRun) -> Decomposition:
    """Split the difference at position 0. Intervals draw samples, paired by sample id, as statistics.py does."""
    names, base_class, new_class = _classes(base, new)
    base_sums, new_sums = _paired_sums(base.columns, new.columns, base_class, new_class, len(names))
    groups = _groups(base_sums[:, :, 0].sum(axis=0), new_sums[:, :, 0].sum(axis=0))
    base_sums, new_sums = _in_groups(base_sums, groups), _in_groups(new_sums, groups)
    verb = " accepted" if base.num_speculative_tokens == new.num_speculative_tokens else ""
    labels = [f"{' or '.join(names[index] for index in group)}{verb} last time" for group in groups]
    classes = _class_differences(labels, base_sums, new_sums)
    everything = (sums.sum(axis=1, keepdims=True) for sums in (base_sums, new_sums))
    is_matched = np.array([one.is_matched for one in classes], bool)
    terms = _terms(base_sums, new_sums, is_matched) if is_matched.any() else dict.fromkeys(_TERMS)
    return Decomposition(
        base_label=base.label,
        new_label=new.label,
        base_num_speculative_tokens=base.num_speculative_tokens,
        new_num_speculative_tokens=new.num_speculative_tokens,
        classes=classes,
        total=_class_differences(["all with a previous step"], *everything)[0],
        **terms,
    )


def _classes(base: DraftedRun, new: DraftedRun) -> tuple[tuple[str, ...], np.ndarray, np.ndarray]:
    """Names of the classes, and the class of each row of base and of new, -1 for none."""
    if base.num_speculative_tokens == new.num_speculative_tokens:
        names = tuple(str(accepted) for accepted in range(base.num_speculative_tokens + 1))
        return names, _by_accepted(base), _by_accepted(new)
    return (REJECTED, FULLY_ACCEPTED), _by_rejection(base.columns), _by_rejection(new.columns)


def _by_accepted(run: DraftedRun) -> np.ndarray:
    """[num_rows] What the previous step accepted."""
    return np.where(run.columns.is_draft, np.clip(run.columns.previous, -1, run.num_speculative_tokens), -1)


def _by_rejection(columns: StepColumns) -> np.ndarray:
    """[num_rows] 0 where the previous step rejected a draft, 1 where it accepted all of its own."""
    drafted_before = np.zeros_like(columns.num_drafted)
    drafted_before[1:] = columns.num_drafted[:-1]
    is_counted = columns.is_draft & (columns.previous >= 0)
    return np.where(is_counted, (columns.previous == drafted_before).astype(np.int64), -1)


def _paired_sums(
    base: StepColumns, new: StepColumns, base_class: np.ndarray, new_class: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """[num_samples, num_classes, 2] drafts and hits of both runs, over the samples of either; a row is one sample."""
    base_ids, base_sample = sample_index(base.requests)
    new_ids, new_sample = sample_index(new.requests)
    row_of = {name: row for row, name in enumerate(sorted({*base_ids, *new_ids}))}

    def counted(columns: StepColumns, ids: Sequence[str], sample: np.ndarray, classes: np.ndarray) -> np.ndarray:
        rows = np.array([row_of[name] for name in ids], np.int64)[sample]
        kept = classes >= 0
        cell = rows[columns.request[kept]] * num_classes + classes[kept]
        is_hit = columns.num_accepted[kept] > 0
        size = len(row_of) * num_classes
        drafts, hits = (np.bincount(cells, minlength=size) for cells in (cell, cell[is_hit]))
        return np.stack([drafts, hits], axis=-1).reshape(len(row_of), num_classes, 2)

    return counted(base, base_ids, base_sample, base_class), counted(new, new_ids, new_sample, new_class)


def _groups(base_drafts: np.ndarray, new_drafts: np.ndarray) -> list[list[int]]:
    """Classes to be counted as one, given [num_classes] drafts of each run; those that neither run has are left out.

    The smallest joins its neighbour among the classes that both runs have, until none has under 20 drafts.
    """
    groups = [[int(index)] for index in np.flatnonzero(base_drafts + new_drafts)]
    while True:
        fewest = [min(base_drafts[group].sum(), new_drafts[group].sum()) for group in groups]
        matched = [index for index, drafts in enumerate(fewest) if drafts > 0]
        if len(matched) < 2 or min(fewest[index] for index in matched) >= MIN_CLASS_DRAFTS:
            return groups
        rank = min(range(len(matched)), key=lambda rank: fewest[matched[rank]])
        first, second = sorted((matched[rank], matched[rank - 1] if rank else matched[1]))
        groups[first] += groups.pop(second)


def _in_groups(sums: np.ndarray, groups: list[list[int]]) -> np.ndarray:
    """[num_samples, num_groups, 2] of sums [num_samples, num_classes, 2]."""
    grouped = np.zeros((len(sums), len(groups), 2))
    for index, group in enumerate(groups):
        grouped[:, index] = sums[:, group].sum(axis=1)
    return grouped


def _class_differences(labels: Sequence[str], base_sums: np.ndarray, new_sums: np.ndarray) -> tuple[HistoryClass, ...]:
    """One for each class, given [num_samples, num_classes, 2]."""
    num_classes = len(labels)
    ratios = Ratios(2 * np.arange(num_classes) + 1, 2 * np.arange(num_classes), np.zeros(num_classes))
    base_flat, new_flat = (sums.reshape(len(sums), 2 * num_classes) for sums in (base_sums, new_sums))
    differences = paired_difference(base_flat, new_flat, ratios)
    p_values = holm(swap_test(base_flat, new_flat, ratios))
    base_totals, new_totals = base_sums.sum(axis=0), new_sums.sum(axis=0)
    return tuple(
        HistoryClass(
            label=label,
            base_drafts=int(base_totals[index, 0]),
            base_hits=int(base_totals[index, 1]),
            new_drafts=int(new_totals[index, 0]),
            new_hits=int(new_totals[index, 1]),
            difference=differences[index],
            p_value=p_values[index],
        )
        for index, label in enumerate(labels)
    )


_TERMS = ("mix", "rate", "mix_at_new_rates", "rate_at_base_mix", "unmatched", "predicted")


def _terms(base_sums: np.ndarray, new_sums: np.ndarray, is_matched: np.ndarray) -> dict[str, Term | None]:
    """The terms and their intervals, given [num_samples, num_classes, 2]."""
    stacked = np.stack([base_sums, new_sums], axis=1)
    shape = stacked.shape[1:]

    def metric(sums: np.ndarray) -> np.ndarray:
        return _term_values(sums.reshape(*sums.shape[:-1], *shape), is_matched)

    flat = stacked.reshape(len(stacked), -1)
    values, draws = metric(flat.sum(axis=0)), bootstrap(flat, metric)
    all_drafts = Ratios(np.array([1]), np.array([0]), np.array([0]))
    num_samples = min(int(num_counted(sums.sum(axis=1), all_drafts)[0]) for sums in (base_sums, new_sums))
    intervals = percentile_interval(draws, num_samples)
    return {
        name: Term(
            float(values[index]),
            intervals[index],
            None if intervals[index] is None else standard_error(draws[:, index], num_samples),
        )
        for index, name in enumerate(_TERMS)
    }


def _term_values(sums: np.ndarray, is_matched: np.ndarray) -> np.ndarray:
    """[..., 6] the terms of sums [..., 2 runs, num_classes, (drafts, hits)]; NaN where a matched class is empty."""
    drafts, hits = sums[..., 0], sums[..., 1]
    matched_drafts, matched_hits = drafts[..., is_matched], hits[..., is_matched]
    share = quotient(matched_drafts, np.broadcast_to(matched_drafts.sum(-1, keepdims=True), matched_drafts.shape))
    accepted = quotient(matched_hits, matched_drafts)
    base_share, new_share = share[..., 0, :], share[..., 1, :]
    base_rate, new_rate = accepted[..., 0, :], accepted[..., 1, :]
    outside = quotient(hits.sum(-1), drafts.sum(-1)) - quotient(matched_hits.sum(-1), matched_drafts.sum(-1))
    terms = (
        ((new_share - base_share) * base_rate).sum(-1),
        (new_share * (new_rate - base_rate)).sum(-1),
        ((new_share - base_share) * new_rate).sum(-1),
        (base_share * (new_rate - base_rate)).sum(-1),
        outside[..., 1] - outside[..., 0],
        (new_share * base_rate).sum(-1),
    )
    return np.stack(terms, axis=-1)
