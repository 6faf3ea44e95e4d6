"""An engine whose sampling and verification run as kernels emits what it emits with plain torch, token for token: in
Triton's interpreter on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.layers import fusion
from specbench.generate import GenerateResult
from tests.engine.harness import run, token_request
from tests.engine.markov import build_folder, markov_engine
from tests.engine.test_verification_law import DRAFT, FILTERS, HISTORY, PROMPT, TARGET

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="of the interpreter; test_sampling_gpu.py is the GPU's"
)

#: Greedy or sampled, filtered, penalised or not.
KINDS = [{"temperature": 0.0}, *(params for params, _ in FILTERS.values()), HISTORY]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_folder(tmp_path_factory.mktemp("markov"))


def generate(folder: Path, k: int, draft: str, method: str, **settings: object) -> list[GenerateResult]:
    engine = markov_engine(
        folder,
        TARGET,
        DRAFT,
        k,
        missing=0.2,
        draft_sample_method=draft,
        rejection_sample_method=method,
        max_num_batched_tokens=24,
        **settings,
    )
    requests = [
        token_request(f"r{seed}", PROMPT, 6, seed=seed, **({"temperature": 1.0} | KINDS[seed % len(KINDS)]))
        for seed in range(len(KINDS))
    ]
    return list(run(engine, requests).values())


@pytest.mark.parametrize(
    ("draft", "method", "settings"),
    [
        ("greedy", "standard", {}),
        ("probabilistic", "standard", {"pipeline_depth": 1}),
        ("probabilistic", "block", {"cuda_graphs": True}),
    ],
)
def test_tokens_are_those_of_plain_torch(
    folder: Path, draft: str, method: str, settings: dict, monkeypatch: pytest.MonkeyPatch
):
    """Prompts in chunks beside windows, missing drafts, mixed parameters; padded steps too."""
    expected = generate(folder, 3, draft, method, **settings)
    monkeypatch.setattr(fusion, "is_fused", lambda tensor: True)
    fused = generate(folder, 3, draft, method, **settings)
    for one, other in zip(expected, fused, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert [step.num_accepted for step in one.verify_steps] == [step.num_accepted for step in other.verify_steps]
    assert {step.num_accepted for result in fused for step in result.verify_steps} >= {0, 1, 2}
