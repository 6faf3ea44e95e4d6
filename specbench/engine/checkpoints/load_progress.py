"""How far loading is, said now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

#: Seconds between two messages.
_INTERVAL_S = 2.0


class LoadProgress:
    """Counts bytes as they come; says so at most every few seconds, so that small models load in silence."""

    def __init__(self, total_bytes: int, on_progress: Callable[[str], None]) -> None:
        self._total_bytes = total_bytes
        self._on_progress = on_progress
        self._num_bytes = 0
        self._started_s = self._said_s = time.monotonic()

    def __call__(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        now_s = time.monotonic()
        if now_s - self._said_s < _INTERVAL_S:
            return
        self._said_s = now_s
        rate = self._num_bytes / (now_s - self._started_s)
        self._on_progress(
            f"loading weights: {self._num_bytes / 1e9:.1f} of {self._total_bytes / 1e9:.1f} GB, {rate / 1e9:.1f} GB/s"
        )
