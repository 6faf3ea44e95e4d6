"""Rows of a large vocabulary, a few at a time.

A pass over all rows of a verify step makes temporaries of hundreds of megabytes where the vocabulary is large. On a CPU
each is new memory to fault in, and nothing stays in the cache from one operation to the next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

#: Elements worked on at once: what a CPU's cache holds; 1 GiB of fp32 elsewhere.
_MAX_CPU_ELEMENTS, _MAX_ELEMENTS = 1 << 18, 1 << 28


def row_chunks(logits: torch.Tensor) -> Iterator[slice]:
    """Slices that cover the rows of [num_rows, vocab]; at least one row each."""
    limit = _MAX_CPU_ELEMENTS if logits.device.type == "cpu" else _MAX_ELEMENTS
    size = max(1, limit // logits.shape[-1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def log_total(logits: torch.Tensor) -> torch.Tensor:
    """Logarithm of the sum of exponentials of each row, fp32 [num_rows], from [num_rows, vocab]."""
    return torch.cat([logits[rows].logsumexp(dim=-1) for rows in row_chunks(logits)])
