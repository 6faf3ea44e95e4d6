"""Draws at a temperature equal those of plain torch: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.sampling import NoiseRows
from specbench.engine.kernels.tempered_sampling import draw_drafts, tempered_ids
from specbench.engine.sampling.noise import DRAFT, TARGET_SAMPLE, exponential_noise, spread_ids, window_stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS, VOCAB = 40, 5000


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def make_noise(stream: int) -> NoiseRows:
    return NoiseRows(
        keys=torch.randint(-(2**63), 2**63 - 1, (NUM_ROWS,), device=DEVICE),
        temperature=torch.tensor([0.0, 0.7, 1.0, 1.9], device=DEVICE).repeat(NUM_ROWS // 4),
        positions=torch.randint(0, 200_000, (NUM_ROWS,), device=DEVICE),
        stream=stream,
    )


def by_torch(logits: torch.Tensor, noise: NoiseRows, threshold: torch.Tensor | None = None) -> torch.Tensor:
    temperature = noise.temperature[:, None]
    scaled = logits / torch.where(temperature == 0, 1.0, temperature)
    if threshold is not None:
        scaled = torch.where((temperature != 0) & (scaled < threshold[:, None]), -torch.inf, scaled)
    ids = spread_ids(logits.shape[1], logits.device)
    variates = exponential_noise(noise.keys, noise.positions, noise.stream, ids)
    return (scaled - torch.where(temperature == 0, 0.0, variates.log())).argmax(-1)


@pytest.mark.parametrize("stream", [TARGET_SAMPLE, window_stream(DRAFT, 3)])
@pytest.mark.parametrize("is_cut", [False, True])
def test_samples_are_those_of_plain_torch(stream: int, is_cut: bool):
    logits = torch.randn(NUM_ROWS, VOCAB, device=DEVICE) * 2
    noise = make_noise(stream)
    temperature = torch.where(noise.temperature == 0, 1.0, noise.temperature)[:, None]
    threshold = (logits / temperature).topk(20).values[:, -1].contiguous() if is_cut else None
    ids = tempered_ids(logits, noise, threshold)
    assert torch.equal(ids, by_torch(logits, noise, threshold))
    is_sampled = noise.temperature > 0
    assert (ids != logits.argmax(-1))[is_sampled].float().mean() > 0.5


def test_ids_exist_where_logits_are_no_numbers():
    logits = torch.full((NUM_ROWS, 6000), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    assert tempered_ids(logits, make_noise(TARGET_SAMPLE)).max() < 6000


def test_a_draft_is_drawn_from_the_law_that_is_kept():
    k, vocab = 3, VOCAB
    logits = torch.randn(NUM_ROWS, vocab, device=DEVICE) * 2
    noise = make_noise(window_stream(DRAFT, 1))
    law_rows = torch.randperm(NUM_ROWS + 5, device=DEVICE)[:NUM_ROWS]
    probabilities = torch.full((NUM_ROWS + 5, k, vocab), -1.0, device=DEVICE)
    ids = draw_drafts(logits, noise, probabilities, law_rows, 1)
    assert torch.equal(ids, by_torch(logits, noise))
    temperature = torch.where(noise.temperature == 0, 1.0, noise.temperature)[:, None]
    torch.testing.assert_close(probabilities[law_rows, 1], (logits / temperature).softmax(-1), rtol=1e-5, atol=1e-9)
    assert (probabilities[:, [0, 2]] == -1).all()
    others = torch.ones(NUM_ROWS + 5, dtype=torch.bool, device=DEVICE)
    others[law_rows] = False
    assert (probabilities[others] == -1).all()
