"""Passes that cut a law's support: min_p, top_k and top_p. By selection and thresholds, never by sorting a vocabulary.

Each takes the logits of all rows in place; a row that does not ask gets a threshold below everything. On a GPU
kernels/filters.py finds the thresholds of all three, and these are its reference.
"""

from __future__ import annotations

import torch

from specbench.engine.sampling.row_chunks import log_total, row_chunks

_NONE = float("-inf")
#: Most likely ids looked at for top_p, while their mass does not reach it.
_NUCLEUS_SIZES = (64, 512, 4096)


def mask_min_p_(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop ids less likely than min_p times the likeliest. logits: fp32 [num_rows, vocab]; min_p: [num_rows], 0 off."""
    drop_below_(logits, logits.amax(dim=-1) + min_p.log())


def mask_top_k_(logits: torch.Tensor, top_k: torch.Tensor) -> None:
    """Keep each row's top_k largest; those equal to the last of them stay too.

    top_k: int64 [num_rows], 0 off.
    """
    largest = min(max(int(top_k.max()), 1), logits.shape[-1])
    values = logits.topk(largest, dim=-1).values
    last = values.gather(1, (top_k.clamp(1, largest) - 1)[:, None])[:, 0]
    drop_below_(logits, torch.where(top_k > 0, last, _NONE))


def mask_top_p_(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the fewest most likely ids whose probability reaches top_p, and those equal to the last of them.

    top_p: fp32 [num_rows], 1 off. The likeliest ids are looked at, more of them where their mass does not reach it, and
    in a flat law the threshold is searched. How a row is treated depends on itself alone.
    """
    vocab_size = logits.shape[-1]
    threshold = torch.full_like(top_p, _NONE)
    total = log_total(logits)
    waiting = (top_p < 1).nonzero()[:, 0]
    for size in _NUCLEUS_SIZES:
        if len(waiting) == 0:
            break
        size = min(size, vocab_size)
        values = logits[waiting].topk(size, dim=-1).values
        probabilities = (values - total[waiting, None]).exp_()
        mass = probabilities.cumsum(dim=-1)
        is_reached = (mass[:, -1] >= top_p[waiting]) | (size == vocab_size)
        # The likeliest id has no mass before it and always stays.
        num_kept = (mass - probabilities < top_p[waiting, None]).sum(dim=-1)
        last = values.gather(1, num_kept[:, None] - 1)[:, 0]
        threshold[waiting[is_reached]] = last[is_reached]
        waiting = waiting[~is_reached]
    for part in row_chunks(logits[: len(waiting)]):
        rows = waiting[part]
        threshold[rows] = _search_threshold(logits[rows], total[rows], top_p[rows])
    drop_below_(logits, threshold)


def _search_threshold(logits: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Least logit of the fewest most likely ids whose probability reaches top_p, [num_rows], by bisection.

    Non-negative fp32 numbers are in the order of their bits, so 31 halvings find the largest probability for which the
    ids at least as likely reach it.
    """
    probabilities = (logits - total[:, None]).exp_()
    bits, counted = probabilities.view(torch.int32), torch.empty_like(probabilities)
    low = torch.zeros(len(logits), dtype=torch.int32, device=logits.device)
    high = torch.full_like(low, 0x7F800000)
    for _ in range(31):
        middle = low + (high - low) // 2
        is_reached = torch.mul(probabilities, bits >= middle[:, None], out=counted).sum(dim=-1) >= top_p
        low, high = torch.where(is_reached, middle, low), torch.where(is_reached, high, middle)
    return logits.masked_fill(bits < low[:, None], float("inf")).amin(dim=-1)


def drop_below_(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    """What is less than its row's threshold ([num_rows]) is out."""
    for rows in row_chunks(logits):
        logits[rows].masked_fill_(logits[rows] < threshold[rows, None], _NONE)
