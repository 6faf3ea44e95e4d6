"""Sampling passes, each against the law it promises."""

import torch

from specbench.engine.sampling.sampler import SamplingRows, process, sample


def rows(num_rows: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> SamplingRows:
    return SamplingRows(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k),
        top_p=torch.full((num_rows,), top_p),
        keys=torch.arange(num_rows),
        positions=torch.full((num_rows,), 3),
        any_top_k=top_k > 0,
        any_top_p=top_p < 1,
    )


def draw(logits: torch.Tensor, params: SamplingRows | None) -> torch.Tensor:
    return sample(process(logits, params), params)


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
    mixed = SamplingRows(
        temperature=torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 2.0]),
        top_k=torch.tensor([0, 0, 2, 1, 0, 0]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.5, 0.3, 1.0]),
        keys=torch.arange(6),
        positions=torch.arange(6),
        any_top_k=True,
        any_top_p=True,
    )
    together = draw(logits, mixed)
    for row in range(6):
        one = SamplingRows(
            mixed.temperature[row : row + 1],
            mixed.top_k[row : row + 1],
            mixed.top_p[row : row + 1],
            mixed.keys[row : row + 1],
            mixed.positions[row : row + 1],
            any_top_k=bool(mixed.top_k[row] > 0),
            any_top_p=bool(mixed.top_p[row] < 1),
        )
        assert draw(logits[:1], one)[0] == together[row]
