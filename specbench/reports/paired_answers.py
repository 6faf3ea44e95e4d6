"""Answers of two runs to the same questions: which became right and which became wrong.

Belongs here: right and wrong by (sample, turn, repeat), flips and their exact test, sums by sample. Does not belong
here: scoring an answer (evals), the accuracy of one run (accuracy.py).

A failed request and an invalid answer are wrong, as in accuracy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specbench.reports.compared_run import ComparedRun
from specbench.reports.figures import ACCURACY
from specbench.reports.latency import is_completed
from specbench.reports.sample_sums import SampleSums
from specbench.reports.statistics import Ratios, mcnemar
from specbench.reports.text_difference import SampleKey


@dataclass(frozen=True, slots=True)
class Flips:
    """Answers that changed between two runs."""

    compared: int
    #: Right in the base run alone, or scored higher there.
    only_base: int
    #: Right in the new run alone, or scored higher there.
    only_new: int
    #: Exact McNemar, two-sided. It takes answers for independent: only where each sample was asked once.
    p_value: float | None


@dataclass(frozen=True, slots=True, eq=False)
class PairedAnswers:
    """Scores of both runs, row i of each array being the same sample."""

    flips: Flips
    #: Summed scores over answers.
    base: SampleSums
    new: SampleSums


def paired_answers(base: ComparedRun, new: ComparedRun) -> PairedAnswers | None:
    """Answers that were scored in both runs under the base run's scorer; None where there are none."""
    first, second = scores(base), scores(new)
    keys = [key for key in first if key in second]
    if not keys:
        return None
    sample_ids = sorted({key[0] for key in keys})
    row_of = {name: row for row, name in enumerate(sample_ids)}
    rows = np.array([row_of[key[0]] for key in keys])
    before, after = (np.array([one[key] for key in keys]) for one in (first, second))
    only_base, only_new = int((before > after).sum()), int((after > before).sum())
    asked_once = len(sample_ids) == len(keys)
    flips = Flips(len(keys), only_base, only_new, mcnemar(only_base, only_new) if asked_once else None)
    return PairedAnswers(flips, *(_accuracy_sums(tuple(sample_ids), rows, one) for one in (before, after)))


def _accuracy_sums(sample_ids: tuple[str, ...], rows: np.ndarray, scores: np.ndarray) -> SampleSums:
    """`scores` [num_answers] of answers whose sample is `rows` [num_answers]."""
    sums = np.stack([np.bincount(rows, weights=scores), np.bincount(rows)], axis=1)
    return SampleSums(sample_ids, sums, Ratios(np.array([0]), np.array([1]), np.array([0])), (ACCURACY.path,))


def scores(run: ComparedRun) -> Mapping[SampleKey, float]:
    """Score of each answer that counts for the run's headline scorer, as in accuracy.py."""
    scorer = run.record.config["eval"]["scorer"]
    failed = {
        (request.sample_id, request.turn, request.repeat)
        for request in run.columns.requests
        if not is_completed(request)
    }
    found: dict[SampleKey, float] = dict.fromkeys(failed, 0.0) if scorer else {}
    for sample in run.samples:
        key, score = (sample.sample_id, sample.turn, sample.repeat), sample.score.get(scorer)
        if score is not None:
            is_wrong = key in failed or sample.extracted.get(scorer) is None
            found[key] = 0.0 if is_wrong else score
        elif sample.reference is None:
            found.pop(key, None)
    return found
