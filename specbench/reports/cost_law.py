"""What a step costs by its rows and its requests: a law with few coefficients, fitted to the steps of one or more runs.

Belongs here: the form of the law, its fit, and what the steps at hand can't tell apart. Does not belong here: what a
law predicts of speculation (cost_model.py).

    step = target and verification(rows, requests) + k · draft_pass(rows, requests) + host(rows, requests)
    each = a + b · requests + c · rows + d · √rows + e · prompt rows + f · [has a prompt chunk],   none negative

√rows bends the law where rows share what they read (weights, experts). Where every request drafts the same k, rows are
(k + 1) · requests in every step and a cost that grows with both may belong to either. Then two laws that fit as well
stand beside each other: "rows" gives all growth to rows, "requests" gives rows no more than a row of a prompt chunk
costs (nothing, without chunks). What is true lies between them, as long as rows of a chunk are the cheaper ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.reports.step_costs import StepCosts

#: Steps that are fitted at most, evenly over the runs.
MAX_STEPS = 50_000
#: Fewer steps do not make a law.
MIN_STEPS = 20
#: Steps further off than this many robust standard deviations (a pause of the machine) are left out of the fit.
_OUTLIER_DEVIATIONS = 5.0
_NUM_REFITS = 3
#: A law that is off by more in the median, or leaves out more of the time, is none.
MAX_RESIDUAL, MAX_LEFT_OUT_SHARE = 0.25, 0.5
#: Spread of rows, over their mean, that tells what a row costs: among all steps from what a step costs, among steps of
#: equal requests from what a request does.
_TELLING_SPREAD = 0.05

_NAMES = ("step", "request", "row", "root_row", "prompt_row", "prompt_chunk")


@dataclass(frozen=True, slots=True, eq=False)
class PartLaw:
    """Seconds of one part of a step."""

    #: [6] In the order of the module's docstring, rows behind requests.
    coefficients: np.ndarray
    #: Median of |measured - fitted| / fitted over the steps that lie near.
    residual: float
    #: Steps that lay too far off, and their share of the time of all steps.
    num_left_out: int
    left_out_share: float

    def seconds(self, num_requests: float, num_rows: float) -> float:
        """Of a step without prompt chunks."""
        return float(_features(np.array([num_requests]), np.array([num_rows]), np.zeros(1))[0] @ self.coefficients)


@dataclass(frozen=True, slots=True)
class CostLaw:
    """The law of a whole step."""

    #: "fitted", or "rows" or "requests" where the steps can't tell.
    name: str
    target: PartLaw
    #: For each of the k drafts; None where drafting can't be told from the rest.
    draft_pass: PartLaw | None
    #: None where no part of a step was timed: the host is in `target`.
    host: PartLaw | None

    def step_s(self, num_requests: float, k: int) -> float | None:
        """Seconds of a step in which each request has k drafts verified and k made; None where drafting is unknown."""
        if k and self.draft_pass is None:
            return None
        num_rows = num_requests * (k + 1)
        seconds = self.target.seconds(num_requests, num_rows)
        if self.host is not None:
            seconds += self.host.seconds(num_requests, num_rows)
        if k and self.draft_pass is not None:
            seconds += k * self.draft_pass.seconds(num_requests, num_rows)
        return seconds


@dataclass(frozen=True, slots=True)
class FittedLaws:
    """One law, or the two that the steps can't tell apart, or none and the reason."""

    laws: tuple[CostLaw, ...]
    reason: str | None = None


def fit_laws(runs: Sequence[StepCosts]) -> FittedLaws:
    """Parts are fitted one by one where every run timed them.

    Otherwise the whole step is: then drafting is known only where runs differ in k.
    """
    steps = _Steps.of(runs)
    if steps.is_decode_only.sum() < MIN_STEPS:
        return FittedLaws((), f"fewer than {MIN_STEPS} steps with requests in decode and no prompt")
    if not steps.tells_rows_from_steps:
        return FittedLaws((), "all steps in decode have as many rows, so what a row costs can't be told")
    names = ("fitted",) if steps.tells_rows_from_requests else ("rows", "requests")
    laws = tuple(_fit(name, steps) for name in names)
    worst = max((law.target for law in laws), key=lambda part: part.residual)
    if worst.residual > MAX_RESIDUAL or worst.left_out_share > MAX_LEFT_OUT_SHARE:
        seen = f"off by {worst.residual:.0%} in the median, {worst.left_out_share:.0%} of the time in steps far off"
        return FittedLaws((), f"steps of one kind scatter too much ({seen}), as on a machine busy with other work")
    return FittedLaws(laws)


