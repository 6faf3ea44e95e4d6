"""Index maps of a drafting pass that depend on its shape alone; passes of one shape share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class RowIndices:
    """Rows of a pass against its requests."""

    # [num_requests] int64: first row of each request
    query_start: torch.Tensor
    # [num_tokens] int64: row -> batch index
    request_of_row: torch.Tensor


@lru_cache(maxsize=256)
def row_indices(query_start_loc_np: tuple[int, ...], device: torch.device) -> RowIndices:
    """Indices of a pass whose request i has rows query_start_loc_np[i] .. query_start_loc_np[i + 1] - 1."""
    starts = np.asarray(query_start_loc_np, dtype=np.int64)
    return RowIndices(
        query_start=torch.tensor(starts[:-1], device=device),
        request_of_row=torch.tensor(np.repeat(np.arange(len(starts) - 1), np.diff(starts)), device=device),
    )
