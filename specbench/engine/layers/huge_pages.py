"""Large weights on huge pages. A CPU that looks up a page of 4 KiB for each 4 KiB of weights spends a tenth of a decode
step on it.

Best effort: a system that has no huge pages, or will not give any, refuses, and nothing but time is lost.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable

#: Linux 6.1: gather what lies in a range into huge pages, now.
_MADV_COLLAPSE = 25
_PAGE_BYTES, _HUGE_PAGE_BYTES = 1 << 12, 1 << 21


def use_huge_pages(ranges: Iterable[tuple[int, int]]) -> None:
    """Move memory to huge pages; ranges are (first address, one past the last)."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for start, end in join_ranges(ranges):
        first_page = start // _PAGE_BYTES * _PAGE_BYTES
        madvise(ctypes.c_void_p(first_page), ctypes.c_size_t(end - first_page), _MADV_COLLAPSE)


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order, neighbours in one: a matrix smaller than a huge page shares it with the next."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if joined and start - joined[-1][1] < _HUGE_PAGE_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined
