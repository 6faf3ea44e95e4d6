"""Where a row of a step stands in its request, for kernels that look back along it."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor


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


@triton.jit
def offset_in_request(query_start_loc, num_reqs, max_rows, row, IS_UNIFORM: tl.constexpr):
    """Rows of the same request before this one in the step."""
    if IS_UNIFORM:
        offset = row % max_rows
    else:
        low = 0
        high = num_reqs
        while high - low > 1:
            middle = (low + high) // 2
            is_after = tl.load(query_start_loc + middle) > row
            high = tl.where(is_after, middle, high)
            low = tl.where(is_after, low, middle)
        offset = row - tl.load(query_start_loc + low)
    return offset
