"""Passes that cut a law's support: min_p, top_k and top_p. By selection and thresholds, never by sorting a vocabulary.

Each takes the logits of all rows in place; a row that does not ask gets a threshold below everything.
"""

from __future__ import annotations

import torch

from specbench.engine.sampling.row_chunks import log_total, row_chunks

_NONE = float("-inf")
#: Most likely ids looked at first for top_p, and how the number grows while their mass does not reach it.
_NUCLEUS_START, _NUCLEUS_GROWTH = 64, 8


def mask_min_p_(logits: torch.Tensor, min_p: torch.Tensor) -> None:
    """Drop ids less likely than min_p times the likeliest. logits: fp32 [num_rows, vocab]; min_p: [num_rows], 0 off."""
    _drop_below_(logits, logits.amax(dim=-1) + min_p.log())


def mask_top_k_(logits: torch.Tensor, top_k: torch.Tensor, largest: int) -> None:
    """Keep each row's top_k largest; those equal to the last of them stay too.

    top_k: int64 [num_rows], 0 off. largest: the largest of them, on the host.
    """
    largest = min(largest, logits.shape[-1])
    values = logits.topk(largest, dim=-1).values
    last = values.gather(1, (top_k.clamp(1, largest) - 1)[:, None])[:, 0]
    _drop_below_(logits, torch.where(top_k > 0, last, _NONE))


def mask_top_p_(logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Keep the fewest most likely ids whose probability reaches top_p, and those equal to the last of them.

    top_p: fp32 [num_rows], 1 off. How many are looked at depends on the rows together; what is kept of a row doesn't.
    """
    vocab_size = logits.shape[-1]
    is_on = top_p < 1
    total = log_total(logits)[:, None]
    size = min(_NUCLEUS_START, vocab_size)
    while True:
        values = logits.topk(size, dim=-1).values
        probabilities = (values - total).exp_()
        mass = probabilities.cumsum(dim=-1)
        if size == vocab_size or bool(((mass[:, -1] >= top_p) | ~is_on).all()):
            break
        size = min(size * _NUCLEUS_GROWTH, vocab_size)
    # The likeliest id has no mass before it and always stays.
    num_kept = (mass - probabilities < top_p[:, None]).sum(dim=-1)
    last = values.gather(1, num_kept[:, None] - 1)[:, 0]
    _drop_below_(logits, torch.where(is_on, last, _NONE))


def _drop_below_(logits: torch.Tensor, threshold: torch.Tensor) -> None:
    for rows in row_chunks(logits):
        logits[rows].masked_fill_(logits[rows] < threshold[rows, None], _NONE)
