"""The rows of a step, and their tokens, as kernels take them. No Triton.

Belongs here: layouts that several kernels share. Does not belong here: how they are made (layers/metadata_builder.py).
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
class PagedBatch:
    """Rows of a step, and where the keys of their requests lie."""

    # [num_reqs + 1] int32, row counts summed up
    query_start_loc: Tensor
    # [num_reqs] int64, position of each request's first row
    first_position: Tensor
    # [num_reqs], rows that count: the rest read nothing and give zeros. None: all count
    num_live: Tensor | None
    # [num_reqs, columns] int32: block j of a request is in column j + 1
    block_table: Tensor
    block_size: int
    #: The most rows of one request.
    max_rows: int
    #: As paged_attention.new_arrivals makes them, where the last program of a tile may add up its splits.
    arrivals: Tensor | None = None


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
