"""How one run's figures differ from the base run's, and whether that is more than chance.

Belongs here: differences of unrounded values, paired tests by family, better or worse. Does not belong here: the
statistics themselves (statistics.py, sample_sums.py), tables, sentences.

Drafts and answers are paired by sample. Speed is tested only between runs of three repeats or more: one run shows how
fast it was that once. Marks are adjusted within a family by Holm; intervals are not adjusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from specbench.reports.comparability import Comparability
from specbench.reports.compared_run import ComparedRun
from specbench.reports.figures import (
    ACCEPTANCE_LENGTH,
    ACCEPTANCE_RATE,
    ACCURACY,
    OUTPUT_THROUGHPUT,
    Figure,
    as_percent,
    benchmark_figures,
    latency_figures,
    position_figure,
)
from specbench.reports.paired_answers import PairedAnswers, paired_answers
from specbench.reports.sample_sums import BELOW_K, SampleSums, acceptance_sums, category_path, category_sums, paired
from specbench.reports.statistics import (
    MIN_REPEATS,
    Difference,
    holm,
    paired_difference,
    paired_repeat_difference,
    swap_test,
)

#: An adjusted p value up to this one is more than chance.
SIGNIFICANCE = 0.05
Family = Literal["headline", "positions", "buckets", "categories", "speed"]


@dataclass(frozen=True, slots=True)
class Change:
    """One figure of two runs."""

    figure: Figure
    family: Family | None
    base: float | None
    new: float | None
    #: Interval and standard error are of new - base in the figure's own unit; None where nothing was tested.
    difference: Difference | None
    p_value: float | None
    #: By Holm within the family.
    adjusted_p_value: float | None
    #: Whether better or worse can be said of it in these two runs.
    has_direction: bool
    #: Why a difference says nothing; None where it says something.
    void: str | None

    @property
    def change(self) -> float | None:
        """Points (as a fraction) of a fraction, else a share of the base; None where it is void or was not measured."""
        return None if self.void else self.figure.change(self.base, self.new)

    @property
    def alike(self) -> str | None:
        """`the same in every sample` (or repeat); None where they are not, or too few to say."""
        if self.difference is None or not self.difference.is_alike:
            return None
        return f"the same in every {'repeat' if self.figure.kind == 'speed' else 'sample'}"

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `different`, `no difference visible`, `not tested` or `void`."""
        if self.void:
            return "void"
        if self.adjusted_p_value is None or self.base is None or self.new is None:
            return "not tested"
        if self.adjusted_p_value > SIGNIFICANCE or self.base == self.new:
            return "no difference visible"
        if not self.has_direction:
            return "different"
        return "better" if (self.new > self.base) == (self.figure.better == "higher") else "worse"


@dataclass(frozen=True, slots=True)
class PairChanges:
    """All figures of one new run against the base."""

    by_path: dict[str, Change]
    grounds: Comparability
    equal_k: bool
    answers: PairedAnswers | None
    #: Base and new over the same samples: whatever can be paired.
    sums: tuple[tuple[SampleSums, SampleSums], ...]
    #: Why no draft can be paired, whatever the samples; None where both runs show drafts one by one.
    no_drafts: str | None

    def of(self, figure: Figure, base: float | None, new: float | None) -> Change:
        """As it was tested; untested where it was not."""
        tested = self.by_path.get(figure.path)
        return _judged(_change(figure, None, base, new), self.equal_k, self.grounds) if tested is None else tested

    def family(self, name: Family) -> list[Change]:
        """Those that were tested together."""
        return [change for change in self.by_path.values() if change.family == name]


