"""How many answers were right, under each scorer.

Belongs here: counting scored samples and the interval of one run's accuracy. Does not belong here: extracting or
scoring an answer (evals), two runs against each other.

Every repeat counts. A failed or aborted request and an invalid answer (nothing extracted) are wrong, and stay in the
total.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from specbench.records import RequestRecord, SampleRecord
from specbench.reports.latency import is_completed

#: Of the normal distribution, for 95 %.
Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sample under one scorer."""

    score: float
    is_invalid: bool
    is_truncated: bool
    category: str | None


def wilson_interval(correct: float, total: int) -> list[float] | None:
    """95 % Wilson score interval of correct / total; None where total is 0."""
    if total == 0:
        return None
    share, z2 = correct / total, Z_95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z_95 / (1 + z2 / total) * sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return [max(0.0, centre - half), min(1.0, centre + half)]


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
        "by": _by_category(outcomes),
    }


def _outcomes(scorer: str, requests: Sequence[RequestRecord], samples: Sequence[SampleRecord]) -> list[Outcome]:
    """One for each sample that `scorer` could judge, and for each request that failed before it could be judged."""
    failed = {_key(request): request for request in requests if not is_completed(request)}
    outcomes = []
    for sample in samples:
        failure = failed.pop(_key(sample), None)
        score = sample.score.get(scorer)
        if failure is not None and (score is not None or sample.reference is not None):
            outcomes.append(Outcome(0.0, sample.extracted.get(scorer) is None, False, sample.category))
        elif score is not None:
            is_invalid = sample.extracted.get(scorer) is None
            outcomes.append(Outcome(0.0 if is_invalid else score, is_invalid, sample.is_truncated, sample.category))
    return outcomes + [Outcome(0.0, True, False, request.category) for request in failed.values()]


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
    return wilson_interval(_correct(outcomes), len(outcomes))


def _scorer_entry(outcomes: Sequence[Outcome]) -> dict:
    return _share(outcomes) | {"invalid": sum(one.is_invalid for one in outcomes)}


def _by_category(outcomes: Sequence[Outcome]) -> dict[str, dict]:
    """{"category": {value: …}}; empty where samples have no category."""
    values = sorted({one.category for one in outcomes if one.category is not None})
    groups = {value: [one for one in outcomes if one.category == value] for value in values}
    entries = {value: _share(group) | {"interval": _interval(group)} for value, group in groups.items()}
    return {"category": entries} if entries else {}
