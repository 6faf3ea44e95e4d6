"""How many drafts survive, and which tokens a step emits.

Sample and match, exact for one-hot drafts: each verify row draws the token that plain decoding would draw at its
position, and drafts are accepted while they equal it. Greedy requests are the case where the draw is the argmax.

Drafts drawn from a law of their own are accepted by coins, exactly in law: one coin a draft against the ratio of target
and draft probability (standard), or against what the whole block up to it is worth (block; Sun et al. 2024, "Block
Verification Accelerates Speculative Decoding", arXiv 2403.10444). What was rejected is made good by a draw from what
the draft's law lacks of the target's.

Synthetic acceptance flips coins of given rates: its timing is real, its text means nothing.

Belongs here: acceptance, in plain torch. Does not belong here: kernels (kernels/acceptance.py, drawn_verification.py),
logits (sampler.py), how drafts are drawn (drafting.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbench.engine.sampling.noise import (
    ACCEPTANCE,
    RECOVERY,
    TARGET_SAMPLE,
    exponential_noise,
    spread_ids,
    uniform_noise,
    window_stream,
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One step's verification."""

    # [num_requests, k + 1] int64: tokens in order; the first num_sampled are emitted
    token_ids: torch.Tensor
    # [num_requests] int64: drafts accepted
    num_accepted: torch.Tensor
    # [num_requests] int64: num_accepted + 1; 0 for a partial chunk
    num_sampled: torch.Tensor
    # [num_requests] int64: draft ids >= 0 among the verified rows
    num_drafted: torch.Tensor

    def where(self, is_this: torch.Tensor, other: Verdict) -> Verdict:
        """This verdict for the requests of `is_this` ([num_requests] bool), the other for the rest."""
        return Verdict(
            torch.where(is_this[:, None], self.token_ids, other.token_ids),
            torch.where(is_this, self.num_accepted, other.num_accepted),
            torch.where(is_this, self.num_sampled, other.num_sampled),
            self.num_drafted,
        )


@dataclass(frozen=True, slots=True)
class Windows:
    """The drafts under verification, one window a request. A request without drafts has a window of one row."""

    # [num_requests] int64: persistent rows
    rows: torch.Tensor
    # [num_requests, k] int64; -1: none, always rejected
    draft_ids: torch.Tensor
    # [num_requests] int64: verify rows less one
    num_drafts: torch.Tensor
    # [num_requests] int64: 1, or 0 for a partial chunk, which emits nothing
    samples: torch.Tensor
    # [num_requests] int64: request keys
    keys: torch.Tensor
    # [num_requests] int64: position of the first row; of any row where there is no draft
    start: torch.Tensor

    def is_drafted(self) -> torch.Tensor:
        """[num_requests, k] bool."""
        return _is_drafted(self.draft_ids, self.num_drafts)

    def coins(self) -> torch.Tensor:
        """[num_requests, k]: the uniform variate that decides on each draft."""
        num_requests, k = self.draft_ids.shape
        row = torch.arange(k, device=self.keys.device).repeat(num_requests)
        keys, start = self.keys.repeat_interleave(k), self.start.repeat_interleave(k)
        return uniform_noise(keys, start, window_stream(ACCEPTANCE, row), spread_ids(1, self.keys.device)).view(
            num_requests, k
        )


def sample_and_match(
    sampled_ids: torch.Tensor, draft_ids: torch.Tensor, num_drafts: torch.Tensor, samples: torch.Tensor
) -> Verdict:
    """Accept drafts while they equal the target's own samples.

    sampled_ids: [num_requests, k + 1], row j's sample given the drafts before it (anything behind num_drafts). The
    others are those of `Windows`.
    """
    num_columns = draft_ids.shape[1]
    if num_columns == 0:
        zeros = torch.zeros_like(samples)
        return Verdict(sampled_ids, zeros, samples, zeros)
    is_drafted = _is_drafted(draft_ids, num_drafts)
    num_accepted = _length_of_prefix(is_drafted & (draft_ids == sampled_ids[:, :-1]))
    return Verdict(sampled_ids, num_accepted, num_accepted + samples, is_drafted.sum(dim=1))