def pair_changes(base: ComparedRun, new: ComparedRun, grounds: Comparability) -> PairChanges:
    """Every figure of `new` against `base`, as far as `grounds` allow."""
    equal_k = base.num_speculative_tokens == new.num_speculative_tokens
    answers = paired_answers(base, new) if grounds.has_paired_answers else None
    sums = _paired_drafts(base, new) if grounds.is_paired else []
    tested = [change for pair in sums for change in _tested_sums(*pair, _families(base, new))]
    tested += tested_accuracy(answers)
    tested += [] if grounds.void_of_speed else tested_speed(base, new)
    by_path = {one.figure.path: one for one in [*_untested(base, new), *tested]}
    changes = {one.figure.path: one for one in _adjusted([_judged(one, equal_k, grounds) for one in by_path.values()])}
    if answers is not None:
        sums.append((answers.base, answers.new))
    return PairChanges(changes, grounds, equal_k, answers, tuple(sums), _no_drafts(base, new))


def bucket_figure(path: str, accepted: str) -> Figure:
    """Position 0 after a previous step that accepted so many. `path` is that of the bucket."""
    return Figure(
        f"Position 0 (%) after {accepted} accepted",
        f"{path}.per_position[0]",
        as_percent,
        "drafts",
        is_fraction=True,
        better="higher",
        needs_equal_k=True,
    )


def category_figure(category: str) -> Figure:
    """Acceptance length of one category."""
    return replace(
        ACCEPTANCE_LENGTH,
        label=f"Acceptance length, {category}",
        path=f"{category_path(category)}.acceptance_length",
    )


def _untested(base: ComparedRun, new: ComparedRun) -> list[Change]:
    """Every figure that tables show, as values alone."""
    most = max(base.num_speculative_tokens, new.num_speculative_tokens)
    figures = [ACCURACY, *benchmark_figures(most), *latency_figures()]
    return [_change(figure, None, figure.value(base.metrics), figure.value(new.metrics)) for figure in figures]


def _change(figure: Figure, family: Family | None, base: float | None, new: float | None) -> Change:
    return Change(figure, family, base, new, None, None, None, has_direction=False, void=None)


def _judged(change: Change, equal_k: bool, grounds: Comparability) -> Change:
    figure = change.figure
    return replace(
        change,
        has_direction=figure.better is not None and (equal_k or not figure.needs_equal_k),
        void=grounds.void_of_speed if figure.kind == "speed" else grounds.model,
    )


def _adjusted(changes: Sequence[Change]) -> list[Change]:
    """Holm within each family; a figure in no family keeps none."""
    adjusted = list(changes)
    for family in ("headline", "positions", "buckets", "categories", "speed"):
        places = [index for index, one in enumerate(changes) if one.family == family]
        for place, p_value in zip(places, holm([changes[index].p_value for index in places]), strict=True):
            adjusted[place] = replace(changes[place], adjusted_p_value=p_value)
    return adjusted


def _no_drafts(base: ComparedRun, new: ComparedRun) -> str | None:
    lacking = [run for run in (base, new) if not run.is_drafted]
    if not lacking:
        return None
    without_steps = [run.label for run in lacking if not len(run.columns.request)]
    if without_steps:
        return f"no verify steps in {' and '.join(without_steps)}"
    return f"nothing was drafted in {' and '.join(run.label for run in lacking)}"


def _paired_drafts(base: ComparedRun, new: ComparedRun) -> list[tuple[SampleSums, SampleSums]]:
    """All drafts, then each category that holds the same samples in both runs; nothing where a run drafted nothing."""
    if not base.is_drafted or not new.is_drafted:
        return []
    first, second = (acceptance_sums(run.columns, run.num_speculative_tokens) for run in (base, new))
    by_category = [category_sums(run.columns, run.num_speculative_tokens) for run in (base, new)]
    categories = [(by_category[0][name], by_category[1][name]) for name in by_category[0] if name in by_category[1]]
    same = [pair for pair in categories if pair[0].sample_ids == pair[1].sample_ids]
    return [paired(*pair) for pair in [(first, second), *same]]


