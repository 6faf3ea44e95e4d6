"""Health checks of drafting: do acceptance counts look as those of a rightly wired drafter do?

Belongs here: patterns in accepted counts that a broken draft path leaves, each with its threshold and its reason. Does
not belong here: the measuring (measurement_checks.py), the text (text_checks.py), a comparison with another run.

A check raises only where the counts lie ALARM_STANDARD_ERRORS beyond its threshold, with standard errors by sample. A
drafter that is evenly worse than it should be leaves no pattern: that needs known figures, or another run.
"""

from __future__ import annotations

import numpy as np

from specbench.reports.clusters import MIN_SAMPLES, Estimate, Moments, combination, slope
from specbench.reports.conditions import cached_fractions
from specbench.reports.health_check import (
    ALARM_P_VALUE,
    ALARM_STANDARD_ERRORS,
    FAILED,
    FULL,
    MIN_DRAFTS,
    REJECTED,
    WARNING,
    Evidence,
    Finding,
    HealthCheck,
    SampleJoint,
    judged,
    not_checked,
)
from specbench.reports.known_acceptance import is_one_module, known_acceptance
from specbench.reports.number_format import count, decimal, percent
from specbench.reports.request_spread import request_spread

#: Under this at position 0, all k drafts together add less than a tenth of k tokens to a step: less than they cost.
LOW_ACCEPTANCE = 0.10
#: Of position 0, for a deeper position given the one before it. With natural text it is about 1 or more once the chain
#: did not break; the packaged model's weakest module reaches 0.83.
DEEPER_SHARE = 0.75
#: Of position 0. A repeated module 0, read where it was never trained to be, falls under half at once.
FIRST_ONLY_SHARE = 0.5
#: Of position 0 after a rejection, for position 0 after full acceptance. Hard text is followed by hard text, so it is
#: above 1; text of a fixed pattern can bring it down to 0.9.
AFTER_FULL_SHARE = 0.9
#: Of a published figure: prompts, templates and shots move acceptance by some percent, wiring mistakes by more.
OTHER_TEXT_SHARE = 0.9
#: Share of accepted drafts lost for each doubling of a length: from 256 to 8,192 tokens, a quarter. The same share
#: lost between a prompt that was not cached and one that was cached whole.
LOSS_OF_TREND = 0.05
#: A trend is not checked where only a loss of more than this would raise it.
LARGEST_UNSEEN_LOSS = 0.5
#: Standard deviation between requests over their mean, as if one request in ten had accepted nothing: sqrt(0.1 / 0.9).
SPREAD_OF_A_DEAD_TENTH = 1 / 3


def _too_few(evidence: Evidence) -> Finding | None:
    if evidence.no_drafts is not None:
        return not_checked(evidence.no_drafts)
    if evidence.all_drafts.given_the_previous(0).total < MIN_DRAFTS:
        return not_checked("the counts of drafts contradict each other")
    if evidence.num_samples < MIN_SAMPLES:
        return not_checked(f"{evidence.num_samples} samples, fewer than {MIN_SAMPLES}: not enough to tell chance")
    return None


def _near_zero(evidence: Evidence) -> Finding:
    if (too_few := _too_few(evidence)) is not None:
        return too_few
    position_0 = evidence.all_drafts.given_the_previous(0).estimate()
    commonest = evidence.outputs.commonest_share
    upper = position_0.value + 2 * position_0.standard_error
    text = f"position 0 accepted {percent(position_0.value)}"
    if commonest is not None:
        text += f"; always drafting the commonest token would reach about {percent(commonest)}"
    status = FAILED if commonest is not None and upper < commonest else WARNING
    numbers = {"position_0": position_0.value, "upper": upper, "commonest_token": commonest}
    return judged(upper < max(LOW_ACCEPTANCE, commonest or 0.0), text, numbers, status)


def _deeper(evidence: Evidence) -> Finding:
    if (too_few := _too_few(evidence)) is not None:
        return too_few
    if evidence.k < 2:
        return not_checked("one draft a step has no deeper position")
    found = [
        _weakest(evidence.all_drafts, "all drafts"),
        _weakest(evidence.by_history[FULL], "chains that never broke"),
    ]
    comparisons = [one for one in found if one is not None]
    if not comparisons:
        return not_checked(f"no deeper position was reached by {MIN_DRAFTS} drafts")
    worst = min(comparisons, key=lambda one: one[0])
    return judged(worst[0] <= -ALARM_STANDARD_ERRORS, worst[1], worst[2])


