"""What a health check is: what it looks at, what it says, and the evidence that all of them share.

Belongs here: the shape of a check and of its finding, counts by sample, when a difference counts as an alarm. Does not
belong here: any single check (drafting_checks.py, text_checks.py, measurement_checks.py), text of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from specbench.records import RunRecord, SampleRecord
from specbench.reports.clusters import SampleRatio
from specbench.reports.step_columns import StepColumns
from specbench.reports.token_table import TokenTable, pack_tokens

OK, WARNING, FAILED, NOT_CHECKED = "ok", "warning", "failed", "not_checked"

#: Standard errors beyond a threshold before a check raises: chance does so once in 30,000, so that the twenty or so
#: comparisons of a report raise a false alarm in fewer than one report in a thousand.
ALARM_STANDARD_ERRORS = 4.0
#: The same chance as a p value.
ALARM_P_VALUE = 3.2e-5
#: What the request's step before a draft did: accepted all k, accepted less, or was no draft (or there was none).
FULL, REJECTED, NO_HISTORY = HISTORIES = ("full", "rejected", "no_history")
#: Fewer drafts at a position say nothing of it.
MIN_DRAFTS = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found in one run."""

    #: OK, WARNING, FAILED or NOT_CHECKED.
    status: str
    #: What was seen, with its numbers; for NOT_CHECKED the reason.
    text: str
    #: The same numbers for programs.
    numbers: Mapping[str, float | None] = field(default_factory=dict)


def not_checked(reason: str) -> Finding:
    return Finding(NOT_CHECKED, reason)


def judged(is_raised: bool, text: str, numbers: Mapping[str, float | None], status: str = WARNING) -> Finding:
    """`status` where the check is raised, otherwise OK."""
    return Finding(status if is_raised else OK, text, numbers)


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """All that a check may look at."""

    run: RunRecord
    columns: StepColumns
    #: The other blocks of metrics.json.
    metrics: dict
    samples: Sequence[SampleRecord]
    #: [num_requests] Index of each request's sample.
    sample_of_request: np.ndarray
    #: Drafts of each request, and the drafts accepted of them, [num_requests] each.
    drafts_of_request: np.ndarray
    accepted_of_request: np.ndarray
    #: What the step before the draft accepted (a HISTORY) -> drafts counted by sample.
    by_history: dict[str, SampleJoint]
    #: Output token ids, in the order of `samples`.
    outputs: TokenTable

    @classmethod
    def of(cls, run: RunRecord, columns: StepColumns, metrics: dict, samples: Sequence[SampleRecord]) -> Evidence:
        index_of: dict[str, int] = {}
        ids = (request.sample_id for request in columns.requests)
        sample_of_request = np.array([index_of.setdefault(one, len(index_of)) for one in ids], np.int64)
        k, num_requests = metrics["acceptance"]["num_speculative_tokens"] or 0, len(columns.requests)
        accepted = np.where(columns.is_draft, columns.num_accepted, 0)
        return cls(
            run=run,
            columns=columns,
            metrics=metrics,
            samples=samples,
            sample_of_request=sample_of_request,
            drafts_of_request=np.bincount(columns.request, weights=columns.is_draft, minlength=num_requests),
            accepted_of_request=np.bincount(columns.request, weights=accepted, minlength=num_requests),
            by_history=_by_history(columns, sample_of_request, k),
            outputs=pack_tokens(sample.output_token_ids for sample in samples),
        )

    @property
    def k(self) -> int:
        """Speculative tokens; 0 when speculation was off."""
        return self.metrics["acceptance"]["num_speculative_tokens"] or 0

    @property
    def num_samples(self) -> int:
        return int(self.sample_of_request.max(initial=-1)) + 1

    @property
    def category_of_request(self) -> np.ndarray:
        """[num_requests] Index of each request's category; those without one are a category of their own."""
        names = [request.category or "" for request in self.columns.requests]
        index_of = {name: index for index, name in enumerate(dict.fromkeys(names))}
        return np.array([index_of[name] for name in names], np.int64)

    @property
    def no_drafts(self) -> str | None:
        """Why nothing can be said of drafts; None where they can be judged."""
        drafts = self.metrics["acceptance"]["drafts"]
        if self.run.acceptance_source != "engine" and not len(self.columns.request):
            return f"no step by itself is known from {self.run.acceptance_source}"
        if drafts is None:
            return "speculation was off"
        return None if drafts >= MIN_DRAFTS else f"only {drafts} drafts, fewer than {MIN_DRAFTS}"

    @property
    def all_drafts(self) -> SampleJoint:
        return SampleJoint(np.sum([joint.steps for joint in self.by_history.values()], axis=0))

    def ratio_of_requests(self, numerator: np.ndarray, denominator: np.ndarray) -> SampleRatio:
        """A ratio of counts of requests, [num_requests] each, by sample."""
        sample, num_samples = self.sample_of_request, self.num_samples
        return SampleRatio(
            np.bincount(sample, weights=numerator, minlength=num_samples),
            np.bincount(sample, weights=denominator, minlength=num_samples),
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampleJoint:
    """Drafts counted by sample, and by what they drafted and accepted."""

    #: [num_samples, drafted, accepted] -> steps
    steps: np.ndarray

    def given_the_previous(self, position: int) -> SampleRatio:
        """Steps with accepted > i over steps with accepted >= i and drafted > i."""
        reached = self.steps[:, position + 1 :, position:].sum(axis=(1, 2))
        return SampleRatio(self.steps[:, position + 1 :, position + 1 :].sum(axis=(1, 2)), reached)

    @property
    def accepted_per_draft(self) -> SampleRatio:
        """Accepted tokens over drafts: acceptance length less the bonus token."""
        accepted = self.steps.sum(axis=1) @ np.arange(self.steps.shape[2])
        return SampleRatio(accepted, self.steps.sum(axis=(1, 2)))


def _by_history(columns: StepColumns, sample_of_request: np.ndarray, k: int) -> dict[str, SampleJoint]:
    """One pass over the rows. Those that contradict themselves are left out: the identities name them."""
    num_samples, width = int(sample_of_request.max(initial=-1)) + 1, 1 + k
    # k, anything less, neither
    history = np.where(columns.previous == k, 0, np.where(columns.previous >= 0, 1, 2))
    drafted, accepted = columns.num_drafted, columns.num_accepted
    cell = ((history * num_samples + sample_of_request[columns.request]) * width + drafted) * width + accepted
    is_sound = (drafted > 0) & (accepted >= 0) & (accepted <= drafted)
    steps = np.bincount(cell[is_sound], minlength=len(HISTORIES) * num_samples * width * width)
    tables = steps.reshape(len(HISTORIES), num_samples, width, width)
    return {name: SampleJoint(table) for name, table in zip(HISTORIES, tables, strict=True)}


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One question to a run, and what its answer means."""

    #: Key in metrics.json.
    name: str
    title: str
    #: When it is raised.
    threshold: str
    why: str
    #: Where to look once it is raised.
    where: str
    look: Callable[[Evidence], Finding]
