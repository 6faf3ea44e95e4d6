"""Bytes of tensors from safetensors files to the device, as fast as the disk gives them.

Belongs here: reading ranges of files, staging on the way to a GPU. Does not belong here: what a tensor means, its type
in the model (weights.py).

A large tensor is read in pieces by several threads, since one request at a time leaves a fast disk idle. On the way to
a GPU the pieces land in pinned memory, of which one half is copied while the other is filled. Files are not mapped into
memory: each page of a mapping is faulted in by the one thread that copies.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.errors import UserError

#: Types as safetensors spells them.
TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
_NUM_THREADS = 4
#: What one thread reads at once, and what is staged at once.
_PIECE_BYTES, _STAGED_BYTES = 8 << 20, 32 << 20
#: The system is told that so much behind a tensor comes next.
_READ_AHEAD_BYTES = 256 << 20


class FileReader:
    """Reads tensors as they are stored. Keep it as long as there is something to read: it holds files and threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="read-weights")
        # file -> descriptor
        self._descriptors: dict[Path, int] = {}
        # two halves: [_STAGED_BYTES] uint8 in pinned memory, and an event behind the last copy from it
        self._stages: list[tuple[Tensor, torch.cuda.Event]] = []
        self._num_staged = 0

    def __del__(self) -> None:
        self._threads.shutdown(wait=False)
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def read(self, entry: TensorEntry) -> Tensor:
        """One tensor on the device, in its stored type."""
        descriptor = self._descriptor(entry.file)
        if sys.platform == "linux":
            os.posix_fadvise(descriptor, entry.offset, entry.num_bytes + _READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
        stored = torch.empty(entry.num_bytes, dtype=torch.uint8, device=self._device)
        if self._device.type == "cuda":
            self._read_staged(entry, descriptor, stored)
        else:
            self._fill(entry, descriptor, 0, stored)
        return stored.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)

    def _read_staged(self, entry: TensorEntry, descriptor: int, stored: Tensor) -> None:
        if not self._stages:
            self._stages = [(_pinned(_STAGED_BYTES), torch.cuda.Event()) for _ in range(2)]
        for start in range(0, entry.num_bytes, _STAGED_BYTES):
            stage, is_copied = self._stages[self._num_staged % 2]
            self._num_staged += 1
            is_copied.synchronize()
            part = stage[: min(_STAGED_BYTES, entry.num_bytes - start)]
            self._fill(entry, descriptor, start, part)
            stored[start : start + len(part)].copy_(part, non_blocking=True)
            is_copied.record()

    def _fill(self, entry: TensorEntry, descriptor: int, start: int, part: Tensor) -> None:
        """Bytes of the tensor from `start` on into host memory, [num_bytes] uint8."""
        memory = part.numpy().data

        def fill_piece(first: int) -> None:
            piece = memory[first : first + _PIECE_BYTES]
            _read_exactly(entry.file, descriptor, entry.offset + start + first, piece)

        firsts = range(0, len(part), _PIECE_BYTES)
        if len(firsts) == 1:
            fill_piece(0)
        else:
            list(self._threads.map(fill_piece, firsts))

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(file, os.O_RDONLY)
        return self._descriptors[file]


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def _read_exactly(file: Path, descriptor: int, offset: int, memory: memoryview) -> None:
    while len(memory):
        num_read = os.preadv(descriptor, [memory], offset)
        if num_read == 0:
            raise UserError(f"{file}: ends at byte {offset}, before its last tensor does; fetch the file again")
        memory, offset = memory[num_read:], offset + num_read
