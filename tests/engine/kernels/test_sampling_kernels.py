"""Samples equal those of plain torch: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.sampling import NoiseRows, best_ids
from specbench.engine.sampling.noise import DRAFT, TARGET_SAMPLE, exponential_noise, spread_ids, window_stream

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", [(1, 7), (5, 9000)])
def test_the_best_id_is_the_lowest_of_the_largest(shape: tuple[int, int]) -> None:
    logits = torch.randint(0, 3000, shape, device=DEVICE).float()
    assert torch.equal(best_ids(logits), logits.argmax(-1))
    padded = torch.nn.functional.pad(logits, (0, 3), value=1e9)[:, :-3]
    assert torch.equal(best_ids(padded), logits.argmax(-1))


def test_ids_exist_where_logits_are_no_numbers() -> None:
    logits = torch.full((2, 6000), float("nan"), device=DEVICE)
    logits[1] = float("-inf")
    assert best_ids(logits).tolist() == [0, 0]


@pytest.mark.parametrize("stream", [TARGET_SAMPLE, window_stream(DRAFT, 3)])
def test_samples_are_those_of_plain_torch(stream: int) -> None:
    num_rows, vocab = 40, 5000
    logits = torch.randn(num_rows, vocab, device=DEVICE) * 2
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=DEVICE)
    positions = torch.randint(0, 200_000, (num_rows,), device=DEVICE)
    temperature = (torch.arange(num_rows, device=DEVICE) % 3).float()
    ids = best_ids(logits, NoiseRows(keys, positions, temperature, stream))
    noise = exponential_noise(keys, positions, stream, spread_ids(vocab, logits.device))
    drawn = (logits - noise.log()).argmax(-1)
    assert torch.equal(ids, torch.where(temperature == 0, logits.argmax(-1), drawn))
    assert (drawn != logits.argmax(-1)).float().mean() > 0.5
