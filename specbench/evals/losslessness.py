"""Losslessness: whether requests say the same with and without speculation, and by which test that was found.

Belongs here: the prompts, what is run on either side, and the cells of the table. Does not belong here: how a side
generates (it is asked through the Generate protocol), statistics (law_tests.py), the table's words (reports/).

Three tests, each where it means something:
    token for token   greedy; and at a temperature where each draft is one token rather than a law (greedy drafting,
                      prompt lookup): with the same seeds both sides then draw the same text. A first difference is
                      located and, where greedy, replayed: a near tie is one that rounding can turn, all else is a
                      mismatch.
    law of tokens     at a temperature: the first few tokens behind a prompt, drawn many times on either side with other
                      seeds. Exact, but short: it needs outcomes that repeat.
    probability       at a temperature, on whole outputs of any model: the target's own probability of the tokens that
                      either side emitted, paired by prompt and position.

Data: eval.data=FILE (rows of gsm8k, or of prompts), else what eval=gsm8k takes. Nothing is scored.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specbench.evals.gsm8k import load_gsm8k
from specbench.evals.law_tests import LEVEL, TestResult, compare_laws, compare_paired, min_pairs
from specbench.evals.prompts import load_prompts
from specbench.evals.rows import read_rows
from specbench.evals.task import EvalModel, Task
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult, Load, SamplingParams, Target
from specbench.records import LosslessnessCell, LosslessnessCheck, OutputCheck
from specbench.run_config import EvalConfig

#: Prompts whose first tokens are drawn again and again.
_NUM_LAW_PROMPTS = 4
#: The law is that of the longest beginning of which draws still repeat: distinct outcomes a draw, at most.
_MAX_DISTINCT_SHARE = 0.2
#: Seeds of the plain side are these many away from those of the speculative side.
_PLAIN_SEEDS = 1_000_003
_NUM_DIFFERENCES_KEPT = 10

#: Replays one greedy result without speculation.
Replay = Callable[[GenerateResult], OutputCheck]
Pair = tuple[GenerateResult, GenerateResult]


def load_losslessness(config: EvalConfig, model: EvalModel) -> Task:
    """The prompts, unscored; what is compared is decided by the run's sampling."""
    unscored = dataclasses.replace(config, scorer=None)
    if config.data is not None and "question" not in read_rows(config.data, "eval.data").rows[0].value:
        task = load_prompts(unscored, model)
    else:
        task = load_gsm8k(unscored, model)
    return dataclasses.replace(task, name="losslessness", scorers=(), headline=None, num_law_draws=config.num_law_draws)


@dataclass(frozen=True, slots=True)
class Speculation:
    """What a cell's row of the table is about."""

    proposer: str
    num_speculative_tokens: int
    #: How drafts with probabilities are accepted: "standard" or "block".
    rejection_sample_method: str
    #: Whether a draft is one token rather than a draw from a law: then both sides draw the same text.
    is_one_hot: bool
    #: Whether logits are computed in fp32, where rounding turns no sample.
    is_fp32: bool


@dataclass(frozen=True, slots=True)
class Sides:
    """Two targets that differ in speculation alone."""

    speculation: Speculation
    speculative: Target
    plain: Target
    load: Load
    replay: Replay


