"""How many answers were right, under each scorer.

Belongs here: counting scored samples and the interval of one run's accuracy. Does not belong here: extracting or
scoring an answer (evals), two runs against each other.

Every repeat counts. A failed or aborted request and an invalid answer (nothing extracted) are wrong, and stay in the
total. In the interval, answers to one sample (its repeats and turns) count as far as they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.records import RequestRecord, SampleRecord
from specbench.reports.latency import is_completed
from specbench.reports.statistics import clustered_wilson


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answer under one scorer."""

    sample_id: str
    score: float
    is_invalid: bool
    is_truncated: bool
    #: Dimension -> value.
    groups: Mapping[str, str]


def accuracy_metrics(
    name: str, scorer: str | None, requests: Sequence[RequestRecord], samples: Sequence[SampleRecord]
) -> dict:
    """The `eval` block of metrics.json. `scorer` is the headline; `requests` are the measured ones."""
    names = sorted({name for sample in samples for name in sample.score} | ({scorer} if scorer else set()))
    by_scorer = {name: _outcomes(name, requests, samples) for name in names}
    outcomes = by_scorer[scorer] if scorer else []
    truncated = sum(one.is_truncated for one in outcomes) if scorer else sum(one.is_truncated for one in samples)
    return {
        "name": name,
        "scorer": scorer,
        **_share(outcomes),
        "truncated": truncated if samples else None,
        "invalid": sum(one.is_invalid for one in outcomes) if outcomes else None,
        "interval": _interval(outcomes),
        "scorers": {name: _scorer_entry(outcomes) for name, outcomes in by_scorer.items() if outcomes},
        "by": _by_dimension(outcomes),
    }


def _outcomes(scorer: str, requests: Sequence[RequestRecord], samples: Sequence[SampleRecord]) -> list[Outcome]:
    """One for each sample that `scorer` could judge, and for each request that failed before it could be judged."""
    failed = {_key(request): request for request in requests if not is_completed(request)}
    outcomes = []
    for sample in samples:
        failure = failed.pop(_key(sample), None)
        score = sample.score.get(scorer)
        if failure is not None and (score is not None or sample.reference is not None):
            outcomes.append(
                Outcome(sample.sample_id, 0.0, sample.extracted.get(scorer) is None, False, _groups(sample))
            )
        elif score is not None:
            is_invalid = sample.extracted.get(scorer) is None
            score = 0.0 if is_invalid else score
            outcomes.append(Outcome(sample.sample_id, score, is_invalid, sample.is_truncated, _groups(sample)))
    return outcomes + [Outcome(request.sample_id, 0.0, True, False, _groups(request)) for request in failed.values()]


def _key(record: RequestRecord | SampleRecord) -> tuple[str, int, int]:
    return record.sample_id, record.turn, record.repeat


def _correct(outcomes: Sequence[Outcome]) -> int | float:
    """Sum of scores: a count unless a scorer gives parts."""
    total = sum(one.score for one in outcomes)
    return int(total) if float(total).is_integer() else total


def _share(outcomes: Sequence[Outcome]) -> dict:
    if not outcomes:
        return {"accuracy": None, "correct": None, "total": None}
    correct = _correct(outcomes)
    return {"accuracy": correct / len(outcomes), "correct": correct, "total": len(outcomes)}


def _interval(outcomes: Sequence[Outcome]) -> list[float] | None:
    names, sample = np.unique([one.sample_id for one in outcomes], return_inverse=True)
    scores = np.array([one.score for one in outcomes])
    interval = clustered_wilson(np.bincount(sample, scores, len(names)), np.bincount(sample, minlength=len(names)))
    return None if interval is None else list(interval)


def _scorer_entry(outcomes: Sequence[Outcome]) -> dict:
    return _share(outcomes) | {"invalid": sum(one.is_invalid for one in outcomes)}


def _groups(record: RequestRecord | SampleRecord) -> Mapping[str, str]:
    """A sample's own dimensions, else its category."""
    if isinstance(record, SampleRecord) and record.groups:
        return record.groups
    return {} if record.category is None else {"category": record.category}


def _by_dimension(outcomes: Sequence[Outcome]) -> dict[str, dict]:
    """{dimension: {value: …}}, such as {"category": {"math": …}}; empty where samples have none."""
    dimensions = list(dict.fromkeys(dimension for one in outcomes for dimension in one.groups))
    return {dimension: _by_value(outcomes, dimension) for dimension in dimensions}


def _by_value(outcomes: Sequence[Outcome], dimension: str) -> dict[str, dict]:
    of_value: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if dimension in one.groups:
            of_value.setdefault(one.groups[dimension], []).append(one)
    return {value: _share(group) | {"interval": _interval(group)} for value, group in sorted(of_value.items())}
