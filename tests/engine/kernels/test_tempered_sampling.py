"""Draws at a temperature equal those of plain torch: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

from specbench.engine.kernels.noise import exponential, inverse_ceiling, log_floor, random_bits
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


@pytest.mark.parametrize("is_cut", [False, True])
def test_programs_of_several_blocks_draw_the_same(is_cut: bool):
    """Cut: most blocks have nothing left, and some rows nothing but one id."""
    logits = torch.randn(NUM_ROWS, 20_000, device=DEVICE) * 2
    logits[0, [3, 900, 19_000]] = 30.0
    logits[::3, 9000:9100] += 20.0
    noise = make_noise(TARGET_SAMPLE)
    threshold = None
    if is_cut:
        tempered = logits * (1 / torch.where(noise.temperature == 0, 1.0, noise.temperature))[:, None]
        threshold = tempered.topk(30).values[:, -1].contiguous()
        threshold[1::3] = tempered.amax(1)[1::3] - 1e-3
    ids = tempered_ids(logits, noise, threshold)
    assert torch.equal(ids, by_torch(logits, noise, threshold))
    assert ids[0] == 3
    twice = NoiseRows(noise.keys.repeat(2), noise.positions.repeat(2), noise.temperature.repeat(2), noise.stream)
    again = tempered_ids(logits.repeat(2, 1), twice, None if threshold is None else threshold.repeat(2))
    assert torch.equal(again, ids.repeat(2))


@triton.jit
def _store_bounds(keys, floor, ceiling, variate, BLOCK: tl.constexpr, IS_FAST: tl.constexpr):
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, stream = tl.load(keys), tl.load(keys) * 0
    bits = random_bits(key, stream, stream, ids)
    tl.store(floor + ids, log_floor(bits, IS_FAST))
    tl.store(ceiling + ids, inverse_ceiling(bits, IS_FAST))
    tl.store(variate + ids, exponential(key, stream, stream, ids))


def test_bounds_are_bounds():
    """What is skipped because of them can't have been the best."""
    keys = torch.tensor([77], device=DEVICE)
    floor, ceiling, variate = torch.empty(3, 1 << 16, device=DEVICE).unbind(0)
    _store_bounds[(16,)](keys, floor, ceiling, variate, BLOCK=1 << 12, IS_FAST=DEVICE == "cuda", num_warps=8)
    excess = floor.double() - variate.double().log()
    assert excess.max() <= 1e-5
    assert ((ceiling.double() * variate.double()) >= 1 - 1e-6).all()
    # And close ones where variates are small: of those the best are.
    assert excess[variate < 0.01].min() > -0.01
