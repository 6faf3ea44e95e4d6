"""Sample and match: the longest matching prefix, whatever stands behind it."""

import torch

from specbench.engine.sampling.verification import sample_and_match


def verify(sampled: list[list[int]], drafts: list[list[int]], num_drafts: list[int], samples: list[int] | None = None):
    return sample_and_match(
        torch.tensor(sampled),
        torch.tensor(drafts).reshape(len(sampled), -1),
        torch.tensor(num_drafts),
        torch.tensor(samples or [1] * len(sampled)),
    )


def test_every_accepted_count_occurs():
    target = [5, 6, 7, 8]
    for accepted in range(4):
        drafts = target[:accepted] + [99] * (3 - accepted)
        verdict = verify([target], [drafts], [3])
        assert verdict.num_accepted.tolist() == [accepted]
        assert verdict.num_sampled.tolist() == [accepted + 1]
        assert verdict.num_drafted.tolist() == [3]


def test_a_match_behind_a_rejection_does_not_count():
    assert verify([[5, 6, 7, 8]], [[5, 0, 7]], [3]).num_accepted.tolist() == [1]


def test_missing_drafts_are_rejected_and_not_counted():
    verdict = verify([[5, 6, 7, 8], [5, 6, 7, 8]], [[5, -1, 7], [5, 6, 7]], [3, 1])
    assert verdict.num_accepted.tolist() == [1, 1]
    assert verdict.num_drafted.tolist() == [2, 1]


def test_a_partial_chunk_emits_nothing_and_no_drafts_emit_one():
    verdict = verify([[5, 6], [5, 6]], [[5], [5]], [0, 0], samples=[0, 1])
    assert verdict.num_sampled.tolist() == [0, 1]
    assert verdict.num_drafted.tolist() == [0, 0]
    no_drafts = torch.zeros(1, 0, dtype=torch.int64)
    plain = sample_and_match(torch.tensor([[4]]), no_drafts, torch.tensor([0]), torch.tensor([1]))
    assert plain.num_sampled.tolist() == [1] and plain.num_accepted.tolist() == [0]