def accept_at_rates(sampled_ids: torch.Tensor, windows: Windows, rates: torch.Tensor) -> Verdict:
    """Accept drafts by coins alone; the token behind them is the target's own sample.

    sampled_ids: [num_requests, k + 1]. rates: fp32 [k], unconditional: rates[i] is the chance that drafts 0 .. i are
    all accepted, so draft i is accepted with rates[i] / rates[i - 1] once those before it are.
    """
    is_drafted = windows.is_drafted()
    num_accepted = _length_of_prefix(is_drafted & (windows.coins() < conditional_rates(rates)))
    is_accepted = torch.arange(len(rates), device=rates.device) < num_accepted[:, None]
    token_ids = sampled_ids.clone()
    token_ids[:, :-1] = torch.where(is_accepted, windows.draft_ids, sampled_ids[:, :-1])
    return Verdict(token_ids, num_accepted, num_accepted + windows.samples, is_drafted.sum(dim=1))


def conditional_rates(rates: torch.Tensor) -> torch.Tensor:
    """From unconditional rates, fp32 [k], to the rate of each draft given that those before it are accepted."""
    before = torch.cat([torch.ones_like(rates[:1]), rates[:-1]])
    return torch.where(before > 0, rates / before, 0.0)


@dataclass(frozen=True, slots=True)
class Laws:
    """The laws of the windows' rows, looked up row by row: with a large vocabulary all of them are too much."""

    # [num_requests, k + 1, vocab] fp32: logits whose softmax is the target's law of each row's token
    target_logits: torch.Tensor
    # [num_requests, k + 1] fp32: logarithm of the sum of their exponentials
    target_total: torch.Tensor
    # [max_num_seqs + 1, k, vocab] fp32: the laws that drafts were drawn from
    draft_probabilities: torch.Tensor
    # [num_requests] int64: persistent rows
    rows: torch.Tensor

    def target(self, column: torch.Tensor) -> torch.Tensor:
        """The target's law of one row of each window, fp32 [num_requests, vocab]. column: int64 [num_requests]."""
        requests = torch.arange(len(self.rows), device=self.rows.device)
        return (self.target_logits[requests, column] - self.target_total[requests, column, None]).exp_()

    def draft(self, column: torch.Tensor) -> torch.Tensor:
        """The same of the drafter."""
        return self.draft_probabilities[self.rows, column]

    def of_drafts(self, draft_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Target and draft probability of each draft, fp32 [num_requests, k] each. draft_ids: [num_requests, k], all
        ids of the vocabulary."""
        k = draft_ids.shape[1]
        logits = self.target_logits[:, :k].gather(2, draft_ids[:, :, None])[:, :, 0]
        columns = torch.arange(k, device=draft_ids.device)
        return (logits - self.target_total[:, :k]).exp_(), self.draft_probabilities[
            self.rows[:, None], columns, draft_ids
        ]


def verify_draws(rule: AcceptanceRule, windows: Windows, laws: Laws, positions: torch.Tensor) -> Verdict:
    """Accept drafts that were drawn from a law of their own, and draw the token behind them.

    positions: int64 [num_requests, k + 1], of each row's token.
    """
    is_drafted = windows.is_drafted()
    # Where a draft is missing, the window ends.
    num_usable = _length_of_prefix(is_drafted)
    target_of_draft, draft_of_draft = laws.of_drafts(windows.draft_ids.clamp_min(0))
    accepted = rule(windows.coins(), num_usable, laws, target_of_draft, draft_of_draft)
    last_ids = _last_tokens(windows, accepted, num_usable, laws, positions)
    token_ids = torch.cat([windows.draft_ids, last_ids[:, None]], dim=1)
    token_ids.scatter_(1, accepted.num_accepted[:, None], last_ids[:, None])
    return Verdict(token_ids, accepted.num_accepted, accepted.num_accepted + windows.samples, is_drafted.sum(dim=1))


@dataclass(frozen=True, slots=True)
class Accepted:
    """What an acceptance rule decided."""

    # [num_requests] int64
    num_accepted: torch.Tensor
    # [num_requests] fp32: what the target's law is scaled by before the draft's is taken from it
    scale: torch.Tensor


#: coins [num_requests, k], num_usable [num_requests], laws, and target and draft probability of each draft,
#: [num_requests, k]; what stands in a column behind num_usable means nothing.
AcceptanceRule = Callable[[torch.Tensor, torch.Tensor, Laws, torch.Tensor, torch.Tensor], Accepted]


def standard_rule(
    coins: torch.Tensor,
    num_usable: torch.Tensor,
    laws: Laws,
    target_of_draft: torch.Tensor,
    draft_of_draft: torch.Tensor,
) -> Accepted:
    """Each draft with min(1, target / draft), up to the first that is rejected (Leviathan et al. 2023)."""
    is_accepted = (coins * draft_of_draft < target_of_draft) & _is_usable(num_usable, coins.shape[1])
    return Accepted(_length_of_prefix(is_accepted), torch.ones_like(coins[:, 0]))


def block_rule(
    coins: torch.Tensor,
    num_usable: torch.Tensor,
    laws: Laws,
    target_of_draft: torch.Tensor,
    draft_of_draft: torch.Tensor,
) -> Accepted:
    """The longest block whose own coin lets it through, whatever the coins before it said (Sun et al. 2024, alg. 2).

    worth_0 = 1, worth_i = min(1, worth_(i-1) * target / draft of draft i). lack_i = sum of
    max(worth_i * target - draft, 0) over the next row. A block of i drafts passes with lack_i / (lack_i + 1 - worth_i),
    the whole window with its worth.
    """
    k = coins.shape[1]
    is_usable = _is_usable(num_usable, k)
    worth = torch.ones(len(coins), k + 1, dtype=coins.dtype, device=coins.device)
    is_passed = torch.zeros_like(is_usable)
    for length in range(1, k + 1):
        ratio = torch.where(is_usable[:, length - 1], target_of_draft[:, length - 1] / draft_of_draft[:, length - 1], 0)
        worth[:, length] = (worth[:, length - 1] * ratio).clamp_max_(1.0)
        chance = torch.where(num_usable == length, worth[:, length], _block_chance(laws, worth, length))
        is_passed[:, length - 1] = (coins[:, length - 1] < chance) & is_usable[:, length - 1]
    num_accepted = (is_passed * torch.arange(1, k + 1, device=coins.device)).amax(dim=1)
    return Accepted(num_accepted, worth.gather(1, num_accepted[:, None])[:, 0])


def _block_chance(laws: Laws, worth: torch.Tensor, length: int) -> torch.Tensor:
    """Chance that a block of `length` drafts passes which is not the whole window, [num_requests]."""
    worth_of_block = worth[:, length]
    if length == worth.shape[1] - 1:
        return worth_of_block
    column = torch.full_like(laws.rows, length)
    lacking = worth_of_block[:, None] * laws.target(column) - laws.draft(column)
    lack = lacking.clamp_min_(0.0).sum(dim=-1)
    denominator = lack + 1.0 - worth_of_block
    return torch.where(denominator > 0, lack / denominator, 1.0)


#: rejection_sample_method -> rule for drafts with probabilities.
ACCEPTANCE_RULES: dict[str, AcceptanceRule] = {"standard": standard_rule, "block": block_rule}


def _last_tokens(
    windows: Windows, accepted: Accepted, num_usable: torch.Tensor, laws: Laws, positions: torch.Tensor
) -> torch.Tensor:
    """The token behind the accepted drafts, [num_requests]: behind a rejection a draw from what the draft's law lacks
    of the target's, else (all accepted, or nothing drafted) the plain sample of its position."""
    column = accepted.num_accepted
    is_recovery = column < num_usable
    law = laws.target(column)
    draft = laws.draft(column.clamp_max(windows.draft_ids.shape[1] - 1))
    lacking = (accepted.scale[:, None] * law - draft).clamp_min_(0.0)
    # Laws that are equal but for rounding lack nothing: whatever was rejected, the target's own law is right.
    use_lacking = is_recovery & (lacking.sum(dim=-1) > 0)
    weights = torch.where(use_lacking[:, None], lacking, law)
    stream = torch.where(is_recovery, window_stream(RECOVERY, column), TARGET_SAMPLE)
    at = torch.where(is_recovery, windows.start, positions.gather(1, column[:, None])[:, 0])
    ids = spread_ids(law.shape[-1], law.device)
    return (weights / exponential_noise(windows.keys, at, stream, ids)).argmax(dim=-1)


def _is_usable(num_usable: torch.Tensor, k: int) -> torch.Tensor:
    return torch.arange(k, device=num_usable.device) < num_usable[:, None]


def _is_drafted(draft_ids: torch.Tensor, num_drafts: torch.Tensor) -> torch.Tensor:
    columns = torch.arange(draft_ids.shape[1], device=draft_ids.device)
    return (draft_ids >= 0) & (columns < num_drafts[:, None])


def _length_of_prefix(is_in: torch.Tensor) -> torch.Tensor:
    """[n, k] bool -> [n] int64: how many columns hold before the first that does not."""
    return is_in.long().cumprod(dim=1).sum(dim=1)
