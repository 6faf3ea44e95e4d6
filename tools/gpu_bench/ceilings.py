"""What the device reaches at best: bytes a second of a copy, operations a second of a matrix product."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured in this run."""

    #: Read and written bytes of a device copy.
    bytes_per_s: float
    #: Multiplications and additions of a square bf16 product.
    operations_per_s: float

    def floor_s(self, num_bytes: float, num_operations: float) -> float:
        """The least time of work that reads so many bytes and does so many operations."""
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s)


def measure_ceilings(device: torch.device, is_small: bool) -> Ceilings:
    num_copied, size = (1 << 22, 128) if is_small else (1 << 32, 8192)
    source = torch.zeros(num_copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_seconds(lambda: target.copy_(source), device, 15)
    square = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    matmul_s = median_seconds(lambda: square @ square, device, 15)
    return Ceilings(2 * num_copied / copy_s, 2 * size**3 / matmul_s)


def median_seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Of several timed calls after three for warmth; on a GPU by events."""
    for _ in range(3):
        work()
    return statistics.median(_seconds(work, device) for _ in range(repeats))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        work()
        return time.perf_counter() - start_s
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
