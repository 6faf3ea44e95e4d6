"""The rows of a step, and their tokens, as kernels take them. No Triton.

Belongs here: layouts that several kernels share. Does not belong here: how they are made (layers/metadata.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from specbench.engine.kernels.drafts import OpenDraft


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step, request by request."""

    # [num_reqs + 1] int32, row counts summed up
    query_start_loc: Tensor
    num_reqs: int
    #: The most rows of one request.
    max_rows: int

    def is_uniform(self, num_rows: int) -> bool:
        """Whether all requests have as many rows, given how many there are together."""
        return num_rows == self.num_reqs * self.max_rows


@dataclass(frozen=True, slots=True)
class PoolTokens:
    """The tokens of a pass' rows, before they are read."""

    # [any, width] int64
    token_pool: Tensor
    # [num_requests] int64: rows of the pool
    rows: Tensor
    # [num_tokens] int64
    request_of_row: Tensor
    # [num_tokens] int64
    positions: Tensor
    #: How far ahead of its position each row reads.
    lookahead: int
    #: Each request's newest token, where it is not in the pool yet.
    draft: OpenDraft | None = None