def check_losslessness(
    sides: Sides,
    requests: Sequence[GenerateRequest],
    measured: Sequence[GenerateResult],
    num_law_draws: int,
    on_progress: Callable[[str], None],
) -> LosslessnessCheck:
    """Every test that the requests' sampling allows. `measured` are the speculative side's results of `requests`."""
    params = requests[0].sampling
    greedy = [dataclasses.replace(request, sampling=_greedy(request.sampling)) for request in requests]
    texts = []
    on_progress("comparing greedy texts with plain decoding")
    is_greedy = params.temperature == 0
    texts.append(compare_texts(sides, greedy, measured if is_greedy else _run(sides.speculative, greedy, sides.load)))
    cells = []
    if not is_greedy:
        if sides.speculation.is_one_hot:
            on_progress("comparing sampled texts with plain sampling")
            texts.append(compare_texts(sides, requests, measured))
        on_progress("drawing the first tokens again and again, with and without speculation")
        cells.append(_law_cell(sides, _shortest(requests, measured), num_law_draws))
        on_progress("comparing the probability of emitted tokens")
        cells.append(_probability_cell(sides, requests))
    return LosslessnessCheck(
        status=_overall([cell.status for cell, _ in texts] + [cell.status for cell in cells]),
        cells=[*(cell for cell, _ in texts), *cells],
        differences=[difference for _, found in texts for difference in found][:_NUM_DIFFERENCES_KEPT],
    )


def _overall(statuses: Sequence[str]) -> str:
    """The worst one that a cell has."""
    order = ("mismatch", "near_ties", "consistent", "identical", "not_checked")
    return next(status for status in order if status in statuses)


# ---- Token for token


def compare_texts(
    sides: Sides, requests: Sequence[GenerateRequest], speculative: Sequence[GenerateResult]
) -> tuple[LosslessnessCell, list[dict]]:
    """Run the plain side and compare; the cell, and the first difference of each request that has one."""
    return judge_texts(sides, requests[0].sampling, speculative, _run(sides.plain, requests, sides.load))


def judge_texts(
    sides: Sides, params: SamplingParams, speculative: Sequence[GenerateResult], plain: Sequence[GenerateResult]
) -> tuple[LosslessnessCell, list[dict]]:
    """The two sides' results of the same requests, in any order, token for token."""
    pairs = _paired(speculative, plain)
    found = [difference for pair in pairs if (difference := _first_difference(pair)) is not None]
    by_id = {pair[0].record.request_id: pair for pair in pairs}
    if params.temperature == 0:
        for difference in found:
            difference |= _replayed(sides.replay, by_id[difference["request_id"]])
    elif found and not sides.speculation.is_fp32:
        return _samples_that_rounding_may_have_turned(sides, params, len(pairs), len(found)), []
    num_near_ties = sum(difference["is_near_tie"] for difference in found)
    num_mismatches = len(found) - num_near_ties
    status = "mismatch" if num_mismatches else "near_ties" if num_near_ties else "identical"
    cell = dataclasses.replace(
        _cell(sides.speculation, params, "token for token", len(pairs)),
        status=status if pairs else "not_checked",
        identical=len(pairs) - len(found),
        near_ties=num_near_ties,
        mismatches=num_mismatches,
    )
    return cell, sorted(found, key=lambda difference: difference["is_near_tie"])


def _samples_that_rounding_may_have_turned(
    sides: Sides, params: SamplingParams, num_pairs: int, num_found: int
) -> LosslessnessCell:
    """A replay cannot tell a sample that rounding turned from a wrong one: the tests of laws have to."""
    return dataclasses.replace(
        _cell(sides.speculation, params, "token for token", num_pairs),
        identical=num_pairs - num_found,
        near_ties=0,
        mismatches=0,
        reason=f"{num_found} of {num_pairs} samples part, which rounding below fp32 explains as well as a fault does",
    )


def _replayed(replay: Replay, pair: Pair) -> dict:
    """What a replay makes of two greedy texts that part: of the speculative one, or where that is plain decoding's own
    token for token, of the plain side's."""
    check = replay(pair[0])
    if check.status == "identical":
        check = replay(pair[1])
    return {"margin": check.largest_margin, "allowed": check.allowed_margin, "is_near_tie": check.status == "near_ties"}


