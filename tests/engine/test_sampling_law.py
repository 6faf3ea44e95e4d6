"""At temperature 1 what speculation emits has the target's joint law, whichever proposer drafts.

With tiny weights, so every proposer's own passes and the draws in them take part; test_verification_law.py has the
methods on laws made for the purpose.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch

from specbench.engine.sampling.verification import Verdict, sample_and_match
from tests.engine.harness import make_engine, run, token_request
from tests.engine.markov import p_value
from tests.engine.oracle import Oracle
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 4
PROMPT = (0, 3, 1)
NUM_TOKENS = 6
NUM_REQUESTS = 2_000
#: Chance of a false alarm, were the seeds drawn anew.
LEVEL = 1e-4


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


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(
        tmp_path_factory.mktemp("draft"),
        num_modules=0,
        seed=7,
        vocab_size=8,
        unpadded_vocab_size=VOCAB,
        num_hidden_layers=1,
        local_layer_ids=[0],
        hidden_size=32,
        logits_mup_width_multiplier=0.5,
    )


def exact_law(folder: Path) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of the five tokens behind the prefill's, which is summed over."""
    oracle = Oracle(folder)
    law: Counter[tuple[int, ...]] = Counter()
    for prefix in itertools.product(range(VOCAB), repeat=NUM_TOKENS - 1):
        _, logits = oracle.target_hidden_and_logits([*PROMPT, *prefix])
        rows = logits[len(PROMPT) - 1 :].double().softmax(-1)
        probability = 1.0
        for row, token in zip(rows, prefix, strict=False):
            probability *= float(row[token])
        for last in range(VOCAB):
            law[(*prefix[1:], last)] += probability * float(rows[-1][last])
    return law


def observe(folder: Path, k: int, **config: object) -> tuple[Counter[tuple[int, ...]], Counter[int]]:
    """Counts of emitted sequences, and of accepted drafts a step."""
    engine = make_engine(folder, k, max_num_seqs=512, max_num_batched_tokens=4096, max_model_len=16, **config)
    requests = [
        token_request(f"r{seed}", PROMPT, NUM_TOKENS, temperature=1.0, seed=seed) for seed in range(NUM_REQUESTS)
    ]
    results = run(engine, requests).values()
    sequences = Counter(tuple(result.output_token_ids[1:]) for result in results)
    return sequences, Counter(step.num_accepted for result in results for step in result.verify_steps)


@pytest.mark.parametrize(
    ("proposer", "draft", "method"),
    [
        ("mtp_multi", "greedy", "standard"),
        ("mtp_multi", "probabilistic", "block"),
        ("mtp_single", "probabilistic", "standard"),
        ("draft_model", "probabilistic", "block"),
    ],
)
def test_the_joint_law_is_the_targets(folder: Path, draft_folder: Path, proposer: str, draft: str, method: str):
    law = exact_law(folder)
    assert sum(law.values()) == pytest.approx(1.0)
    checkpoint = str(draft_folder) if proposer == "draft_model" else None
    sequences, accepted = observe(
        folder,
        k=2,
        proposer=proposer,
        draft_sample_method=draft,
        rejection_sample_method=method,
        draft_checkpoint=checkpoint,
    )
    assert set(accepted) == {0, 1, 2}, "windows of every length occur"
    assert p_value(sequences, law) > LEVEL


def test_the_test_sees_a_wrong_law(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Keeping the first draft whatever the target sampled is caught."""

    def lenient(
        sampled_ids: torch.Tensor, draft_ids: torch.Tensor, num_drafts: torch.Tensor, samples: torch.Tensor
    ) -> Verdict:
        kept = sampled_ids.clone()
        is_lenient = (num_drafts > 0) & (draft_ids[:, 0] >= 0) & (sampled_ids[:, 0] == 0)
        kept[:, 0] = torch.where(is_lenient, draft_ids[:, 0], sampled_ids[:, 0])
        return sample_and_match(kept, draft_ids, num_drafts, samples)

    monkeypatch.setattr("specbench.engine.execution.stages.sample_and_match", lenient)
    sequences, _ = observe(folder, k=2)
    assert p_value(sequences, exact_law(folder)) < LEVEL
