"""Sampling from a vocabulary that ranks share, against sampling from all of it."""

from __future__ import annotations

import torch

from specbench.engine.layers.parallel import TensorParallel, Vocabulary
from specbench.engine.sampling.sampler import SamplingRows, process, sample
from specbench.engine.sampling.sharded import sample_own
from specbench.engine.shard import Shard

#: Does not split evenly.
VOCAB, NUM_RANKS = 250, 4


class OneAfterAnother(TensorParallel):
    """Ranks without processes: first each says what it sends, then each hears what all sent."""

    def __init__(self, rank: int, sent: list[torch.Tensor], is_hearing: bool) -> None:
        self.shard, self.rank, self.size = Shard(rank, NUM_RANKS), rank, NUM_RANKS
        self.sent, self.is_hearing = sent, is_hearing

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hearing:
            self.sent.append(x)
        return torch.stack(self.sent)


def sampled_by_ranks(logits: torch.Tensor, rows: SamplingRows | None) -> list[torch.Tensor]:
    sent: list[torch.Tensor] = []

    def sampled_by(rank: int, is_hearing: bool) -> torch.Tensor:
        vocabulary = Vocabulary(VOCAB, OneAfterAnother(rank, sent, is_hearing))
        return sample_own(logits[:, vocabulary.start : vocabulary.stop].clone(), rows, vocabulary)

    for rank in range(NUM_RANKS):
        sampled_by(rank, is_hearing=False)
    return [sampled_by(rank, is_hearing=True) for rank in range(NUM_RANKS)]


def test_ranks_take_the_argmax_of_the_whole_and_ties_go_to_the_lowest_id() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, VOCAB)
    logits[2] = 0.0
    logits[3, [60, 200]] = 9.0
    whole = sample(logits.clone(), None)
    assert (whole[2], whole[3]) == (0, 60)
    assert all(torch.equal(found, whole) for found in sampled_by_ranks(logits, None))


def test_ranks_draw_what_the_whole_draws() -> None:
    torch.manual_seed(2)
    logits = torch.randn(64, VOCAB)
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.3]).repeat(16)
    rows = SamplingRows(torch.arange(64) * 7, torch.arange(64), temperature)
    whole = sample(process(logits.clone(), rows), rows)
    assert not torch.equal(whole, logits.argmax(dim=-1))
    assert all(torch.equal(found, whole) for found in sampled_by_ranks(logits, rows))