def _first_difference(pair: Pair) -> dict | None:
    """Where two texts part; None where they don't."""
    speculative, plain = (list(result.output_token_ids) for result in pair)
    if speculative == plain:
        return None
    parted = (index for index, (left, right) in enumerate(zip(speculative, plain, strict=False)) if left != right)
    index = next(parted, min(len(speculative), len(plain)))
    return {
        "request_id": pair[0].record.request_id,
        "output_index": index,
        "speculative": speculative[index] if index < len(speculative) else None,
        "plain": plain[index] if index < len(plain) else None,
        "margin": None,
        "allowed": None,
        "is_near_tie": False,
    }


# ---- The law of the first tokens


def _shortest(requests: Sequence[GenerateRequest], measured: Sequence[GenerateResult]) -> list[GenerateRequest]:
    """A few prompts that cost little to run again and again."""
    lengths = {result.record.request_id: len(result.prompt_token_ids) for result in measured}
    longest = max(lengths.values(), default=0)
    return sorted(requests, key=lambda request: lengths.get(request.request_id, longest))[:_NUM_LAW_PROMPTS]


def _law_cell(sides: Sides, chosen: Sequence[GenerateRequest], num_draws: int) -> LosslessnessCell:
    # Behind the prefill's token, which nobody drafts, a whole window of drafts and the beginning of the next one.
    num_tokens = 1 + sides.speculation.num_speculative_tokens + 2
    speculative = _run(sides.speculative, _draws(chosen, num_draws, num_tokens, 0), sides.load)
    plain = _run(sides.plain, _draws(chosen, num_draws, num_tokens, _PLAIN_SEEDS), sides.load)
    drawn = [_beginnings(results, request) for request in chosen for results in (speculative, plain)]
    strata = [(left, right) for left, right in zip(drawn[0::2], drawn[1::2], strict=True) if left and right]
    if not strata:
        cell = _cell(sides.speculation, chosen[0].sampling, "law of output tokens", 0)
        return dataclasses.replace(cell, reason="no prompt was drawn on both sides")
    length = _repeating_length(strata, num_tokens - 1)
    tested = compare_laws([_counts(left, right, length) for left, right in strata])
    cell = _cell(
        sides.speculation, chosen[0].sampling, f"law of output tokens 1 to {length}", 2 * len(chosen) * num_draws
    )
    return _with_result(cell, tested, "share of draws turned into the likeliest continuation")


def _draws(
    requests: Sequence[GenerateRequest], num_draws: int, num_tokens: int, first_seed: int
) -> list[GenerateRequest]:
    """The same prompts under many seeds, each a few tokens long, whatever ends a text."""
    return [
        dataclasses.replace(
            request,
            request_id=f"{request.request_id}-law{first_seed + draw}",
            sampling=dataclasses.replace(
                request.sampling,
                seed=request.sampling.seed + first_seed + draw + 1,
                max_output_tokens=num_tokens,
                ignore_eos=True,
                stop=(),
                stop_token_ids=(),
            ),
        )
        for draw in range(num_draws)
        for request in requests
    ]


def _beginnings(results: Sequence[GenerateResult], request: GenerateRequest) -> list[tuple[int, ...]]:
    """The tokens behind the first of each draw of the request's prompt."""
    return [
        tuple(result.output_token_ids[1:])
        for result in results
        if (result.record.sample_id, result.record.turn) == (request.sample_id, request.turn)
        and result.record.error is None
    ]


def _repeating_length(strata: Sequence[tuple[list, list]], num_tokens: int) -> int:
    """The longest beginning of which draws still repeat. It looks at both sides together, so it favours none."""
    pooled = [left + right for left, right in strata]
    num_draws = sum(map(len, pooled))
    for length in range(num_tokens, 1, -1):
        num_distinct = sum(len({draw[:length] for draw in draws}) for draws in pooled)
        if num_distinct <= _MAX_DISTINCT_SHARE * num_draws:
            return length
    return 1


def _counts(left: list[tuple[int, ...]], right: list[tuple[int, ...]], length: int) -> tuple[np.ndarray, np.ndarray]:
    sides = [Counter(draw[:length] for draw in draws) for draws in (left, right)]
    outcomes = sorted(sides[0] | sides[1])
    return tuple(np.array([side[outcome] for outcome in outcomes]) for side in sides)  # type: ignore[return-value]


