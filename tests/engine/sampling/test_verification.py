"""What each way of accepting drafts decides, on laws small enough to work out by hand."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chi2

from specbench.engine.sampling.drafting import DraftSampling
from specbench.engine.sampling.verification import (
    ACCEPTANCE_RULES,
    Laws,
    Verdict,
    Windows,
    accept_at_rates,
    block_rule,
    sample_and_match,
    standard_rule,
    verify_draws,
)


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


# ---- Drafts that were drawn


def laws(target: torch.Tensor, draft: torch.Tensor) -> Laws:
    """Of one request: probabilities [k + 1, vocab] and [k, vocab]."""
    return Laws(target.log()[None], torch.zeros(1, len(target)), draft[None], torch.zeros(1, dtype=torch.int64))


def windows(draft_ids: list[int], num_drafts: int | None = None, samples: int = 1, start: int = 7) -> Windows:
    return Windows(
        rows=torch.zeros(1, dtype=torch.int64),
        draft_ids=torch.tensor([draft_ids]),
        num_drafts=torch.tensor([len(draft_ids) if num_drafts is None else num_drafts]),
        samples=torch.tensor([samples]),
        keys=torch.tensor([3]),
        start=torch.tensor([start]),
    )


def chances(rule, draft_ids: list[int], of: Laws) -> list[float]:
    """Chance that a rule accepts more than i drafts, for each i, on a fine grid of coins."""
    k = len(draft_ids)
    grid = (torch.arange(60) + 0.5) / 60
    coins = torch.cartesian_prod(*[grid] * k).reshape(-1, k)
    many = Laws(
        of.target_logits.expand(len(coins), -1, -1),
        of.target_total.expand(len(coins), -1),
        of.draft_probabilities,
        torch.zeros(len(coins), dtype=torch.int64),
    )
    target, draft = many.of_drafts(torch.tensor([draft_ids]).expand(len(coins), -1))
    accepted = rule(coins, torch.full((len(coins),), k), many, target, draft).num_accepted
    return [float((accepted > index).double().mean()) for index in range(k)]


TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
DRAFT = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.2, 0.7]])


def test_standard_accepts_each_draft_with_the_ratio():
    first, both = chances(standard_rule, [0, 2], laws(TARGET, DRAFT))
    assert first == pytest.approx(0.5 / 0.8, abs=0.02)
    assert both == pytest.approx(0.5 / 0.8 * 0.3 / 0.7, abs=0.02)


def test_block_accepts_what_the_paper_says():
    """Worth of the first draft 0.625. Of the second, after 1, min(1, 0.625 * 0.6 / 0.2) = 1."""
    both = chances(block_rule, [0, 1], laws(TARGET, DRAFT))[1]
    assert both == 1.0
    # Worth of both 0.625 * 0.3 / 0.7; one draft lacks (0.625 * 0.1 - 0.1)+ + (0.625 * 0.6 - 0.2)+ + 0 = 0.175.
    first, both = chances(block_rule, [0, 2], laws(TARGET, DRAFT))
    worth, alone = 0.625 * 0.3 / 0.7, 0.175 / (0.175 + 1 - 0.625)
    assert both == pytest.approx(worth, abs=0.02)
    assert first == pytest.approx(worth + (1 - worth) * alone, abs=0.02)


@pytest.mark.parametrize("rule", ACCEPTANCE_RULES.values())
def test_equal_laws_accept_everything(rule):
    assert chances(rule, [2, 1], laws(TARGET, TARGET[:2])) == [1.0, 1.0]


@pytest.mark.parametrize("rule", ACCEPTANCE_RULES.values())
def test_a_draft_outside_of_the_targets_support_is_never_accepted(rule):
    target = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
    for start in range(50):
        verdict = verify_draws(rule, windows([0, 2], start=start), laws(target, DRAFT), torch.tensor([[8, 9, 10]]))
        assert verdict.num_accepted.tolist() == [0] and verdict.token_ids[0, 0] == 1


@pytest.mark.parametrize("rule", ACCEPTANCE_RULES.values())
@pytest.mark.parametrize("draft_ids", [[-1, -1], [-1, 2], [0, -1]])
def test_a_missing_draft_ends_the_window_and_reads_nothing(rule, draft_ids: list[int]):
    """Nothing behind it has a say: neither its ids nor its laws, which are no numbers here."""
    usable = draft_ids.index(-1)
    target, draft = TARGET.clone(), DRAFT.clone()
    target[usable + 1 :], draft[usable:] = torch.nan, torch.nan
    for start in range(50):
        verdict = verify_draws(rule, windows(draft_ids, start=start), laws(target, draft), torch.tensor([[8, 9, 10]]))
        (accepted,) = verdict.num_accepted.tolist()
        assert accepted <= usable
        assert verdict.token_ids[0, :accepted].tolist() == draft_ids[:accepted]
        assert verdict.token_ids[0, accepted] >= 0
        assert verdict.num_drafted.tolist() == [sum(draft_id >= 0 for draft_id in draft_ids)]


@pytest.mark.parametrize("rule", ACCEPTANCE_RULES.values())
def test_fewer_rows_than_drafts_are_a_shorter_window(rule):
    for start in range(50):
        short = verify_draws(
            rule, windows([0, 2], num_drafts=1, start=start), laws(TARGET, DRAFT), torch.tensor([[8, 9, 10]])
        )
        padded = verify_draws(rule, windows([0, -1], start=start), laws(TARGET, DRAFT), torch.tensor([[8, 9, 10]]))
        assert_equal(short, padded)


def assert_equal(one: Verdict, other: Verdict) -> None:
    assert one.num_accepted.tolist() == other.num_accepted.tolist()
    assert one.num_drafted.tolist() == other.num_drafted.tolist()
    count = int(one.num_sampled)
    assert one.token_ids[0, :count].tolist() == other.token_ids[0, :count].tolist()


def test_a_chunk_without_drafts_draws_the_plain_sample():
    no_mass = torch.zeros(2, 3)
    partial = verify_draws(
        standard_rule, windows([-1, -1], 0, samples=0), laws(TARGET, no_mass), torch.tensor([[8, 8, 8]])
    )
    assert (partial.num_sampled.tolist(), partial.num_accepted.tolist()) == ([0], [0])
    ids = [
        verify_draws(
            rule, windows([-1, -1], 0, start=start), laws(TARGET, no_mass), torch.tensor([[8, 8, 8]])
        ).token_ids[0, 0]
        for rule in ACCEPTANCE_RULES.values()
        for start in (3, 9)
    ]
    assert len(set(map(int, ids))) == 1, "keyed by the token's position, not by where the window starts"


def test_synthetic_acceptance_rejects_what_is_missing():
    rates = torch.ones(2)
    for draft_ids, accepted, tokens in [([5, 6], 2, [5, 6, 4]), ([5, -1], 1, [5, 3]), ([-1, 6], 0, [2])]:
        verdict = accept_at_rates(torch.tensor([[2, 3, 4]]), windows(draft_ids), rates)
        assert verdict.num_accepted.tolist() == [accepted]
        assert verdict.token_ids[0, : accepted + 1].tolist() == tokens
    none = accept_at_rates(torch.tensor([[2, 3, 4]]), windows([5, 6]), torch.zeros(2))
    assert none.num_accepted.tolist() == [0]


# ---- The law of many windows at once: what is wrong by a third of a percent shows

NUM_WINDOWS = 200_000
#: Target and drafter: probabilities of the next token, [vocab, vocab], by the token before it.
CHAINS = {
    "too_sure": (torch.full((3, 3), 1 / 3), torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6]])),
    "other": (
        torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.3, 0.4]]),
        torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1], [0.1, 0.8, 0.1]]),
    ),
    "no_mass": (
        torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.3, 0.7], [0.3, 0.7, 0.0]]),
        torch.tensor([[0.2, 0.8, 0.0], [0.5, 0.5, 0.0], [0.1, 0.0, 0.9]]),
    ),
}


def verified_windows(rule, target: torch.Tensor, draft: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts drawn and verified behind a token 0 in many requests: token ids [num_windows, k + 1], those behind the
    emitted ones drawn from the target, and accepted counts."""
    every = torch.arange(NUM_WINDOWS)
    sampling = DraftSampling(
        probabilities=torch.zeros(NUM_WINDOWS, k, 3),
        rows=every,
        temperature=torch.ones(NUM_WINDOWS),
        keys=every,
        window_start=torch.full_like(every, 7),
    )
    context = [torch.zeros_like(every)]
    for index in range(k):
        context.append(sampling.draw(index, draft[context[-1]].log()))
    of = Laws(target[torch.stack(context, 1)].log(), torch.zeros(NUM_WINDOWS, k + 1), sampling.probabilities, every)
    drafts = torch.stack(context[1:], 1)
    full = torch.full_like(every, k)
    many = Windows(every, drafts, full, torch.ones_like(every), every, torch.full_like(every, 7))
    verdict = verify_draws(rule, many, of, 8 + torch.arange(k + 1).expand(NUM_WINDOWS, -1))
    tokens, generator = verdict.token_ids, torch.Generator().manual_seed(0)
    for column in range(1, k + 1):
        drawn = torch.multinomial(target[tokens[:, column - 1]], 1, generator=generator)[:, 0]
        tokens[:, column] = torch.where(column < verdict.num_sampled, tokens[:, column], drawn)
    return tokens, verdict.num_accepted


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("rule", ACCEPTANCE_RULES.values())
def test_a_window_has_the_targets_law(rule, chain: str, k: int):
    target, draft = CHAINS[chain]
    tokens, num_accepted = verified_windows(rule, target, draft, k)
    assert set(num_accepted.tolist()) == set(range(k + 1))
    law = torch.ones(1)
    for before in torch.cartesian_prod(*[torch.arange(3)] * (k + 1)).view(-1, k + 1).unbind():
        pairs = zip([0, *before[:-1].tolist()], before.tolist(), strict=True)
        law = torch.cat([law, torch.tensor([float(torch.stack([target[pair] for pair in pairs]).prod())])])
    counts = torch.bincount((tokens * 3 ** torch.arange(k, -1, -1)).sum(dim=1), minlength=3 ** (k + 1))
    possible = law[1:] > 0
    assert counts[~possible].sum() == 0
    expected = law[1:][possible] * NUM_WINDOWS
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, int(possible.sum()) - 1) > 1e-4


@pytest.mark.parametrize("chain", CHAINS)
def test_block_verification_never_accepts_less(chain: str):
    """Sun et al. 2024, theorem 2; equal where k is 1."""
    for k in (1, 2, 3):
        standard, block = (verified_windows(rule, *CHAINS[chain], k)[1] for rule in (standard_rule, block_rule))
        if k == 1:
            assert torch.equal(standard, block)
        assert float(block.double().mean()) >= float(standard.double().mean()) - 0.01
