"""Sampling and verification on a CUDA device: the CPU's random numbers, so the CPU's tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.sampling.noise import exponential_noise, spread_ids
from tests.engine.harness import run, token_request
from tests.engine.markov import build_folder, markov_engine
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