def _weakest(joint: SampleJoint, where: str) -> tuple[float, str, dict] | None:
    """The deeper position that lies lowest against its threshold: (standard errors from it, text, numbers)."""
    first = joint.given_the_previous(0)
    if first.total < MIN_DRAFTS:
        return None
    found = []
    for position in range(1, joint.steps.shape[2] - 1):
        deeper = joint.given_the_previous(position)
        if deeper.total >= MIN_DRAFTS:
            away = combination([(1.0, deeper), (-DEEPER_SHARE, first)]).standard_errors_from(0.0)
            found.append((away, position, deeper))
    if not found:
        return None
    away, position, deeper = min(found, key=lambda one: one[0])
    text = (
        f"weakest is position {position}: {percent(deeper.value)} of {count(deeper.total)} that reached it, against "
        f"{percent(first.value)} at position 0 ({where})"
    )
    numbers = {"position": position, "rate": deeper.value, "reached": deeper.total, "position_0": first.value}
    return away, text, numbers | {"standard_errors": away}


def _first_only(evidence: Evidence) -> Finding:
    """Whether every deeper position that can be judged lies under half of position 0."""
    if (too_few := _too_few(evidence)) is not None:
        return too_few
    if evidence.k < 2:
        return not_checked("one draft a step has no deeper position")
    if is_one_module(evidence.run, evidence.k):
        return not_checked("one module drafts at every depth: spec.modules=single")
    joint = evidence.all_drafts
    first, second = joint.given_the_previous(0), joint.given_the_previous(1)
    if second.total < MIN_DRAFTS:
        return not_checked(f"position 1 was reached by {second.total} drafts, fewer than {MIN_DRAFTS}")
    deeper = [joint.given_the_previous(position) for position in range(1, evidence.k)]
    judgeable = [ratio for ratio in deeper if ratio.total >= MIN_DRAFTS]
    away = combination([(1.0, second), (-FIRST_ONLY_SHARE, first)]).standard_errors_from(0.0)
    is_raised = away <= -ALARM_STANDARD_ERRORS and all(
        ratio.value < FIRST_ONLY_SHARE * first.value for ratio in judgeable
    )
    text = f"position 0 {percent(first.value)}, then {', '.join(percent(ratio.value) for ratio in judgeable)}"
    numbers = {"position_0": first.value, "position_1": second.value, "standard_errors": away}
    modules = evidence.run.model.num_modules
    if modules:
        text += f"; {modules} modules in the checkpoint, k = {evidence.k}"
    return judged(is_raised, text, numbers | {"modules": modules or None})


def _after_full_acceptance(evidence: Evidence) -> Finding:
    if (too_few := _too_few(evidence)) is not None:
        return too_few
    full = evidence.by_history[FULL].given_the_previous(0)
    short = evidence.by_history[REJECTED].given_the_previous(0)
    if min(full.total, short.total) < MIN_DRAFTS:
        return not_checked(
            f"{count(full.total)} drafts after full acceptance and {count(short.total)} after a rejection: each side "
            f"needs {MIN_DRAFTS}"
        )
    away = combination([(1.0, full), (-AFTER_FULL_SHARE, short)]).standard_errors_from(0.0)
    text = (
        f"position 0 accepted {percent(full.value)} of {count(full.total)} after full acceptance, "
        f"{percent(short.value)} of {count(short.total)} after a rejection"
    )
    numbers = {"after_full": full.value, "after_rejection": short.value, "standard_errors": away}
    return judged(away <= -ALARM_STANDARD_ERRORS, text, numbers)


def _context(evidence: Evidence) -> Finding:
    """Within requests, so that long requests of another kind do not matter."""
    if (too_few := _too_few(evidence)) is not None:
        return too_few
    columns = evidence.columns
    lengths = np.array([request.num_prompt_tokens for request in columns.requests], np.int64)
    # Behind a stop there is nothing to draft: a request's last step says little of its context.
    is_last = np.append(~columns.is_same_request, True)[: len(columns.request)]
    rows = np.flatnonzero(columns.is_draft & ~is_last)
    request = columns.request[rows]
    if len(rows) == 0:
        return not_checked("no request has two steps with drafts")
    start = np.flatnonzero(np.append(True, request[1:] != request[:-1]))
    context = np.log2(np.maximum(lengths[request] + columns.output_index[rows], 1))
    moments = Moments.of_runs(context, columns.num_accepted[rows].astype(np.float64), start)
    units = request[start]
    return _trend(moments, units, evidence.sample_of_request[units], "doubling of the context")


def _prompt_length(evidence: Evidence) -> Finding:
    lengths = np.array([request.num_prompt_tokens for request in evidence.columns.requests], np.int64)
    return _trend_over_requests(evidence, np.log2(np.maximum(lengths, 1)), "doubling of the prompt")


