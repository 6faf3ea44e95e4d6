"""Every request of a mixed batch gets what its own parameters say, with speculation as without, and in any company.

The law behind each emitted token is worked out anew here, token by token in plain Python, and compared with the
log-probabilities that the engine gives.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from specbench.errors import UserError
from specbench.generate import GenerateResult, SamplingParams
from tests.engine.harness import run, token_request
from tests.engine.markov import PERIOD, build_folder, markov_engine
from tests.engine.sampling_reference import log_softmax, processed_logits

VOCAB = 8
NUM_TOKENS = 24
NUM_REQUESTS = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("markov"))


def table(seed: int) -> torch.Tensor:
    return torch.randn(PERIOD, VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


TARGET = table(0)
#: Near enough to the target's that every accepted count occurs.
DRAFT = TARGET + 0.3 * table(1)


def draw_params(rng: random.Random) -> dict:
    """Any of the parameters, each for a part of the requests."""
    return {
        "temperature": rng.choice([0.0, 0.0, 1e-20, 0.4, 1.0, 1.0, 1.5]),
        "top_k": rng.choice([0, 0, 1, 3]),
        "top_p": rng.choice([1.0, 1.0, 0.9, 0.5]),
        "min_p": rng.choice([0.0, 0.0, 0.1]),
        "repetition_penalty": rng.choice([1.0, 1.0, 0.8, 1.3]),
        "presence_penalty": rng.choice([0.0, 0.0, 0.7, -0.4]),
        "frequency_penalty": rng.choice([0.0, 0.0, 0.3, -0.2]),
        "logit_bias": rng.choice([(), (), ((2, 1.5), (5, -3.0))]),
        "allowed_token_ids": rng.choice([(), (), (0, 2, 3, 5, 7)]),
        "bad_word_token_ids": tuple(
            tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))) for _ in range(rng.choice([0, 0, 1, 4]))
        ),
        "min_tokens": rng.choice([0, 0, 5, NUM_TOKENS]),
        "stop_token_ids": rng.choice([(), (), (3,), (1, 6)]),
        "logprobs": rng.choice([None, 0, 2, VOCAB]),
        "processed_logprobs": rng.random() < 0.5,
        "prompt_logprobs": rng.choice([None, None, 0, 2]),
        "seed": rng.randrange(1000),
    }


def requests_of(count: int, seed: int = 0) -> list:
    rng = random.Random(seed)
    return [
        token_request(
            f"r{index}", [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))], NUM_TOKENS, **draw_params(rng)
        )
        for index in range(count)
    ]


def generate(folder: Path, k: int, requests: list, **config: object) -> dict[str, GenerateResult]:
    engine = markov_engine(folder, TARGET, DRAFT, k, **({"max_num_seqs": 16, "max_model_len": 64} | config))
    return run(engine, requests)


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, GenerateResult]:
    return generate(folder, 0, requests_of(NUM_REQUESTS))


def assert_same(results: dict[str, GenerateResult], expected: dict[str, GenerateResult]) -> None:
    for name, result in results.items():
        other = expected[name]
        assert result.output_token_ids == other.output_token_ids, name
        assert result.record.finish_reason == other.record.finish_reason
        assert result.logprobs == other.logprobs
        assert result.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("k", [1, 2, 4])
def test_speculation_changes_nothing(folder: Path, plain: dict[str, GenerateResult], k: int):
    results = generate(folder, k, requests_of(NUM_REQUESTS))
    assert_same(results, plain)
    assert {step.num_accepted for result in results.values() for step in result.verify_steps} == set(range(k + 1))


@pytest.mark.parametrize("config", [{"max_num_seqs": 1}, {"max_num_seqs": 3, "max_num_batched_tokens": 7}])
def test_company_and_chunks_change_nothing(folder: Path, plain: dict[str, GenerateResult], config: dict):
    requests = requests_of(NUM_REQUESTS)[::3]
    random.Random(1).shuffle(requests)
    assert_same(generate(folder, 3, requests, **config), plain)
    assert_same(generate(folder, 3, requests, pipeline_depth=1, **config), plain)


def test_preemption_and_prefix_hits_change_nothing(folder: Path, plain: dict[str, GenerateResult]):
    """A resumed request has its output in its prompt: penalties, counts of tokens and log-probabilities go on."""
    requests = requests_of(NUM_REQUESTS)
    engine = markov_engine(
        folder, TARGET, DRAFT, 3, max_num_seqs=16, max_model_len=64, num_blocks=40, prefix_caching=True
    )
    results: dict[str, GenerateResult] = {}
    for request in requests:
        engine.add_request(request, arrival_s=0.0)
    while engine.has_requests:
        results |= {result.record.request_id: result for result in engine.step()[0]}
    assert_same(results, plain)
    assert sum(result.record.num_preemptions > 0 for result in results.values()) > 10


def test_missing_drafts_change_nothing(folder: Path, plain: dict[str, GenerateResult]):
    engine = markov_engine(folder, TARGET, DRAFT, 3, missing=0.4, max_num_seqs=16, max_model_len=64)
    assert_same(run(engine, requests_of(NUM_REQUESTS)), plain)


def test_every_token_comes_from_the_law_that_its_parameters_leave(plain: dict[str, GenerateResult]):
    num_checked = 0
    for request in requests_of(NUM_REQUESTS):
        result, params, prompt = plain[request.request_id], request.sampling, list(request.prompt_token_ids)
        output = result.output_token_ids
        assert (result.logprobs is None) == (params.logprobs is None)
        for index, token_id in enumerate(output):
            raw = TARGET[(len(prompt) + index - 1) % PERIOD, [*prompt, *output[:index]][-1]].tolist()
            law = processed_logits(raw, params, prompt, output[:index])
            assert law[token_id] > -math.inf, (request, index)
            if params.temperature < 1e-5:
                assert law[token_id] >= max(law) - 1e-5
            if result.logprobs is not None:
                check_logprob(result.logprobs[index], token_id, law if params.processed_logprobs else raw, params)
                num_checked += 1
    assert num_checked > 500


def check_logprob(entry, token_id: int, logits: list[float], params: SamplingParams) -> None:
    expected = log_softmax(logits)
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(expected[token_id], abs=1e-4)
    assert entry.rank == 1 + sum(value > expected[token_id] for value in expected)
    assert entry.is_argmax == (expected.index(max(expected)) == token_id)
    best = sorted((value for value in expected if value > -math.inf), reverse=True)[: params.logprobs]
    assert [value for _, value in entry.top] == pytest.approx(best, abs=1e-4)
    assert all(expected[top_id] == pytest.approx(value, abs=1e-4) for top_id, value in entry.top)


def test_usage_ids_and_logprobs_agree(folder: Path):
    results = generate(folder, 4, requests_of(NUM_REQUESTS))
    reasons = set()
    for request in requests_of(NUM_REQUESTS):
        result = results[request.request_id]
        assert result.record.num_output_tokens == len(result.output_token_ids)
        if result.logprobs is not None:
            assert [entry.token_id for entry in result.logprobs] == result.output_token_ids
        if result.prompt_logprobs is not None:
            first, *others = result.prompt_logprobs
            assert first is None
            assert [entry.token_id for entry in others] == list(request.prompt_token_ids[1:])
        if result.record.finish_reason == "stop":
            assert len(result.output_token_ids) > request.sampling.min_tokens
            assert result.output_token_ids[-1] in request.sampling.stop_token_ids
        reasons.add(result.record.finish_reason)
    assert reasons == {"stop", "length"}


def test_prompt_logprobs_are_the_models_own(folder: Path):
    prompt = [random.Random(3).randrange(VOCAB) for _ in range(40)]
    request = token_request("r", prompt, 2, prompt_logprobs=3, repetition_penalty=2.0, logit_bias=((1, 9.0),))
    for budget in (64, 7, 1):
        (result,) = generate(folder, 0, [request], max_num_batched_tokens=budget).values()
        assert result.prompt_logprobs is not None
        for position, entry in enumerate(result.prompt_logprobs[1:], 1):
            expected = log_softmax(TARGET[(position - 1) % PERIOD, prompt[position - 1]].tolist())
            assert entry.logprob == pytest.approx(expected[prompt[position]], abs=1e-4)
            assert entry.is_argmax == (expected.index(max(expected)) == prompt[position])
            assert len(entry.top) == 3


def test_prompt_logprobs_are_made_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch):
    prompt = [random.Random(4).randrange(VOCAB) for _ in range(40)]
    request = token_request("r", prompt, 2, prompt_logprobs=1)
    (expected,) = generate(folder, 0, [request]).values()
    monkeypatch.setattr("specbench.engine.execution.token_logprobs._MAX_PROMPT_LOGITS", 3 * VOCAB)
    engine = markov_engine(folder, TARGET, DRAFT, 0, max_num_seqs=16, max_model_len=64)
    sizes: list[int] = []
    compute_logits = engine.runner.stages.model.compute_logits
    engine.runner.stages.model.compute_logits = lambda hidden: sizes.append(len(hidden)) or compute_logits(hidden)
    (result,) = run(engine, [request]).values()
    assert result.prompt_logprobs == expected.prompt_logprobs
    assert max(sizes) == 3


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"temperature": -1.0}, "temperature: must be 0 or from 1e-20 to 1e+20, not -1"),
        ({"temperature": math.nan}, "temperature: must be 0 or from 1e-20 to 1e+20, not nan"),
        ({"temperature": 1e-30}, "temperature: must be 0 or from 1e-20 to 1e+20, not 1e-30"),
        ({"top_k": -1}, "top_k: must be from 0 to 2147483647, not -1"),
        ({"top_k": 10**30}, "top_k: must be from 0 to 2147483647, not 1000000"),
        ({"top_p": 0.0}, "top_p: must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p: must be from 0 to 1, not 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: must be from 1e-06 to 1e+06, not 0"),
        ({"presence_penalty": math.inf}, "presence_penalty: must be from -1e+06 to 1e+06, not inf"),
        ({"frequency_penalty": 1e39}, "frequency_penalty: must be from -1e+06 to 1e+06, not 1e+39"),
        ({"logit_bias": ((1, math.inf),)}, "logit_bias: must be from -1e+09 to 1e+09, not [inf]"),
        ({"logit_bias": ((VOCAB, 1.0),)}, "logit_bias: 8 is no id of the vocabulary, 0 .. 7"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids: -1 is no id"),
        ({"bad_word_token_ids": ((),)}, "bad_words: an empty one"),
        ({"bad_word_token_ids": ((1, 99),)}, "bad_word_token_ids: 99 is no id"),
        ({"stop_token_ids": (99,)}, "stop_token_ids: 99 is no id"),
        ({"stop": ("",)}, "stop: an empty one"),
        ({"min_tokens": NUM_TOKENS + 1}, "min_tokens: must be from 0 to max_output_tokens=24, not 25"),
        ({"logprobs": -1}, "logprobs: must be from 0 to 8, the vocabulary, not -1"),
        ({"prompt_logprobs": 9}, "prompt_logprobs: must be from 0 to 8, the vocabulary, not 9"),
        ({"allowed_token_ids": (3,), "stop_token_ids": (3,), "min_tokens": 1}, "min_tokens: every id of"),
        ({"bad_words": ("x",)}, "stop strings and bad words need one"),
    ],
)
def test_refused_in_one_line(folder: Path, params: dict, line: str):
    engine = markov_engine(folder, TARGET, DRAFT, 0)
    with pytest.raises(UserError) as error:
        engine.add_request(token_request("r", [1], NUM_TOKENS, **params), arrival_s=0.0)
    assert str(error.value).startswith(f"request r: {line}")
    assert "\n" not in str(error.value)
