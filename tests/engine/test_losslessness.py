"""The losslessness check over real engines: right ones pass every test, and a verification that is wrong fails."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specbench.arrivals import ClosedLoad
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.replay import check_output
from specbench.engine.sampling.verification import Verdict, sample_and_match
from specbench.evals.losslessness import Sides, Speculation, check_losslessness
from specbench.generate import GenerateListener, GenerateRequest
from specbench.records import LosslessnessCheck
from tests.engine.harness import make_engine, token_request
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 6
LOAD = ClosedLoad(64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(
        tmp_path_factory.mktemp("law"),
        num_modules=2,
        vocab_size=8,
        unpadded_vocab_size=VOCAB,
        num_hidden_layers=2,
        local_layer_ids=[0],
        hidden_size=32,
        logits_mup_width_multiplier=0.5,
    )


def requests_of(count: int, **sampling: object) -> list[GenerateRequest]:
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(4)] for _ in range(count)]
    return [token_request(f"r{index}", prompt, 12, **sampling) for index, prompt in enumerate(prompts)]


def engine_of(folder: Path, k: int, **fields: object) -> LLMEngine:
    return make_engine(folder, k, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=32, **fields)


def check(folder: Path, requests: list[GenerateRequest], num_draws: int, **fields: object) -> LosslessnessCheck:
    speculative = engine_of(folder, 2, **fields)
    config = speculative.config
    is_one_hot = config.draft_sample_method == "greedy"
    speculation = Speculation(config.proposer, 2, config.rejection_sample_method, is_one_hot, is_fp32=True)
    sides = Sides(
        speculation, speculative, engine_of(folder, 0), LOAD, lambda result: check_output(speculative, [result], 1)
    )
    measured: list = []
    speculative.generate(requests, LOAD, GenerateListener(measured.append))
    return check_losslessness(sides, requests, measured, num_draws, lambda message: None)


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of the same few tokens, and of a context that ends before the target's."""
    return build_tiny_inkling(
        tmp_path_factory.mktemp("draft"),
        num_modules=0,
        seed=3,
        vocab_size=8,
        unpadded_vocab_size=VOCAB,
        num_hidden_layers=2,
        model_max_length=12,
    )


@pytest.mark.parametrize(
    ("proposer", "method"),
    [
        ("mtp_multi", "block"),
        ("mtp_single", "standard"),
        ("draft_model", "block"),
        pytest.param("mtp_multi", "standard", marks=pytest.mark.slow),
        pytest.param("mtp_single", "block", marks=pytest.mark.slow),
        pytest.param("draft_model", "standard", marks=pytest.mark.slow),
    ],
)
def test_draws_verified_rightly_follow_the_law(folder: Path, draft_folder: Path, proposer: str, method: str):
    requests = requests_of(16, temperature=1.0, seed=5)
    found = check(
        folder,
        requests,
        120,
        proposer=proposer,
        draft_checkpoint=str(draft_folder),
        draft_sample_method="probabilistic",
        rejection_sample_method=method,
    )
    assert [(cell.acceptance, cell.status) for cell in found.cells] == [
        ("argmax", "identical"),
        (method, "consistent"),
        (method, "consistent"),
    ]
    assert all(cell.detectable is not None for cell in found.cells[1:])


def test_one_hot_drafts_draw_the_same_text(folder: Path):
    found = check(folder, requests_of(12, temperature=0.8, top_k=4), 40, proposer="ngram", ngram_min=1)
    assert [cell.status for cell in found.cells] == ["identical", "identical", "consistent", "consistent"]
    assert {cell.proposer for cell in found.cells} == {"ngram"}


def lenient(
    sampled_ids: torch.Tensor, draft_ids: torch.Tensor, num_drafts: torch.Tensor, samples: torch.Tensor
) -> Verdict:
    """Keeps the first draft wherever there is one."""
    if draft_ids.shape[1] == 0:  # the plain side
        return sample_and_match(sampled_ids, draft_ids, num_drafts, samples)
    kept = sampled_ids.clone()
    is_kept = (num_drafts > 0) & (draft_ids[:, 0] >= 0)
    kept[:, 0] = torch.where(is_kept, draft_ids[:, 0], sampled_ids[:, 0])
    return sample_and_match(kept, draft_ids, num_drafts, samples)


def test_drafts_kept_unverified_fail_every_test(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("specbench.engine.execution.stages.sample_and_match", lenient)
    found = check(folder, requests_of(32, temperature=1.0), 120)
    assert [cell.status for cell in found.cells] == ["mismatch"] * 4
    greedy = [difference for difference in found.differences if difference["margin"] is not None]
    assert greedy and all(difference["margin"] > difference["allowed"] for difference in greedy)