def _families(base: ComparedRun, new: ComparedRun) -> dict[str, tuple[Figure, Family]]:
    """What is tested of drafts: rate, length and positions, buckets where k is equal, the length by category."""
    fewest = min(base.num_speculative_tokens, new.num_speculative_tokens)
    tested: list[tuple[Figure, Family]] = [(ACCEPTANCE_RATE, "headline"), (ACCEPTANCE_LENGTH, "headline")]
    tested += [(position_figure(position), "positions") for position in range(fewest)]
    if base.num_speculative_tokens == new.num_speculative_tokens:
        tested += [(figure, "buckets") for figure in _bucket_figures(fewest)]
    categories = base.metrics["acceptance"]["by_category"]
    tested += [(category_figure(name), "categories") for name in categories]
    return {figure.path: (figure, family) for figure, family in tested}


def _bucket_figures(k: int) -> list[Figure]:
    """Position 0 after 0..k accepted, and after fewer than k together."""
    by_count = {f"acceptance.by_previous[{2 + accepted}]": str(accepted) for accepted in range(k + 1)}
    return [bucket_figure(path, accepted) for path, accepted in {**by_count, BELOW_K: "fewer than k"}.items()]


def _tested_sums(base: SampleSums, new: SampleSums, families: dict[str, tuple[Figure, Family]]) -> list[Change]:
    """Interval and p value of each path of `families` that both have."""
    paths = [path for path in base.paths if path in families]
    base, new = base.restricted(base.sample_ids, paths), new.restricted(new.sample_ids, paths)
    differences = paired_difference(base.sums, new.sums, base.ratios)
    p_values = swap_test(base.sums, new.sums, base.ratios)
    return [
        _tested(*families[path], difference, p_value)
        for path, difference, p_value in zip(paths, differences, p_values, strict=True)
    ]


def _tested(figure: Figure, family: Family, difference: Difference, p_value: float | None) -> Change:
    """Under 20 samples there is no interval, and no p value either."""
    tested_p_value = None if difference.interval is None else p_value
    return replace(
        _change(figure, family, difference.base, difference.new), difference=difference, p_value=tested_p_value
    )


def tested_accuracy(answers: PairedAnswers | None) -> list[Change]:
    """McNemar where each sample was asked once; else the swap test, which keeps a sample's repeats together."""
    if answers is None:
        return []
    (change,) = _tested_sums(answers.base, answers.new, {ACCURACY.path: (ACCURACY, "headline")})
    exact = answers.flips.p_value
    return [change if exact is None else replace(change, p_value=exact)]


def tested_speed(base: ComparedRun, new: ComparedRun) -> list[Change]:
    """The speed figures of the benchmark over repeats; none where a run has fewer than three, or was resumed."""
    if min(base.num_repeats, new.num_repeats) < MIN_REPEATS:
        return []
    if base.record.num_segments > 1 or new.record.num_segments > 1:
        return []
    first, second = base.speed_by_repeat, new.speed_by_repeat
    tested = []
    for figure in (one for one in benchmark_figures(0) if one.kind == "speed"):
        before, after = _measured(first, figure), _measured(second, figure)
        if len(before) == len(first) and len(after) == len(second):
            difference = paired_repeat_difference(before, after)
            family: Family = "headline" if figure == OUTPUT_THROUGHPUT else "speed"
            change = _change(figure, family, figure.value(base.metrics), figure.value(new.metrics))
            p_value = _student_p(difference, min(len(before), len(after)))
            tested.append(replace(change, difference=difference, p_value=p_value))
    return tested


def _measured(repeats: Sequence[dict], figure: Figure) -> list[float]:
    """The figure in those repeats that measured it."""
    values = [figure.value(one) for one in repeats]
    return [value for value in values if value is not None]


def _student_p(difference: Difference, num_pairs: int) -> float | None:
    """Two-sided p of Student's t over the pairs of repeats; None where all differ alike, which shows no chance."""
    from scipy.special import stdtr

    if difference.difference is None or not difference.standard_error:
        return None
    return 2 * float(stdtr(num_pairs - 1, -abs(difference.difference / difference.standard_error)))
