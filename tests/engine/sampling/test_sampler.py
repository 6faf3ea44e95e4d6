"""Sampling passes, each against the law it promises."""

from dataclasses import replace

import torch

from specbench.engine.sampling.filters import mask_top_p_
from specbench.engine.sampling.parameters import RequestSampling
from specbench.engine.sampling.sampler import SamplingRows, process, sample
from specbench.engine.sampling.token_rules import TokenRules
from specbench.generate import SamplingParams


def rows(
    num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> SamplingRows:
    return SamplingRows(
        keys=torch.arange(num_rows),
        positions=torch.full((num_rows,), 3),
        temperature=torch.full((num_rows,), temperature),
        min_p=torch.full((num_rows,), min_p) if min_p else None,
        top_k=torch.full((num_rows,), top_k) if top_k else None,
        top_p=torch.full((num_rows,), top_p) if top_p < 1 else None,
    )


def draw(logits: torch.Tensor, params: SamplingRows | None) -> torch.Tensor:
    return sample(process(logits.clone(), params), params)


def frequencies(logits: torch.Tensor, params: SamplingRows) -> torch.Tensor:
    ids = draw(logits.expand(len(params.keys), -1), params)
    return torch.bincount(ids, minlength=len(logits)) / len(ids)


def assert_law(observed: torch.Tensor, expected: torch.Tensor, count: int) -> None:
    # Five standard deviations of a frequency, and nothing outside the support.
    assert ((observed - expected).abs() <= 5 * (expected * (1 - expected) / count).sqrt()).all()


LOGITS = torch.tensor([2.0, 1.0, 0.5, -1.0, 0.9])
COUNT = 40_000


def test_greedy_rows_take_the_lowest_of_equal_ids():
    logits = torch.tensor([[0.0, 3.0, 3.0], [1.0, 0.0, 1.0]])
    assert draw(logits, None).tolist() == [1, 0]
    assert draw(logits, rows(2, temperature=0.0)).tolist() == [1, 0]


def test_temperature_samples_the_softmax():
    for temperature in (0.5, 1.0, 2.0):
        expected = (LOGITS / temperature).softmax(-1)
        assert_law(frequencies(LOGITS, rows(COUNT, temperature)), expected, COUNT)


def test_top_k_and_top_p_cut_the_support_and_renormalise():
    softmax = LOGITS.softmax(-1)
    top2 = torch.zeros(5).index_put((torch.tensor([0, 1]),), softmax[[0, 1]])
    assert_law(frequencies(LOGITS, rows(COUNT, top_k=2)), top2 / top2.sum(), COUNT)
    # 0.50 + 0.18 + 0.17 reaches 0.8; the fourth is not needed.
    top3 = torch.zeros(5).index_put((torch.tensor([0, 1, 4]),), softmax[[0, 1, 4]])
    assert_law(frequencies(LOGITS, rows(COUNT, top_p=0.8)), top3 / top3.sum(), COUNT)
    assert frequencies(LOGITS, rows(100, top_p=1e-6))[0] == 1
    assert frequencies(LOGITS, rows(100, top_k=1))[0] == 1


def test_mixed_batches_leave_each_row_its_own_law():
    logits = LOGITS.expand(6, -1)
    temperature, min_p = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 2.0]), torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0])
    top_k, top_p = torch.tensor([0, 0, 2, 1, 0, 0]), torch.tensor([1.0, 1.0, 1.0, 0.5, 0.3, 1.0])
    together = draw(logits, SamplingRows(torch.arange(6), torch.arange(6), temperature, min_p, top_k, top_p))
    for row in range(6):
        one = slice(row, row + 1)
        alone = SamplingRows(
            torch.arange(6)[one],
            torch.arange(6)[one],
            temperature[one],
            min_p[one] if min_p[row] else None,
            top_k[one] if top_k[row] else None,
            top_p[one] if top_p[row] < 1 else None,
        )
        assert draw(logits[:1], alone)[0] == together[row]


def test_top_p_keeps_the_fewest_ids_that_reach_it_however_flat_the_law():
    """Peaked and flat rows together, against sorting; the flat ones are beyond what is selected."""
    generator = torch.Generator().manual_seed(0)
    spreads = torch.tensor([8.0, 3.0, 1.0, 0.3, 0.01, 3.0])
    logits = torch.randn(6, 20_000, generator=generator) * spreads[:, None]
    top_p = torch.tensor([0.9, 0.95, 0.5, 0.97, 0.6, 1.0])
    masked = logits.clone()
    mask_top_p_(masked, top_p)
    for row in range(6):
        ordered, ids = logits[row].double().sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        expected = int((mass_before < float(top_p[row])).sum())
        kept = masked[row] > -torch.inf
        # Rounding may move the edge by an id of a millionth.
        assert abs(int(kept.sum()) - expected) <= 2
        assert kept[ids[: expected - 2]].all()
    assert torch.equal(masked[5], logits[5])


def test_what_top_p_keeps_of_a_row_does_not_depend_on_the_others():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 6000, generator=generator) * torch.tensor([[8.0], [2.0], [0.5], [0.05]])
    top_p = torch.tensor([0.9, 0.9, 0.9, 0.9])
    together = logits.clone()
    mask_top_p_(together, top_p)
    for row in range(4):
        alone = logits[row : row + 1].clone()
        mask_top_p_(alone, top_p[:1])
        assert torch.equal(alone[0], together[row])


def test_ids_that_the_vocabulary_lacks_are_no_rules():
    """A checkpoint's end of sequence and another tokenizer's words may have such."""
    params = SamplingParams(max_output_tokens=8, min_tokens=2)
    sampling = RequestSampling(params, key=0, num_prompt_tokens=1, stop_token_ids=(3, 8, -1), bad_words=((1, 9), (2,)))
    rules = TokenRules.of(sampling, 8, torch.device("cpu"))
    assert rules is not None and rules.stop_ids is not None and rules.bad_words is not None
    assert rules.stop_ids.tolist() == [3] and rules.bad_words.last_ids.tolist() == [2]
    nothing_left = replace(sampling, stop_token_ids=(8,), bad_words=((9,),))
    assert TokenRules.of(nothing_left, 8, torch.device("cpu")) is None
