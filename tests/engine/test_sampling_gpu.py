"""Sampling and verification on a CUDA device: the CPU's random numbers, so the CPU's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.sampling.noise import exponential_noise, spread_ids
from tests.engine import test_verification_law as laws
from tests.engine.harness import run, token_request
from tests.engine.markov import build_folder, exact_law, markov_engine, p_value
from tests.engine.test_sampling_parameters import DRAFT, NUM_REQUESTS, TARGET, requests_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("markov"))


def test_noise_is_the_cpus():
    keys, positions = torch.arange(64) * 0x9E3779B97F4A7C15 % (1 << 62), torch.arange(64)
    expected = exponential_noise(keys, positions, 6, spread_ids(50_000, torch.device("cpu")))
    noise = exponential_noise(keys.cuda(), positions.cuda(), 6, spread_ids(50_000, torch.device("cuda")))
    torch.testing.assert_close(noise.cpu(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("k", "depth"), [(0, 0), (3, 0), (3, 1)])
def test_every_parameter_gives_the_cpus_tokens(folder: Path, k: int, depth: int):
    settings = {"max_num_seqs": 16, "max_model_len": 64}
    expected = run(markov_engine(folder, TARGET, DRAFT, 0, **settings), requests_of(NUM_REQUESTS))
    engine = markov_engine(folder, TARGET.cuda(), DRAFT.cuda(), k, device="cuda", pipeline_depth=depth, **settings)
    for name, result in run(engine, requests_of(NUM_REQUESTS)).items():
        assert result.output_token_ids == expected[name].output_token_ids
        if result.logprobs is not None:
            close = pytest.approx([entry.logprob for entry in expected[name].logprobs], abs=1e-4)
            assert [entry.logprob for entry in result.logprobs] == close


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_give_the_cpus_tokens(folder: Path, method: str):
    """But for a coin or a draw that falls within rounding."""
    requests = [token_request(f"r{seed}", [0, 3, 1], 20, temperature=1.0, seed=seed) for seed in range(500)]
    results = []
    for device in ("cpu", "cuda"):
        engine = markov_engine(
            folder,
            TARGET.to(device),
            DRAFT.to(device),
            3,
            device=device,
            draft_sample_method="probabilistic",
            rejection_sample_method=method,
            max_num_seqs=256,
            max_model_len=32,
        )
        results.append({name: result.output_token_ids for name, result in run(engine, requests).items()})
    num_equal = sum(results[0][name] == results[1][name] for name in results[0])
    assert num_equal >= 495


#: Sampling parameters, and what they leave of the target's logits.
KINDS = [({}, lambda logits: logits), *laws.FILTERS.values()]


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("method", laws.METHODS)
def test_the_joint_law_is_the_targets(folder: Path, method: tuple[str, str], has_graphs: bool):
    """Through the engine's loop, requests with and without filters in one batch, with a step in flight."""
    num_requests, size = (1_800, 64) if has_graphs else (6_000, 2048)
    engine = markov_engine(
        folder,
        laws.TARGET.cuda(),
        laws.DRAFT.cuda(),
        3,
        device="cuda",
        attention_backend="triton",
        draft_sample_method=method[0],
        rejection_sample_method=method[1],
        max_num_seqs=size,
        max_num_batched_tokens=8 * size,
        pipeline_depth=1,
    )
    if has_graphs:
        engine.runner.capture(lambda text: None)
    requests = [
        token_request(
            f"r{seed}", laws.PROMPT, laws.NUM_TOKENS, seed=seed, **({"temperature": 1.0} | KINDS[seed % len(KINDS)][0])
        )
        for seed in range(num_requests)
    ]
    results = list(run(engine, requests).values())
    assert set(laws.accepted_counts(results)) == {0, 1, 2, 3}
    for kind, (params, of_filter) in enumerate(KINDS):
        own = [result for result in results if int(result.record.sample_id[1:]) % len(KINDS) == kind]
        law = exact_law(of_filter(laws.TARGET).double().softmax(-1), laws.PROMPT, laws.NUM_TOKENS)
        assert p_value(laws.sequences(own), law) > laws.LEVEL, params


@pytest.mark.parametrize("method", laws.METHODS)
def test_graphs_give_what_steps_without_graphs_give(folder: Path, method: tuple[str, str]):
    """Bit for bit the same noise, the same tokens: filters, missing drafts and greedy requests among them."""
    requests = [
        token_request(f"r{seed}", laws.PROMPT, 10, seed=seed, **({"temperature": 1.0 * (seed % 4 > 0)} | params))
        for seed in range(120)
        for params in [KINDS[seed % len(KINDS)][0] if seed % 4 else {}]
    ]
    outputs = []
    for has_graphs in (False, True):
        engine = markov_engine(
            folder,
            laws.TARGET.cuda(),
            laws.DRAFT.cuda(),
            3,
            missing=0.2,
            device="cuda",
            attention_backend="triton",
            draft_sample_method=method[0],
            rejection_sample_method=method[1],
            max_num_seqs=32,
            max_num_batched_tokens=256,
        )
        if has_graphs:
            engine.runner.capture(lambda text: None)
        outputs.append({name: result.output_token_ids for name, result in run(engine, requests).items()})
    assert outputs[0] == outputs[1]
