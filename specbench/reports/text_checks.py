"""Health checks of the text that was decoded: is it text of the kind that the acceptance is claimed for?

Belongs here: repetition, forced length, made-up tokens and made-up acceptance. Does not belong here: the drafter
(drafting_checks.py).
"""

from __future__ import annotations

import numpy as np

from specbench.reports.clusters import MIN_SAMPLES, SampleRatio
from specbench.reports.health_check import Evidence, Finding, HealthCheck, judged, not_checked
from specbench.reports.number_format import count, decimal, percent
from specbench.reports.token_table import pack_tokens

#: Long enough that text that moves on hardly ever says it twice.
LOOP_NGRAM = 8
#: A loop: half of an output's n-grams occurred in it before.
LOOP_SHARE = 0.5
#: Outputs with fewer n-grams are too short to loop.
MIN_LOOP_TOKENS = 32
#: Loops are raised where acceptance length rests on them for more than this share of it ...
LOOP_EFFECT = 0.01
#: ... and for more of its standard errors than one looping sample among others can move it.
LOOP_STANDARD_ERRORS = 2.0
#: Prompts of random ids hardly repeat a token; text of this length always does.
MIN_RANDOM_TOKENS = 64
RANDOM_DISTINCT_SHARE = 0.95


def _repetition(evidence: Evidence) -> Finding:
    if evidence.no_drafts is not None:
        return not_checked(evidence.no_drafts)
    table = evidence.outputs
    is_judged = table.num_tokens >= MIN_LOOP_TOKENS
    if not is_judged.any():
        return not_checked(f"no output of {MIN_LOOP_TOKENS} tokens was recorded")
    is_loop = np.zeros(table.num_packed, bool)
    is_loop[is_judged] = table.repeated_ngram_share(LOOP_NGRAM)[is_judged] >= LOOP_SHARE
    looked_at, looping = _accepted(evidence, table.index), _accepted(evidence, table.index[is_loop])
    others = SampleRatio(looked_at.numerator - looping.numerator, looked_at.denominator - looping.denominator)
    text = (
        f"{count(int(is_loop.sum()))} of {count(int(is_judged.sum()))} outputs of {MIN_LOOP_TOKENS} tokens or more loop"
    )
    numbers: dict = {"loops": int(is_loop.sum()), "outputs": int(is_judged.sum())}
    if not looping.total:
        return judged(False, text, numbers)
    if not others.total:
        return judged(True, f"{text}: every draft that could be looked at is in a loop", numbers)
    estimate = looked_at.estimate()
    effect = estimate.value - others.value
    share = effect / (1 + estimate.value)
    text += (
        f"; acceptance length {decimal(1 + estimate.value)}, {decimal(1 + others.value)} without them "
        f"({100 * share:+.1f}%, standard error {100 * estimate.standard_error / (1 + estimate.value):.1f}%)"
    )
    numbers |= {"acceptance_length": 1 + estimate.value, "without_loops": 1 + others.value}
    is_raised = share > LOOP_EFFECT and effect > LOOP_STANDARD_ERRORS * estimate.standard_error
    return judged(is_raised, text, numbers)


def _accepted(evidence: Evidence, chosen: np.ndarray) -> SampleRatio:
    """Accepted tokens over drafts of the requests of the `chosen` entries of evidence.samples, by sample."""
    keys = {(one.sample_id, one.turn, one.repeat) for one in (evidence.samples[index] for index in chosen)}
    is_chosen = np.array([(one.sample_id, one.turn, one.repeat) in keys for one in evidence.columns.requests], bool)
    return evidence.ratio_of_requests(evidence.accepted_of_request * is_chosen, evidence.drafts_of_request * is_chosen)


def _real_text(evidence: Evidence) -> Finding:
    """Acceptance that another tool gave in sum is judged too."""
    if not evidence.metrics["acceptance"]["drafts"]:
        return not_checked("no acceptance is reported")
    sampling, spec = evidence.run.config.get("sampling", {}), evidence.run.config["spec"]
    distinct, num_prompts = _distinct_share(evidence)
    reasons = []
    if sampling.get("ignore_eos"):
        reasons.append("ignore_eos: texts went on behind their end")
    if "random" in f"{evidence.run.data.name} {evidence.run.config['eval']['name']}".lower():
        reasons.append(f"the data are named {evidence.run.data.name!r}")
    if distinct is not None and distinct > RANDOM_DISTINCT_SHARE:
        reasons.append(f"prompts look like random ids: {percent(distinct)} of their tokens are distinct")
    if spec.get("rejection_sample_method") == "synthetic":
        reasons.append("rejection_sample_method=synthetic: acceptance was set, not measured")
    if evidence.run.config.get("model", {}).get("load") == "random":
        reasons.append("model.load=random: weights drawn at random draft and verify nothing that was learnt")
    numbers = {"distinct_share": distinct, "prompts": num_prompts}
    if reasons:
        return judged(True, "; ".join(reasons), numbers)
    if sampling.get("ignore_eos") is None:
        return not_checked("the run's settings do not say whether texts were cut off at their end")
    looked_at = "too few prompts were long enough to look at"
    if distinct is not None:
        looked_at = f"{percent(distinct)} of a prompt's tokens are distinct (median of {count(num_prompts)})"
    return judged(False, f"texts end where the model ends them; {looked_at}", numbers)


def _distinct_share(evidence: Evidence) -> tuple[float | None, int]:
    """(median share of distinct tokens, prompts) over prompts long enough; None under 20 of them."""
    table = pack_tokens(one.prompt_token_ids or () for one in evidence.samples)
    is_long = table.num_tokens >= MIN_RANDOM_TOKENS
    num_prompts = int(is_long.sum())
    return (float(np.median(table.distinct_share[is_long])) if num_prompts >= MIN_SAMPLES else None), num_prompts


CHECKS = (
    HealthCheck(
        name="repetition",
        title="Acceptance does not rest on loops",
        threshold=f"outputs that repeat half of their {LOOP_NGRAM}-grams lift acceptance length by no more than "
        f"{percent(LOOP_EFFECT)} and {LOOP_STANDARD_ERRORS:g} standard errors",
        why="a text that repeats itself is easy to draft; acceptance on it says nothing of useful text",
        where="the outputs in samples.parquet; the chat template, the stop tokens, temperature 0 on a small model",
        look=_repetition,
    ),
    HealthCheck(
        name="real_text",
        title="Acceptance is of real text",
        threshold="no ignore_eos, no random prompts, no synthetic acceptance, no random weights",
        why="text behind its end, or from random tokens, is drafted unlike text that anybody asks for",
        where="sampling.ignore_eos, eval.data, spec.rejection_sample_method",
        look=_real_text,
    ),
)
