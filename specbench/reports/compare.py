"""Two or more runs, the first of them the base: everything that a comparison says, as data.

Belongs here: what is compared with what, and whether each may be. Does not belong here: tables (side_by_side.py),
sentences and their order (compare_sections.py), single comparisons (changes.py, text_difference.py, layout_check.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.reports.changes import PairChanges, pair_changes
from specbench.reports.comparability import Comparability, comparability, only_layout_differs
from specbench.reports.compared_costs import compared_costs
from specbench.reports.compared_run import ComparedRun, load_run, with_labels
from specbench.reports.decomposition import Decomposition, decompose
from specbench.reports.layout_check import LayoutCheck, check_layouts, layout_text
from specbench.reports.same_token import SameToken, same_token_check
from specbench.reports.text_difference import TextComparison, compare_texts


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """One new run against the base."""

    new: ComparedRun
    grounds: Comparability
    changes: PairChanges
    #: None where samples are not paired.
    texts: TextComparison | None
    #: None unless the parallel layout is the only setting that differs.
    layout: LayoutCheck | None
    #: None unless both runs drafted and their samples are paired.
    decomposition: Decomposition | None
    #: None unless, besides, both runs are greedy.
    same_token: SameToken | None


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """A base run and each new run against it."""

    base: ComparedRun
    pairs: tuple[Pair, ...]
    #: What sweep_cost_model says of those that may be put together; None where they are not two.
    costs: dict | None

    @property
    def runs(self) -> tuple[ComparedRun, ...]:
        """The base first."""
        return (self.base, *(pair.new for pair in self.pairs))

    @property
    def changes(self) -> tuple[PairChanges, ...]:
        return tuple(pair.changes for pair in self.pairs)


def compare_directories(base: Path, new: Sequence[Path]) -> Comparison:
    """Compare run directories; figures are computed anew from their event logs."""
    return compare([load_run(directory) for directory in (base, *new)])


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Compare `runs[1:]` with `runs[0]`."""
    base, *others = with_labels(runs)
    pairs = tuple(_pair(base, new) for new in others)
    return Comparison(base, pairs, compared_costs(base, [(pair.new, pair.grounds) for pair in pairs]))


def _pair(base: ComparedRun, new: ComparedRun) -> Pair:
    grounds = comparability(base, new)
    is_drafted = grounds.is_paired and base.is_drafted and new.is_drafted
    is_layout_alone = grounds.is_paired and only_layout_differs(base, new)
    drafted = (base.drafted, new.drafted)
    return Pair(
        new=new,
        grounds=grounds,
        changes=pair_changes(base, new, grounds),
        texts=_texts(base, new) if grounds.is_paired else None,
        layout=_layouts(base, new) if is_layout_alone else None,
        decomposition=decompose(*drafted) if is_drafted else None,
        same_token=same_token_check(*drafted) if is_drafted and base.is_greedy and new.is_greedy else None,
    )


def _layouts(base: ComparedRun, new: ComparedRun) -> LayoutCheck:
    layouts = (layout_text(base.record.config), layout_text(new.record.config))
    is_exact = all(run.record.config["model"].get("dtype") == "float32" for run in (base, new))
    return check_layouts(base.columns, new.columns, layouts, is_exact=is_exact)


def _texts(base: ComparedRun, new: ComparedRun) -> TextComparison:
    scorer = base.record.config["eval"]["scorer"]
    return compare_texts(base.columns.requests, base.samples, new.columns.requests, new.samples, scorer)