def _cached_fraction(evidence: Evidence) -> Finding:
    fraction = cached_fractions(evidence.columns)
    is_asked = fraction >= 0
    num_hits = int((fraction > 0).sum())
    if num_hits == 0:
        found_none = "no prompt token was found in the prefix cache"
        return not_checked(found_none if is_asked.any() else "no prefix cache was asked")
    num_cold = int(is_asked.sum()) - num_hits
    if min(num_hits, num_cold) < MIN_SAMPLES:
        return not_checked(
            f"{num_hits} requests with cached prompt tokens and {num_cold} without: each side needs {MIN_SAMPLES}"
        )
    return _trend_over_requests(evidence, fraction, "prompt that is cached whole", is_asked)


def _trend_over_requests(evidence: Evidence, x: np.ndarray, unit: str, is_counted: np.ndarray | None = None) -> Finding:
    """Over an x of requests [num_requests], within categories."""
    if (too_few := _too_few(evidence)) is not None:
        return too_few
    counted = 1.0 if is_counted is None else is_counted
    moments = Moments.of_units(x, evidence.accepted_of_request * counted, evidence.drafts_of_request * counted)
    return _trend(moments, evidence.category_of_request, evidence.sample_of_request, unit)


def _trend(moments: Moments, group: np.ndarray, sample: np.ndarray, unit: str) -> Finding:
    """Accepted drafts a step over x within groups, as a share of their mean."""
    mean = float(moments.y.sum() / max(moments.count.sum(), 1))
    estimate = slope(moments, group, sample) if mean else None
    if estimate is None:
        return not_checked("there is no variation to see a trend in" if mean else "nothing was accepted")
    change = Estimate(estimate.value / mean, estimate.standard_error / mean)
    smallest_loss = LOSS_OF_TREND + ALARM_STANDARD_ERRORS * change.standard_error
    text = (
        f"accepted drafts change by {100 * change.value:+.1f}% for each {unit} (standard error "
        f"{100 * change.standard_error:.1f}%); a loss of {percent(smallest_loss)} or more would raise this"
    )
    if smallest_loss > LARGEST_UNSEEN_LOSS:
        return not_checked(f"too little variation: {text}")
    numbers = {"change": change.value, "standard_error": change.standard_error, "smallest_loss": smallest_loss}
    return judged(change.value <= -smallest_loss, text, numbers)


def _requests_alike(evidence: Evidence) -> Finding:
    """Spread between requests of a category, against the spread between the two halves of a request.

    The halves hold what chance and the drift of one text do; an F test of the two mean squares asks for more.
    """
    from scipy.special import fdtrc

    if (too_few := _too_few(evidence)) is not None:
        return too_few
    spread = request_spread(evidence.columns, evidence.category_of_request)
    if spread is None:
        return not_checked(f"fewer than {MIN_SAMPLES} requests with two drafts or more")
    p_value = float(fdtrc(spread.num_requests - spread.num_categories, spread.num_requests, spread.ratio))
    text = (
        f"standard deviation between requests of {percent(spread.relative)} of the mean, {decimal(spread.ratio)} times "
        f"the variance that halves of one request show (p = {p_value:.2g}); lowest: {', '.join(spread.lowest)}"
    )
    is_raised = p_value <= ALARM_P_VALUE and spread.relative > SPREAD_OF_A_DEAD_TENTH
    numbers = {"relative_spread": spread.relative, "variance_ratio": spread.ratio, "p_value": p_value}
    return judged(is_raised, text, numbers)


def _known(evidence: Evidence) -> Finding:
    """Accepted drafts a step, and each position given the one before it, against the figures known of such a run."""
    if (too_few := _too_few(evidence)) is not None:
        return too_few
    known = known_acceptance(evidence.run, evidence.k)
    if known is None:
        return not_checked("nothing is known of this checkpoint on these data with this k and greedy decoding")
    share = 1.0 if known.is_same_text else OTHER_TEXT_SHARE
    joint = evidence.all_drafts
    found = [("accepted drafts a step", joint.accepted_per_draft, known.accepted_per_draft)]
    for position in range(known.k):
        found.append((f"position {position}", joint.given_the_previous(position), known.given_the_previous(position)))
    away, name, ratio, expected = min(
        (ratio.estimate().standard_errors_from(share * expected), name, ratio, expected)
        for name, ratio, expected in found
        if ratio.total >= MIN_DRAFTS
    )
    length = 1 + joint.accepted_per_draft.value
    text = (
        f"acceptance length {decimal(length)}, known is {decimal(1 + known.accepted_per_draft)} ({known.source}); "
        f"furthest below is {name}: {decimal(ratio.value, 3)}, known is {decimal(expected, 3)}"
    )
    numbers = {"acceptance_length": length, "known_length": 1 + known.accepted_per_draft, "standard_errors": away}
    return judged(away <= -ALARM_STANDARD_ERRORS, text, numbers)