# ---- The probability of emitted tokens


def _probability_cell(sides: Sides, requests: Sequence[GenerateRequest]) -> LosslessnessCell:
    """Per prompt the mean difference, over the positions that both sides reached, of what the target thinks of the
    emitted tokens under the law that they were to be drawn from."""
    speculative = _run(sides.speculative, _with_logprobs(requests, 0), sides.load)
    plain = _run(sides.plain, _with_logprobs(requests, _PLAIN_SEEDS), sides.load)
    differences = []
    for left, right in _paired(speculative, plain):
        assert left.logprobs is not None and right.logprobs is not None
        both = zip(left.logprobs, right.logprobs, strict=False)
        differences.append(np.mean([mine.logprob - other.logprob for mine, other in both]))
    cell = _cell(sides.speculation, requests[0].sampling, "probability of emitted tokens", len(differences))
    if len(differences) < min_pairs():
        return dataclasses.replace(
            cell, reason=f"{len(differences)} prompts cannot show a difference at this level; {min_pairs()} can"
        )
    return _with_result(cell, compare_paired(np.array(differences)), "nats a token, mean over prompts")


def _with_logprobs(requests: Sequence[GenerateRequest], first_seed: int) -> list[GenerateRequest]:
    return [
        dataclasses.replace(
            request,
            sampling=dataclasses.replace(
                request.sampling, seed=request.sampling.seed + first_seed, logprobs=0, processed_logprobs=True
            ),
        )
        for request in requests
    ]


# ---- Common to all


def _run(target: Target, requests: Sequence[GenerateRequest], load: Load) -> list[GenerateResult]:
    results: list[GenerateResult] = []
    target.generate(requests, load, GenerateListener(results.append))
    return results


def _paired(speculative: Sequence[GenerateResult], plain: Sequence[GenerateResult]) -> list[Pair]:
    """By request, those that both sides completed. A turn behind answers that part has another prompt: left out."""
    others = {result.record.request_id: result for result in plain if result.record.error is None}
    both = [
        (result, others[result.record.request_id])
        for result in speculative
        if result.record.error is None and result.record.request_id in others
    ]
    return [pair for pair in both if list(pair[0].prompt_token_ids) == list(pair[1].prompt_token_ids)]


def _greedy(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def _cell(speculation: Speculation, params: SamplingParams, test: str, compared: int) -> LosslessnessCell:
    return LosslessnessCell(
        proposer=speculation.proposer,
        num_speculative_tokens=speculation.num_speculative_tokens,
        acceptance=_acceptance(speculation, params),
        sampling=sampling_label(params),
        test=test,
        status="not_checked",
        compared=compared,
    )


def _acceptance(speculation: Speculation, params: SamplingParams) -> str:
    """How drafts are verified under this sampling."""
    if params.temperature == 0:
        return "argmax"
    return "sample and match" if speculation.is_one_hot else speculation.rejection_sample_method


def sampling_label(params: SamplingParams) -> str:
    """ "greedy", or what shapes the law: `temperature 0.8, top_k 20`."""
    if params.temperature == 0:
        return "greedy"
    names = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    unset = SamplingParams(max_output_tokens=params.max_output_tokens)
    shaping = [(name, getattr(params, name)) for name in names if getattr(params, name) != getattr(unset, name)]
    return ", ".join([f"temperature {params.temperature:g}", *(f"{name} {value:g}" for name, value in shaping)])


def _with_result(cell: LosslessnessCell, tested: TestResult, unit: str) -> LosslessnessCell:
    return dataclasses.replace(
        cell,
        status="mismatch" if tested.p_value < LEVEL else "consistent",
        statistic=tested.statistic,
        p_value=tested.p_value,
        detectable=tested.detectable,
        detectable_unit=unit,
    )
