"""Whatever drafts are drawn from and however they are accepted, what is emitted has the target's joint law.

The five tokens behind the prefill's, through the engine's loop and its random keys, so at least two windows each. The
drafter's table is the target's with noise, with no mass on part of its support, and with mass outside of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specbench.engine.llm_engine import LLMEngine
from specbench.engine.sampling import verification
from specbench.engine.sampling.noise import DRAFT as DRAFT_PURPOSE
from specbench.engine.sampling.noise import uniform_noise
from specbench.generate import GenerateRequest, GenerateResult, SamplingParams
from tests.engine.harness import run, token_request
from tests.engine.markov import PERIOD, build_folder, exact_law, markov_engine, p_value
from tests.engine.sampling_reference import log_softmax, processed_logits

VOCAB = 5
PROMPT = (0, 3, 1)
NUM_TOKENS = 6
#: Chance of a false alarm of one test, were the seeds drawn anew.
LEVEL = 1e-4
#: draft_sample_method and rejection_sample_method
METHODS = [("greedy", "standard"), ("probabilistic", "standard"), ("probabilistic", "block")]
INF = float("inf")


def table(seed: int, spread: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PERIOD, VOCAB, VOCAB, generator=generator) * spread


def without(logits: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
    logits = logits.clone()
    logits[:, :, token_ids] = -INF
    return logits


TARGET = table(0)
DRAFT = 0.5 * TARGET + table(1, spread=1.0)
#: A target of little preference, and a drafter that is too sure: what a rejection leaves depends on all before it.
SURE_DRAFT = torch.stack([torch.tensor([0.5, 0.25, 0.12, 0.08, 0.05]).log().roll(shift) for shift in range(VOCAB)])
#: What the drafter proposes, and what the target says.
SUPPORTS = {
    "same": (DRAFT, TARGET),
    "drafter_too_sure": (SURE_DRAFT.expand(PERIOD, -1, -1), 0.2 * TARGET),
    "drafter_lacks_some": (without(DRAFT, [1, 4]), TARGET),
    "target_lacks_some": (DRAFT, without(TARGET, [2])),
    "little_in_common": (without(DRAFT, [0, 1]), without(TARGET, [3])),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("markov"))


def generate(
    folder: Path,
    k: int,
    method: tuple[str, str],
    params: Sequence[dict],
    tables: tuple[torch.Tensor, torch.Tensor] = SUPPORTS["same"],
    missing: float = 0.0,
    rates: tuple[float, ...] = (),
    prompt: tuple[int, ...] = PROMPT,
    **config: object,
) -> list[GenerateResult]:
    """One request for each of `params`, all in few batches."""
    draft, target = tables
    engine = markov_engine(
        folder,
        target,
        draft,
        k,
        missing=missing,
        draft_sample_method=method[0],
        rejection_sample_method=method[1],
        synthetic_acceptance_rates=rates,
        **config,
    )
    requests = [
        token_request(f"r{seed}", prompt, NUM_TOKENS, seed=seed, **({"temperature": 1.0} | each))
        for seed, each in enumerate(params)
    ]
    return list(run(engine, requests).values())


def sequences(results: Sequence[GenerateResult]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(result.output_token_ids[1:]) for result in results)


def accepted_counts(results: Sequence[GenerateResult]) -> Counter[int]:
    return Counter(step.num_accepted for result in results for step in result.verify_steps)


def law_of(target: torch.Tensor) -> dict[tuple[int, ...], float]:
    return exact_law(target.double().softmax(-1), PROMPT, NUM_TOKENS)


@pytest.mark.parametrize(("k", "support"), [(2, "same"), (3, "same"), (3, "drafter_too_sure")])
@pytest.mark.parametrize("method", METHODS)
def test_the_joint_law_is_the_targets(folder: Path, method: tuple[str, str], k: int, support: str):
    results = generate(folder, k, method, [{}] * 3000, SUPPORTS[support])
    assert set(accepted_counts(results)) == set(range(k + 1))
    assert p_value(sequences(results), law_of(SUPPORTS[support][1])) > LEVEL


@pytest.mark.parametrize("support", ["drafter_lacks_some", "target_lacks_some", "little_in_common"])
@pytest.mark.parametrize("method", METHODS[1:])
def test_the_joint_law_holds_where_one_side_has_no_mass(folder: Path, method: tuple[str, str], support: str):
    results = generate(folder, 3, method, [{}] * 1500, SUPPORTS[support])
    assert p_value(sequences(results), law_of(SUPPORTS[support][1])) > LEVEL


#: Sampling parameters, and what they leave of the target's logits, worked out by sorting.
FILTERS = {
    "temperature": ({"temperature": 0.6}, lambda logits: logits / 0.6),
    "top_k": ({"top_k": 2}, lambda logits: keep(logits, lambda rank, before, share: rank < 2)),
    "top_p": ({"top_p": 0.7}, lambda logits: keep(logits, lambda rank, before, share: before < 0.7)),
    "min_p": ({"min_p": 0.3}, lambda logits: keep(logits, lambda rank, before, share: share >= 0.3)),
    "all": (
        {"temperature": 1.7, "min_p": 0.05, "top_k": 3, "top_p": 0.8},
        lambda logits: keep(
            keep(logits / 1.7, lambda rank, before, share: (share >= 0.05) & (rank < 3)),
            lambda rank, before, share: before < 0.8,
        ),
    ),
}


def keep(logits: torch.Tensor, is_kept) -> torch.Tensor:
    """is_kept(rank, mass of more likely ids, share of the likeliest's probability) of each id, by sorting."""
    ordered, ids = logits.sort(dim=-1, descending=True)
    probabilities = ordered.softmax(-1)
    rank = torch.arange(logits.shape[-1]).expand_as(ordered)
    kept = is_kept(rank, probabilities.cumsum(-1) - probabilities, probabilities / probabilities[..., :1])
    return torch.full_like(logits, -INF).scatter(-1, ids, ordered.masked_fill(~kept, -INF))


@pytest.mark.parametrize("method", METHODS[1:])
def test_the_joint_law_holds_under_filters_in_a_mixed_batch(folder: Path, method: tuple[str, str]):
    names = list(FILTERS)
    results = generate(folder, 3, method, [FILTERS[names[seed % len(names)]][0] for seed in range(6_000)])
    by_name: dict[str, list[GenerateResult]] = {name: [] for name in names}
    for result in results:
        by_name[names[int(result.record.sample_id[1:]) % len(names)]].append(result)
    for name in names:
        assert p_value(sequences(by_name[name]), law_of(FILTERS[name][1](TARGET))) > LEVEL, name


#: Parameters under which a row's law depends on all tokens before it, drafts in its window included.
HISTORY = {
    "temperature": 0.9,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.4,
    "bad_word_token_ids": ((3,), (0, 4)),
    "min_tokens": 3,
    "stop_token_ids": (2,),
}


@pytest.fixture(scope="module")
def law_of_history() -> dict[tuple[int, ...], float]:
    """Enumerated prefix by prefix; sequences end early at the stop id."""
    params = SamplingParams(NUM_TOKENS, ignore_eos=True, **HISTORY)
    law, waiting = Counter(), {(): 1.0}
    while waiting:
        output, probability = waiting.popitem()
        logits = TARGET[(len(PROMPT) + len(output) - 1) % PERIOD, [*PROMPT, *output][-1]].tolist()
        for token_id, logprob in enumerate(log_softmax(processed_logits(logits, params, list(PROMPT), list(output)))):
            longer = (*output, token_id)
            if logprob > -INF:
                is_done = len(longer) == NUM_TOKENS or token_id == 2
                place = (law, longer[1:]) if is_done else (waiting, longer)
                place[0][place[1]] = place[0].get(place[1], 0.0) + probability * math.exp(logprob)
    return dict(law)


@pytest.mark.parametrize("method", METHODS)
def test_the_joint_law_holds_where_every_row_depends_on_the_drafts_before_it(
    folder: Path, law_of_history: dict[tuple[int, ...], float], method: tuple[str, str]
):
    results = generate(folder, 3, method, [HISTORY] * 2000)
    assert sum(law_of_history.values()) == pytest.approx(1.0)
    assert {len(sequence) for sequence in sequences(results)} == {3, 4, 5}
    assert p_value(sequences(results), law_of_history) > LEVEL


@pytest.mark.parametrize("method", METHODS)
def test_missing_drafts_leave_the_law_alone(folder: Path, method: tuple[str, str]):
    results = generate(folder, 3, method, [{}] * 1500, missing=0.3)
    steps = [step for result in results for step in result.verify_steps]
    assert {step.num_drafted for step in steps} == {0, 1, 2, 3}
    assert p_value(sequences(results), law_of(TARGET)) > LEVEL


@pytest.mark.parametrize("method", METHODS[1:])
def test_preemption_leaves_the_law_alone(folder: Path, method: tuple[str, str]):
    """Drafts that were drawn and never verified are dropped; a resumed request goes on with fresh windows."""
    results = generate(folder, 3, method, [{}] * 1500, max_num_seqs=64, num_blocks=100)
    assert sum(result.record.num_preemptions for result in results) > 250
    assert p_value(sequences(results), law_of(TARGET)) > LEVEL


@pytest.mark.parametrize("method", METHODS)
def test_a_step_in_flight_changes_nothing(folder: Path, method: tuple[str, str]):
    """Pipelined steps verify the same windows."""
    expected = generate(folder, 3, method, [{}] * 300)
    pipelined = generate(folder, 3, method, [{}] * 300, pipeline_depth=1)
    key = {result.record.request_id: result.output_token_ids for result in expected}
    assert {result.record.request_id: result.output_token_ids for result in pipelined} == key


def test_block_accepts_more_than_standard(folder: Path):
    """Never less in expectation; here by more than the noise of 10,000 steps."""
    means = []
    for method in METHODS[1:]:
        counts = accepted_counts(generate(folder, 3, method, [{}] * 3000))
        means.append(sum(count * times for count, times in counts.items()) / sum(counts.values()))
    assert means[1] > means[0] + 0.05


def test_coins_keyed_by_position_would_give_block_verification_a_wrong_law(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """A block's coin beyond the accepted prefix has been looked at. The next window must not see it again."""

    def keyed_by_position(keys, window_start, stream, vocab_ids):
        return uniform_noise(keys, window_start + stream // 4, stream % 4, vocab_ids)

    # The target tosses a coin; the drafter says 1 nine times of ten.
    tables = (torch.tensor([0.1, 0.9]).log().expand(PERIOD, 2, 2), torch.zeros(PERIOD, 2, 2))

    def p_value_of(method: tuple[str, str]) -> float:
        results = generate(folder, 3, method, [{}] * 2000, tables, prompt=(0, 1, 1))
        return p_value(sequences(results), exact_law(tables[1].softmax(-1), (0, 1, 1), NUM_TOKENS))

    assert p_value_of(METHODS[2]) > LEVEL
    monkeypatch.setattr(verification, "uniform_noise", keyed_by_position)
    assert p_value_of(METHODS[2]) < LEVEL
    # Standard verification looks at no coin behind the one that rejects, so no two windows share one.
    assert p_value_of(METHODS[1]) > LEVEL


def test_recovery_noise_shared_with_drafts_would_give_a_wrong_law(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """What lost against the draft would lose again too often: its noise was seen when the draft was drawn."""
    draft, target = (
        torch.tensor(law).log().expand(PERIOD, VOCAB, VOCAB)
        for law in ([0.48, 0.48, 0.02, 0.01, 0.01], [0.02, 0.6, 0.2, 0.1, 0.08])
    )

    def p_value_of_a_token() -> float:
        results = generate(folder, 2, METHODS[1], [{}] * 2000, (draft, target))
        tokens = Counter((result.output_token_ids[1],) for result in results)
        return p_value(tokens, exact_law(target.softmax(-1), PROMPT, 2))

    assert p_value_of_a_token() > LEVEL
    monkeypatch.setattr(verification, "RECOVERY", DRAFT_PURPOSE)
    assert p_value_of_a_token() < LEVEL


@pytest.mark.parametrize("method", METHODS[1:])
def test_a_mixed_batch_gives_every_request_what_it_gets_alone(folder: Path, method: tuple[str, str]):
    """Greedy or sampled, filtered, penalised or not; each with its own seed, number of drafts to verify and outcome of
    the drafter."""
    kinds = [
        {"temperature": 0.0},
        *(params for params, _ in FILTERS.values()),
        {"temperature": 0.0, "top_k": 2},
        HISTORY,
    ]

    def request(seed: int) -> GenerateRequest:
        # Drafts behind a request's last token are not verified.
        params = {"temperature": 1.0} | kinds[seed % len(kinds)]
        return token_request(f"r{seed}", PROMPT, 3 + seed % 5, seed=seed, **params)

    def engine() -> LLMEngine:
        return markov_engine(
            folder,
            TARGET,
            DRAFT,
            3,
            draft_sample_method=method[0],
            rejection_sample_method=method[1],
            trim_to_max_tokens=True,
        )

    together = run(engine(), [request(seed) for seed in range(40)])
    steps = [step for result in together.values() for step in result.verify_steps]
    assert {step.num_drafted for step in steps} == {0, 1, 2, 3}
    assert {step.num_accepted for step in steps} == {0, 1, 2, 3}
    one_at_a_time = engine()
    for seed in range(40):
        (alone,) = run(one_at_a_time, [request(seed)]).values()
        result = together[f"r{seed}"]
        assert alone.output_token_ids == result.output_token_ids
        assert [step.num_accepted for step in alone.verify_steps] == [step.num_accepted for step in result.verify_steps]


def test_greedy_requests_take_the_argmax_however_drafts_are_drawn(folder: Path):
    plain = generate(folder, 0, METHODS[0], [{"temperature": 0.0}])
    for method in METHODS:
        assert generate(folder, 3, method, [{"temperature": 0.0}])[0].output_token_ids == plain[0].output_token_ids


@pytest.mark.parametrize("rates", [(0.9, 0.5, 0.2), (1.0, 1.0, 0.3), (0.0, 0.0, 0.0)])
@pytest.mark.parametrize("draft", ["greedy", "probabilistic"])
def test_synthetic_acceptance_has_the_rates_it_was_given(folder: Path, draft: str, rates: tuple[float, ...]):
    results = generate(folder, 3, (draft, "synthetic"), [{}] * 1500, rates=rates)
    # The last steps of a request have fewer tokens left to emit, but as many drafts to verify.
    counts = accepted_counts(results)
    total = sum(counts.values())
    for index, rate in enumerate(rates):
        observed = sum(times for count, times in counts.items() if count > index) / total
        assert abs(observed - rate) <= 5 * (rate * (1 - rate) / total) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "support"), [(3, "same"), (2, "drafter_too_sure"), (3, "drafter_too_sure"), (3, "little_in_common")]
)
@pytest.mark.parametrize("method", METHODS)
def test_the_joint_law_at_length(folder: Path, method: tuple[str, str], support: str, k: int):
    results = generate(folder, k, method, [{}] * 100_000, SUPPORTS[support])
    assert p_value(sequences(results), law_of(SUPPORTS[support][1])) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize(("k", "support"), [(2, "same"), (3, "drafter_too_sure")])
@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("method", METHODS)
def test_the_joint_law_under_a_filter_at_length(folder: Path, method: tuple[str, str], name: str, support: str, k: int):
    params, of_filter = FILTERS[name]
    results = generate(folder, k, method, [params] * 100_000, SUPPORTS[support])
    assert p_value(sequences(results), law_of(of_filter(SUPPORTS[support][1]))) > LEVEL