_TREND_THRESHOLD = (
    f"a loss of more than {percent(LOSS_OF_TREND)} for each {{}}, by {ALARM_STANDARD_ERRORS:g} standard errors"
)

CHECKS = (
    HealthCheck(
        name="near_zero",
        title="Drafts are accepted at all",
        threshold=f"warning under {percent(LOW_ACCEPTANCE)} at position 0, failed under the commonest token's share",
        why="drafts that are never accepted cost time and give nothing; under the commonest token's share they know "
        "nothing of the text",
        where="the drafter's weights and dtype, its embedding and unembedding, the hidden state it reads, the shift of "
        "its input ids; at temperature > 0 a verifier that compares with the argmax",
        look=_near_zero,
    ),
    HealthCheck(
        name="known_acceptance",
        title="Acceptance is what is known of this checkpoint",
        threshold=f"no figure {ALARM_STANDARD_ERRORS:g} standard errors below the known one, or below "
        f"{OTHER_TEXT_SHARE:g} of it where the prompts may differ",
        why="a drafter that is evenly worse than it should be leaves no other trace in its own counts",
        where="what every module reads: the embedding and its norm, the hidden state before or after the final norm "
        "and its row, the weights; rows that a rejection made stale; then the prompt and the chat template",
        look=_known,
    ),
    HealthCheck(
        name="deeper_positions",
        title="Deeper positions hold",
        threshold=f"no position under {DEEPER_SHARE:g} of position 0 given the one before it, in all drafts or in "
        f"chains that never broke, by {ALARM_STANDARD_ERRORS:g} standard errors",
        why="once the chain has not broken the text is easy, so the rate given the previous position should be flat or "
        "rising with depth",
        where="the module index of each depth, the hidden state handed from one module to the next (and a norm "
        "between them), rows that a rejection made stale, the drafter's slot mapping",
        look=_deeper,
    ),
    HealthCheck(
        name="first_module_only",
        title="Deeper modules are not copies of the first",
        threshold=f"not every deeper position under {FIRST_ONLY_SHARE:g} of position 0 given the one before it, by "
        f"{ALARM_STANDARD_ERRORS:g} standard errors at position 1",
        why="module 0 run at every depth drafts well once and never again; counts cannot tell this from other breaks "
        "of the chain right behind position 0",
        where="the step index passed to the drafter's forward, the names that the loader maps weights of depth 1 and "
        "deeper to, spec.modules",
        look=_first_only,
    ),
    HealthCheck(
        name="after_full_acceptance",
        title="Full acceptance is followed by acceptance",
        threshold=f"position 0 after full acceptance at least {AFTER_FULL_SHARE:g} of that after a rejection, by "
        f"{ALARM_STANDARD_ERRORS:g} standard errors",
        why="easy text is followed by easy text; drafts that are worse after full acceptance start from a wrong row",
        where="which row's hidden state the first module reads when nothing was rejected, a drafter whose cache lags "
        "by the bonus token, the row after the last accepted draft",
        look=_after_full_acceptance,
    ),
    HealthCheck(
        name="context_length",
        title="Acceptance holds as a request grows",
        threshold=_TREND_THRESHOLD.format("doubling of prompt and output, within requests"),
        why="a drafter that sees rows it was not trained to see gets worse as the context grows",
        where="the window and the rotary or relative positions of the drafter's attention layers, blocks that are "
        "freed too early, the length it was trained on",
        look=_context,
    ),
    HealthCheck(
        name="prompt_length",
        title="Acceptance holds with the prompt's length",
        threshold=_TREND_THRESHOLD.format("doubling of the prompt, within categories"),
        why="where long prompts are no harder, this is the drafter's cache of the prompt: its chunks or its window",
        where="the edges of prompt chunks (known prompt tokens take the place of drafts there), the drafter's window; "
        "then whether long prompts are of another kind",
        look=_prompt_length,
    ),
    HealthCheck(
        name="cached_fraction",
        title="Acceptance holds with a cached prompt",
        threshold=_TREND_THRESHOLD.format("prompt that is cached whole, within categories"),
        why="a drafter reads ahead of its own slot, so cached rows may hold another request's continuation",
        where="what the drafter's blocks are keyed by, and whether its last rows are written again after a hit",
        look=_cached_fraction,
    ),
    HealthCheck(
        name="requests_alike",
        title="Requests differ by chance and text alone",
        threshold=f"standard deviation between requests of {percent(SPREAD_OF_A_DEAD_TENTH)} of the mean (as if one in "
        f"ten accepted nothing) with p under {ALARM_P_VALUE:g}",
        why="a fault that strikes some requests and not others hides in the mean",
        where="the requests named as lowest: their row, rank, preemptions, cached prompt; or a workload of several "
        "kinds without categories",
        look=_requests_alike,
    ),
)
