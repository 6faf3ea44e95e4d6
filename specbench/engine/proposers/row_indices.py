"""Index maps of a drafting pass that depend on its shape alone; passes of one shape share them.

Those of uniform passes, the ones that are recorded in graphs, are kept for good: a graph goes on reading them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch

from specbench.engine.layers.to_device import to_device


@dataclass(frozen=True, slots=True)
class RowIndices:
    """Rows of a pass against its requests."""

    # [num_requests] int64: first row of each request
    query_start: torch.Tensor
    # [num_tokens] int64: row -> batch index
    request_of_row: torch.Tensor


def uniform_rows(query_start_loc_np: tuple[int, ...]) -> int | None:
    """How many rows each request has; None where they differ."""
    num_rows = query_start_loc_np[1]
    return num_rows if query_start_loc_np == tuple(range(0, query_start_loc_np[-1] + 1, num_rows)) else None


def row_indices(query_start_loc_np: tuple[int, ...], device: torch.device) -> RowIndices:
    """Indices of a pass whose request i has rows query_start_loc_np[i] .. query_start_loc_np[i + 1] - 1."""
    num_rows = uniform_rows(query_start_loc_np)
    if num_rows is None:
        return _ragged_indices(query_start_loc_np, device)
    return _uniform_indices(len(query_start_loc_np) - 1, num_rows, device)


@cache
def _uniform_indices(num_requests: int, num_rows: int, device: torch.device) -> RowIndices:
    return _indices(np.arange(num_requests + 1) * num_rows, device)


@lru_cache(maxsize=256)
def _ragged_indices(query_start_loc_np: tuple[int, ...], device: torch.device) -> RowIndices:
    return _indices(np.asarray(query_start_loc_np), device)


def _indices(starts: np.ndarray, device: torch.device) -> RowIndices:
    return RowIndices(*to_device([starts[:-1], np.repeat(np.arange(len(starts) - 1), np.diff(starts))], device))
