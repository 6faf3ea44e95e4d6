"""How many drafts survive, and which tokens a step emits.

Sample and match, exact for one-hot drafts: each verify row draws the token that plain decoding would draw at its
position, and drafts are accepted while they equal it. Greedy requests are the case where the draw is the argmax.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


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


def sample_and_match(
    sampled_ids: torch.Tensor, draft_ids: torch.Tensor, num_drafts: torch.Tensor, samples: torch.Tensor
) -> Verdict:
    """Accept drafts while they equal the target's own samples.

    sampled_ids: [num_requests, k + 1], row j's sample given the drafts before it (anything behind num_drafts).
    draft_ids: [num_requests, k]; -1 marks a missing draft, which is always rejected. num_drafts: [num_requests], verify
    rows less one. samples: [num_requests], 1, or 0 for a partial chunk, which emits nothing.
    """
    num_columns = draft_ids.shape[1]
    if num_columns == 0:
        zeros = torch.zeros_like(samples)
        return Verdict(sampled_ids, zeros, samples, zeros)
    columns = torch.arange(num_columns, device=draft_ids.device)
    is_drafted = (draft_ids >= 0) & (columns < num_drafts[:, None])
    is_match = is_drafted & (draft_ids == sampled_ids[:, :-1])
    num_accepted = is_match.long().cumprod(dim=1).sum(dim=1)
    return Verdict(sampled_ids, num_accepted, num_accepted + samples, is_drafted.sum(dim=1))