@dataclass(frozen=True, slots=True, eq=False)
class _Steps:
    """Steps with requests in decode, of all runs. Every array is [num_steps]."""

    k: np.ndarray
    num_requests: np.ndarray
    num_rows: np.ndarray
    num_prompt_tokens: np.ndarray
    step_s: np.ndarray
    #: Verification included.
    target_s: np.ndarray
    draft_s: np.ndarray
    host_s: np.ndarray

    @classmethod
    def of(cls, runs: Sequence[StepCosts]) -> _Steps:
        kept = [np.flatnonzero((run.num_requests > 0) & (run.step_s > 0)) for run in runs]
        stride = max(1, -(-sum(map(len, kept)) // MAX_STEPS))
        chosen = [rows[::stride] for rows in kept]
        pairs = list(zip(runs, chosen, strict=True))

        def joined(name: str) -> np.ndarray:
            return np.concatenate([np.zeros(0), *(getattr(run, name)[rows] for run, rows in pairs)])

        return cls(
            k=np.repeat([run.k for run in runs], [len(rows) for rows in chosen]),
            num_requests=joined("num_requests"),
            num_rows=joined("num_rows"),
            num_prompt_tokens=joined("num_prompt_tokens"),
            step_s=joined("step_s"),
            target_s=joined("target_s") + joined("verify_s"),
            draft_s=joined("draft_s"),
            host_s=joined("host_s"),
        )

    @property
    def is_decode_only(self) -> np.ndarray:
        return self.num_prompt_tokens == 0

    @property
    def is_timed(self) -> bool:
        """Whether every step has its parts."""
        return bool(np.isfinite(self.host_s).all())

    @property
    def tells_rows_from_steps(self) -> bool:
        rows = self.num_rows[self.is_decode_only]
        return bool(rows.std() >= _TELLING_SPREAD * rows.mean())

    @property
    def tells_rows_from_requests(self) -> bool:
        rows, requests = self.num_rows[self.is_decode_only], self.num_requests[self.is_decode_only].astype(np.int64)
        count = np.bincount(requests)
        mean = np.bincount(requests, weights=rows) / np.maximum(count, 1)
        deviation = np.sqrt(np.mean(((rows - mean[requests]) / mean[requests]) ** 2))
        return bool(deviation >= _TELLING_SPREAD)


def _fit(name: str, steps: _Steps) -> CostLaw:
    if steps.is_timed:
        drafts = steps.k > 0
        return CostLaw(
            name,
            target=_fit_part(name, steps, steps.target_s, np.ones(len(steps.k), bool)),
            draft_pass=_fit_part(name, steps, steps.draft_s / np.maximum(steps.k, 1), drafts) if drafts.any() else None,
            host=_fit_part(name, steps, steps.host_s, np.ones(len(steps.k), bool)),
        )
    return _fit_whole(name, steps)


def _fit_part(name: str, steps: _Steps, seconds: np.ndarray, is_counted: np.ndarray) -> PartLaw:
    features = _features(steps.num_requests, steps.num_rows, steps.num_prompt_tokens)
    columns = np.ones(len(_NAMES), bool)
    if name == "rows":
        is_counted = is_counted & steps.is_decode_only
        columns = np.isin(_NAMES, ("step", "row", "root_row"))
    elif name == "requests":
        # Prompt rows count as rows: their cost is all that tells what a row costs.
        features[:, _NAMES.index("row")] += steps.num_prompt_tokens
        columns = np.isin(_NAMES, ("step", "request", "row", "prompt_chunk"))
        if (steps.num_prompt_tokens[is_counted] > 0).sum() < MIN_STEPS:
            columns &= ~np.isin(_NAMES, ("row",))
    return _part(features, seconds, columns, is_counted)


def _fit_whole(name: str, steps: _Steps) -> CostLaw:
    """Host and target together; drafting from the growth with k."""
    features = _features(steps.num_requests, steps.num_rows, steps.num_prompt_tokens)
    if len(np.unique(steps.k)) == 1:
        return CostLaw(name, _fit_part(name, steps, steps.step_s, np.ones(len(steps.k), bool)), None, None)
    both = np.concatenate([features, steps.k[:, None] * features], axis=1)
    part = _part(both, steps.step_s, np.ones(both.shape[1], bool), np.ones(len(steps.k), bool))
    width = len(_NAMES)
    halves = [
        PartLaw(part.coefficients[low : low + width], part.residual, part.num_left_out, part.left_out_share)
        for low in (0, width)
    ]
    return CostLaw(name, halves[0], halves[1], None)


def _features(num_requests: np.ndarray, num_rows: np.ndarray, num_prompt_tokens: np.ndarray) -> np.ndarray:
    """[num_steps, 6] In the order of _NAMES; rows are those of requests in decode."""
    rows = num_rows - num_prompt_tokens
    return np.stack(
        [np.ones(len(rows)), num_requests, rows, np.sqrt(rows), num_prompt_tokens, num_prompt_tokens > 0], axis=1
    ).astype(np.float64)


def _part(features: np.ndarray, seconds: np.ndarray, columns: np.ndarray, is_counted: np.ndarray) -> PartLaw:
    """Non-negative least squares of relative errors, refitted without what lies far off."""
    from scipy.optimize import nnls

    design, seconds = features[is_counted][:, columns], seconds[is_counted]
    scale = np.maximum(seconds, np.median(seconds) / 10)  # a part of hardly any time must not rule the fit
    is_near = np.ones(len(seconds), bool)
    for _ in range(_NUM_REFITS):
        # A step's own time as its weight would favour short ones by chance: that of its kind does not.
        near = is_near & (scale > 0)
        size = np.abs(design[near]).max(axis=0)
        fitted, _ = nnls(design[near] / scale[near, None] / np.maximum(size, 1), seconds[near] / scale[near])
        fitted = fitted / np.maximum(size, 1)
        predicted = design @ fitted
        scale = np.maximum(predicted, np.median(seconds) / 10)
        error = (seconds - predicted) / scale
        deviation = 1.4826 * np.median(np.abs(error[near]))
        is_near = np.abs(error) <= max(_OUTLIER_DEVIATIONS * deviation, 1e-9)
    coefficients = np.zeros(len(columns))
    coefficients[columns] = fitted
    return PartLaw(
        coefficients,
        residual=float(np.median(np.abs(error[is_near]))),
        num_left_out=int((~is_near).sum()),
        left_out_share=float(seconds[~is_near].sum() / seconds.sum()) if seconds.sum() else 0.0,
    )
