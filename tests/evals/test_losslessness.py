"""Losslessness around targets that follow a given law: what is compared and how, and that a wrong law shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from specbench.evals import losslessness
from specbench.evals.losslessness import Sides, Speculation, check_losslessness, sampling_label
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel
from specbench.generate import (
    GenerateListener,
    GenerateRequest,
    GenerateResult,
    Load,
    SamplingParams,
    TokenLogprob,
)
from specbench.records import LosslessnessCheck, OutputCheck, RequestRecord

VOCAB = 6
LAW = np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04])
SPECULATION = Speculation("mtp_multi", 2, "standard", is_one_hot=True, is_fp32=True)


class LawTarget:
    """Draws each token from a law, keyed by seed, sample and position alone; its greedy text is given.

    `departs(rng, token)` is what a broken verification makes of a token.
    """

    def __init__(self, greedy: dict[str, list[int]] | None = None, departs: Callable | None = None) -> None:
        self.greedy = greedy or {}
        self.departs = departs
        self.seen: list[GenerateRequest] = []

    def generate(self, requests: Iterable[GenerateRequest], load: Load, listener: GenerateListener) -> None:
        for request in requests:
            self.seen.append(request)
            listener.on_finished(self._result(request))

    def _result(self, request: GenerateRequest) -> GenerateResult:
        params = request.sampling
        if params.temperature == 0:
            tokens = self.greedy.get(request.sample_id, [1, 2, 3, 4])
        else:
            rng = np.random.default_rng([params.seed, *request.sample_id.encode()])
            tokens = rng.choice(VOCAB, size=params.max_output_tokens, p=LAW).tolist()
            if self.departs is not None:
                tokens = [self.departs(rng, token) for token in tokens]
        logprobs = None
        if params.logprobs is not None:
            assert params.processed_logprobs
            logprobs = [TokenLogprob(token, float(np.log(LAW[token])), 1, False, ()) for token in tokens]
        record = RequestRecord(
            request.request_id, request.sample_id, 0, 0, False, None, 3, 0, len(tokens), "length", 0, 0, 0, 0, 0, None
        )
        return GenerateResult(record, [], [1, 2, 3], tokens, "", logprobs=logprobs)


def requests_of(count: int, **sampling: object) -> list[GenerateRequest]:
    params = SamplingParams(**({"max_output_tokens": 12} | sampling))
    return [GenerateRequest(f"s{index}-t0-r0", f"s{index}", params, prompt="p") for index in range(count)]


def no_replay(result: GenerateResult) -> OutputCheck:
    raise AssertionError("nothing differs, so nothing is to be replayed")


def check(
    speculative: LawTarget,
    plain: LawTarget,
    requests: list[GenerateRequest],
    speculation: Speculation = SPECULATION,
    replay: Callable[[GenerateResult], OutputCheck] = no_replay,
) -> LosslessnessCheck:
    measured: list[GenerateResult] = []
    speculative.generate(requests, Load, GenerateListener(measured.append))  # type: ignore[arg-type]
    sides = Sides(speculation, speculative, plain, Load, replay)  # type: ignore[arg-type]
    return check_losslessness(sides, requests, measured, 150, lambda message: None)


def test_equal_greedy_texts_are_identical_and_measured_once() -> None:
    speculative, plain = LawTarget(), LawTarget()
    found = check(speculative, plain, requests_of(5))
    (cell,) = found.cells
    assert (found.status, cell.status, cell.identical, cell.compared) == ("identical", "identical", 5, 5)
    assert (cell.acceptance, cell.sampling, cell.proposer, cell.num_speculative_tokens) == (
        "argmax",
        "greedy",
        "mtp_multi",
        2,
    )
    assert len(speculative.seen) == len(plain.seen) == 5


@pytest.mark.parametrize(
    ("replayed", "status", "counts"),
    [
        (OutputCheck("mismatch", 1, 0, 0, 1, largest_margin=3.0, allowed_margin=0.2), "mismatch", (3, 0, 1)),
        (OutputCheck("near_ties", 1, 0, 1, 0, largest_margin=0.15, allowed_margin=0.2), "near_ties", (3, 1, 0)),
    ],
)
def test_a_difference_is_located_and_judged_by_its_replay(replayed: OutputCheck, status: str, counts: tuple) -> None:
    speculative = LawTarget(greedy={"s2": [1, 2, 9, 4]})
    found = check(speculative, LawTarget(), requests_of(4), replay=lambda result: replayed)
    assert found.status == status
    (cell,) = found.cells
    assert (cell.identical, cell.near_ties, cell.mismatches) == counts
    assert found.differences == [
        {
            "request_id": "s2-t0-r0",
            "output_index": 2,
            "speculative": 9,
            "plain": 3,
            "margin": replayed.largest_margin,
            "allowed": 0.2,
            "is_near_tie": status == "near_ties",
        }
    ]


def test_where_the_speculative_text_is_plain_decodings_own_the_plain_sides_is_judged() -> None:
    def replay(result: GenerateResult) -> OutputCheck:
        status = "identical" if 9 not in result.output_token_ids else "mismatch"
        return OutputCheck(status, 1, 0, 0, 0, max_logit_difference=0.1, largest_margin=5.0)

    found = check(LawTarget(), LawTarget(greedy={"s0": [9]}), requests_of(1), replay=replay)
    assert found.status == "mismatch"


def test_a_text_that_ends_early_differs_where_it_ends() -> None:
    replayed = OutputCheck("mismatch", 1, 0, 0, 1)
    found = check(LawTarget(greedy={"s0": [1, 2]}), LawTarget(), requests_of(1), replay=lambda result: replayed)
    (difference,) = found.differences
    assert (difference["output_index"], difference["speculative"], difference["plain"]) == (2, None, 3)
    assert difference["allowed"] is None


def test_one_hot_drafts_at_a_temperature_are_compared_token_for_token_and_in_law() -> None:
    found = check(LawTarget(), LawTarget(), requests_of(16, temperature=0.7, top_k=20))
    tests = [(cell.test, cell.sampling, cell.acceptance, cell.status) for cell in found.cells]
    label = "temperature 0.7, top_k 20"
    assert tests == [
        ("token for token", "greedy", "argmax", "identical"),
        ("token for token", label, "sample and match", "identical"),
        (f"law of output tokens 1 to {int(found.cells[2].test.split()[-1])}", label, "sample and match", "consistent"),
        ("probability of emitted tokens", label, "sample and match", "consistent"),
    ]
    law, probability = found.cells[2:]
    assert law.compared == 2 * 4 * 150 and law.detectable is not None and law.detectable < 0.5
    assert probability.compared == 16 and probability.detectable is not None


def test_draws_from_a_law_are_compared_in_law_alone() -> None:
    found = check(LawTarget(), LawTarget(), requests_of(16, temperature=1.0), replace(SPECULATION, is_one_hot=False))
    assert [cell.acceptance for cell in found.cells] == ["argmax", "standard", "standard"]
    assert found.status == "consistent"


def test_the_two_sides_never_share_a_seed_where_laws_are_compared() -> None:
    speculative, plain = LawTarget(), LawTarget()
    check(speculative, plain, requests_of(12, temperature=1.0), replace(SPECULATION, is_one_hot=False))
    seeds = [{r.sampling.seed for r in side.seen if r.sampling.temperature > 0} for side in (speculative, plain)]
    assert seeds[0].isdisjoint(seeds[1])


def favours_the_likeliest(rng: np.random.Generator, token: int) -> int:
    return 0 if rng.random() < 0.3 else token


def favours_the_rare(rng: np.random.Generator, token: int) -> int:
    return 5 if rng.random() < 0.3 else token


@pytest.mark.parametrize("departs", [favours_the_likeliest, favours_the_rare])
def test_a_wrong_law_is_a_mismatch_in_both_tests(departs: Callable) -> None:
    found = check(
        LawTarget(departs=departs),
        LawTarget(),
        requests_of(24, temperature=1.0, max_output_tokens=60),
        replace(SPECULATION, is_one_hot=False),
    )
    assert [cell.status for cell in found.cells] == ["identical", "mismatch", "mismatch"]
    assert found.status == "mismatch"


def test_a_wrong_one_hot_sample_is_a_mismatch_without_a_replay() -> None:
    """A replay takes the argmax: it cannot judge samples."""
    found = check(LawTarget(departs=favours_the_rare), LawTarget(), requests_of(4, temperature=1.0))
    assert found.cells[1].status == "mismatch" and found.cells[1].mismatches == 4


def test_below_fp32_the_laws_judge_samples_that_part() -> None:
    turned = LawTarget(departs=lambda rng, token: token if rng.random() > 0.002 else 0)
    found = check(turned, LawTarget(), requests_of(40, temperature=1.0), replace(SPECULATION, is_fp32=False))
    cell = found.cells[1]
    assert (cell.status, cell.mismatches) == ("not_checked", 0) and cell.identical is not None
    assert cell.identical < 40 and f"{40 - cell.identical} of 40 samples part" in str(cell.reason)
    assert found.status == "consistent"
    assert check(LawTarget(), LawTarget(), requests_of(40, temperature=1.0), SPECULATION).cells[1].status == "identical"


def test_requests_that_fail_on_a_side_are_not_compared() -> None:
    class Failing(LawTarget):
        def _result(self, request: GenerateRequest) -> GenerateResult:
            result = super()._result(request)
            return replace(result, record=replace(result.record, error="made to fail"))

    for temperature in (0.0, 1.0):
        found = check(Failing(), LawTarget(), requests_of(2, temperature=temperature))
        assert found.status == "not_checked"
        assert {(cell.status, cell.compared) for cell in found.cells} == {("not_checked", 0)}


def test_too_few_prompts_for_a_paired_test_say_so() -> None:
    found = check(LawTarget(), LawTarget(), requests_of(5, temperature=1.0))
    cell = found.cells[-1]
    assert (cell.status, cell.p_value) == ("not_checked", None)
    assert cell.reason is not None and "5 prompts" in cell.reason and "11" in cell.reason


def test_the_law_is_of_the_longest_beginning_that_repeats() -> None:
    draws = [(0, 1, index) for index in range(50)]
    assert losslessness._repeating_length([(draws, draws)], 3) == 2
    assert losslessness._repeating_length([([(0, 1, 2)] * 50, [(0, 1, 2)] * 50)], 3) == 3
    assert losslessness._repeating_length([([(index,) for index in range(50)], [])], 1) == 1


def test_labels() -> None:
    assert sampling_label(SamplingParams(5)) == "greedy"
    params = SamplingParams(5, temperature=0.5, top_p=0.9, min_p=0.1, repetition_penalty=1.1)
    assert sampling_label(params) == "temperature 0.5, top_p 0.9, min_p 0.1, repetition_penalty 1.1"


def test_prompts_of_either_kind_of_row(eval_config: Callable, write_jsonl: Callable) -> None:
    config = eval_config(name="losslessness", scorer=None, num_law_draws=50)
    packaged = load_task(config, EvalModel(is_packaged=True))
    assert (packaged.name, packaged.data.name, packaged.num_law_draws) == ("losslessness", "nano_problems", 50)
    assert packaged.scorers == () and packaged.headline is None
    problems = write_jsonl([{"question": "1 + 1?", "answer": "#### 2"}], "problems.jsonl")
    assert load_task(replace(config, data=problems), EvalModel(is_packaged=False)).samples[0].messages is not None
    rows = write_jsonl([{"prompt_token_ids": [1, 2]}, {"prompt": json.dumps("x")}], "rows.jsonl")
    assert len(load_task(replace(config, data=rows), EvalModel(is_packaged=False)).samples) == 2
