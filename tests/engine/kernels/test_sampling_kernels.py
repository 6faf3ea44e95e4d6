"""Samples equal those of plain torch: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.head_best import best_of_head
from specbench.engine.kernels.sampling import NoiseRows, best_ids, ids_of_bests
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


@pytest.mark.parametrize(("num_rows", "num_ids", "hidden"), [(1, 50, 96), (5, 300, 40), (20, 700, 128)])
def test_the_best_ids_over_a_head(num_rows: int, num_ids: int, hidden: int) -> None:
    check_head(num_rows, num_ids, hidden, torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_rows", [1, 9, 16, 33, 64])
@pytest.mark.parametrize(("num_ids", "hidden"), [(200058, 2048), (40001, 4096), (700, 72)])
def test_the_best_ids_over_a_head_on_a_gpu(num_rows: int, num_ids: int, hidden: int) -> None:
    check_head(num_rows, num_ids, hidden, torch.bfloat16)


def check_head(num_rows: int, num_ids: int, hidden: int, dtype: torch.dtype) -> None:
    """In whole numbers, so that sums are exact and ties are many: the lowest id. Rows of padding are left out."""
    x, weight = (torch.randint(-2, 3, (rows, hidden)).float() for rows in (num_rows, num_ids + 6))
    weight[num_ids:] = 100 * x[:1].sign()
    weight[3], weight[num_ids // 2] = x[0], x[0]
    ids = ids_of_bests(best_of_head(x.to(DEVICE, dtype), weight.to(DEVICE, dtype), num_ids), num_ids)
    assert ids.tolist() == (x @ weight[:num_ids].T).argmax(1).tolist()


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
