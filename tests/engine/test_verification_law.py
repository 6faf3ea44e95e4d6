"""Whatever drafts are drawn from and however they are accepted, what is emitted has the target's joint law.

The five tokens behind the prefill's, through the engine's loop and its random keys, so at least two windows each.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from specbench.generate import GenerateResult
from tests.engine.harness import run, token_request
from tests.engine.markov import PERIOD, build_folder, exact_law, markov_engine, p_value

VOCAB = 5
PROMPT = (0, 3, 1)
NUM_TOKENS = 6
#: Chance of a false alarm of one test, were the seeds drawn anew.
LEVEL = 1e-4
METHODS = [("greedy", "standard"), ("probabilistic", "standard"), ("probabilistic", "block")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("markov"))


def table(seed: int, spread: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PERIOD, VOCAB, VOCAB, generator=generator) * spread


TARGET = table(0)
DRAFT = 0.5 * TARGET + table(1, spread=1.0)


def generate(
    folder: Path, k: int, draft: str, method: str, num_requests: int, *, proposed: torch.Tensor = DRAFT, **sampling
) -> list[GenerateResult]:
    missing = sampling.pop("missing", 0.0)
    engine = markov_engine(
        folder, TARGET, proposed, k, missing=missing, draft_sample_method=draft, rejection_sample_method=method
    )
    params = {"temperature": 1.0} | sampling
    requests = [token_request(f"r{seed}", PROMPT, NUM_TOKENS, seed=seed, **params) for seed in range(num_requests)]
    return list(run(engine, requests).values())


def sequences(results: list[GenerateResult]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(result.output_token_ids[1:]) for result in results)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(("draft", "method"), METHODS)
def test_the_joint_law_is_the_targets(folder: Path, draft: str, method: str, k: int):
    results = generate(folder, k, draft, method, 6000)
    assert {step.num_accepted for result in results for step in result.verify_steps} == set(range(k + 1))
    assert p_value(sequences(results), exact_law(TARGET.softmax(-1), PROMPT, NUM_TOKENS)) > LEVEL
