"""Thresholds of min_p, top_k and top_p against sorting: in Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.filters import Filters, Kept, Sizes, kept

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
#: So small that rows of a few hundred ids go the way of large vocabularies.
SMALL = Sizes(chunk=512, sample=256, segment=32, collected=64)

TEMPERATURE = torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0, 1.0])
MIN_P = torch.tensor([0.0, 0.1, 0.1, 0.0, 0.01, 0.0])
TOP_P = torch.tensor([0.9, 0.5, 0.5, 1.0, 0.99, 0.3])


def top_k(vocab: int) -> torch.Tensor:
    return torch.tensor([0, 3, 2, 0, vocab // 2 + 1, vocab // 10 + 1])


def filters_of(vocab: int, names: str) -> Filters:
    by_name = {"m": (MIN_P, 0.0), "k": (top_k(vocab), 0), "p": (TOP_P, 1.0)}
    asked = [(values if name in names else torch.full_like(values, off)) for name, (values, off) in by_name.items()]
    return Filters(TEMPERATURE.to(DEVICE), *(each.to(DEVICE) for each in asked))


def by_sorting(row: torch.Tensor, min_p: float, top_k: int, top_p: float) -> torch.Tensor:
    """What is left of logits over temperature, [vocab]; fp64."""
    row = row.double()
    row = torch.where(row < row.max() + torch.tensor(min_p).double().log(), -torch.inf, row) if min_p else row
    if top_k:
        row = torch.where(row < row.sort(descending=True).values[min(top_k, len(row)) - 1], -torch.inf, row)
    if top_p < 1:
        ordered = row.sort(descending=True).values
        probabilities = ordered.softmax(0)
        count = int((probabilities.cumsum(0) - probabilities < top_p).sum())
        row = torch.where(row < ordered[count - 1], -torch.inf, row)
    return row


def assert_kept(result: Kept, logits: torch.Tensor, names: str, slack: int = 0) -> None:
    """The ids of `by_sorting`, and their total; `slack`: ids more or less where rounding moves the edge."""
    vocab = logits.shape[1]
    for index, temperature in enumerate(TEMPERATURE.tolist()):
        if temperature == 0:
            assert result.threshold[index] == -torch.inf
            continue
        scaled = logits[index] * (1 / TEMPERATURE[index])
        expected = by_sorting(
            scaled,
            float(MIN_P[index]) if "m" in names else 0.0,
            int(top_k(vocab)[index]) if "k" in names else 0,
            float(TOP_P[index]) if "p" in names else 1.0,
        )
        is_kept = scaled >= result.threshold[index].to(scaled.device)
        assert int((is_kept != (expected > -torch.inf)).sum()) <= slack
        assert float(result.total[index]) == pytest.approx(float(expected.logsumexp(0)), abs=1e-5)


@pytest.mark.parametrize("names", ["m", "k", "p", "mkp"])
@pytest.mark.parametrize(
    ("vocab", "spread"), [(5, 1.0), (130, 3.0), (600, 0.0), (600, 0.01), (600, 1.0), (600, 3.0), (600, 10.0)]
)
def test_what_is_kept_is_what_sorting_keeps(vocab: int, spread: float, names: str):
    """From laws with all ids alike to laws with one likely id. Spread 1 has many ties."""
    torch.manual_seed(0)
    logits = torch.randn(6, vocab) * spread
    if spread == 1.0:
        logits = (logits * 4).round() / 4
    result = kept(logits.to(DEVICE), filters_of(vocab, names), sizes=SMALL)
    assert_kept(result, logits, names)


@pytest.mark.parametrize("names", ["k", "p"])
def test_rows_that_refuse_every_shortcut(names: str):
    """Few values that nearly everything has, ids that are out, values far apart, and the likeliest at the very end."""
    torch.manual_seed(1)
    logits = torch.randn(6, 600)
    logits[0, :590] = 2.0
    logits[1, ::2] = -torch.inf
    logits[3] = torch.cat([torch.full((300,), -3e38), torch.linspace(-1e-30, 1e-30, 300)])
    logits[4] = torch.linspace(-20, 20, 600).exp()
    logits[5] = torch.where(torch.arange(600) % 3 == 0, -0.0, 0.0)
    assert_kept(kept(logits.to(DEVICE), filters_of(600, names), sizes=SMALL), logits, names)


def test_a_row_is_treated_alike_whatever_the_others_are():
    torch.manual_seed(2)
    logits = torch.randn(6, 300) * 2
    together = kept(logits.to(DEVICE), filters_of(300, "p"), sizes=SMALL)
    every = filters_of(300, "p")
    one = Filters(every.temperature[1:2], every.min_p[1:2], every.top_k[1:2], every.top_p[1:2])
    assert torch.equal(together.threshold[1:2], kept(logits[1:2].to(DEVICE), one, sizes=SMALL).threshold)


@pytest.mark.skipif(not HAS_GPU, reason="too much for an interpreter")
@pytest.mark.parametrize("names", ["k", "p", "mkp"])
@pytest.mark.parametrize("spread", [0.01, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0])
def test_large_vocabularies(spread: float, names: str):
    torch.manual_seed(3)
    vocab = 151_936
    logits = torch.randn(6, vocab) * spread
    result = kept(logits.to(DEVICE), filters_of(vocab, names))
    assert_kept(result, logits, names, slack=2)


def test_something_is_kept_where_the_aim_is_what_one_more_id_reaches():
    """Masses are added up in another order among what was collected, so whether the last id is reached is a matter of
    rounding; but it or the one before it is."""
    torch.manual_seed(4)
    num_rows, vocab = 96, 600
    logits = torch.randn(num_rows, vocab).sort(dim=1, descending=True).values
    cumulative = logits.double().softmax(1).cumsum(1)
    last = torch.randint(40, vocab - 40, (num_rows,))
    rows = torch.arange(num_rows)
    top_p = cumulative[rows, last].float()
    logits = logits[:, torch.randperm(vocab)]
    ones = torch.ones(num_rows, device=DEVICE)
    result = kept(logits.to(DEVICE), Filters(ones, ones * 0, ones.long() * 0, top_p.to(DEVICE)), sizes=SMALL)
    counts = (logits >= result.threshold.cpu()[:, None]).sum(1)
    assert ((counts >= last) & (counts <= last + 2)).all()
