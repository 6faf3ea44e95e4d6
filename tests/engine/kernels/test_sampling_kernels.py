"""Sampling and matching equal their forms in plain torch: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.sampling import CoinRows, NoiseRows, best_ids, flip_coins, match_samples
from specbench.engine.sampling.noise import (
    ACCEPTANCE,
    NUM_PURPOSES,
    TARGET_SAMPLE,
    exponential_noise,
    spread_ids,
)
from specbench.engine.sampling.verification import Windows

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


def test_samples_are_those_of_plain_torch() -> None:
    num_rows, vocab = 40, 5000
    logits = torch.randn(num_rows, vocab, device=DEVICE) * 2
    keys = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=DEVICE)
    positions = torch.randint(0, 200_000, (num_rows,), device=DEVICE)
    temperature = (torch.arange(num_rows, device=DEVICE) % 3).float()
    ids = best_ids(logits, NoiseRows(keys, positions, temperature, TARGET_SAMPLE))
    noise = exponential_noise(keys, positions, TARGET_SAMPLE, spread_ids(vocab, logits.device))
    drawn = (logits - noise.log()).argmax(-1)
    assert torch.equal(ids, torch.where(temperature == 0, logits.argmax(-1), drawn))
    assert (drawn != logits.argmax(-1)).float().mean() > 0.5


def windows(num_requests: int, k: int) -> tuple[Windows, torch.Tensor]:
    """Windows of drafts that often match, some missing, and what was sampled."""
    draft_ids = torch.randint(-1, 3, (num_requests, k), device=DEVICE)
    sampled = torch.randint(0, 2, (num_requests, k + 1), device=DEVICE)
    return Windows(
        rows=torch.arange(num_requests, device=DEVICE),
        draft_ids=draft_ids,
        num_drafts=torch.randint(0, k + 1, (num_requests,), device=DEVICE),
        samples=torch.randint(0, 2, (num_requests,), device=DEVICE),
        keys=torch.randint(-(2**63), 2**63 - 1, (num_requests,), device=DEVICE),
        start=torch.randint(0, 200_000, (num_requests,), device=DEVICE),
    ), sampled


def prefix(is_in: torch.Tensor) -> torch.Tensor:
    return is_in.long().cumprod(1).sum(1)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_drafts_are_matched(k: int) -> None:
    of, sampled = windows(60, k)
    accepted, num_sampled, num_drafted = match_samples(sampled, of.draft_ids, of.num_drafts, of.samples)
    assert torch.equal(accepted, prefix(of.is_drafted() & (of.draft_ids == sampled[:, :-1])))
    assert torch.equal(num_sampled, accepted + of.samples)
    assert torch.equal(num_drafted, of.is_drafted().sum(1))
    assert k < 3 or accepted.max() > 1


@pytest.mark.parametrize("k", [1, 3, 8])
def test_coins_fall_as_in_plain_torch(k: int) -> None:
    of, sampled = windows(60, k)
    rates = torch.tensor([0.9, 0.7, 0.5, 0.4, 0.0, 0.0, 0.0, 0.0][:k], device=DEVICE)
    coins = CoinRows(of.keys, of.start, ACCEPTANCE, NUM_PURPOSES)
    token_ids, accepted, num_sampled, num_drafted = flip_coins(
        sampled, of.draft_ids, of.num_drafts, of.samples, rates, coins
    )
    before = torch.cat([torch.ones_like(rates[:1]), rates[:-1]])
    chance = torch.where(before > 0, rates / before, 0.0)
    assert torch.equal(accepted, prefix(of.is_drafted() & (of.coins() < chance)))
    assert torch.equal(num_sampled, accepted + of.samples)
    assert torch.equal(num_drafted, of.is_drafted().sum(1))
    is_accepted = torch.arange(k, device=DEVICE) < accepted[:, None]
    assert torch.equal(token_ids[:, :-1], torch.where(is_accepted, of.draft_ids, sampled[:, :-1]))
    assert torch.equal(token_ids[:, -1], sampled[:, -1])
