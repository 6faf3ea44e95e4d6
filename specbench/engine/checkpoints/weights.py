"""Reads weights from safetensors, one tensor at a time, in the model's dtype on its device, or draws them at random.
Nothing unpickles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.random_weights import fill_at_random
from specbench.engine.layers.parallel import ALONE, TensorParallel
from specbench.engine.shard import Part
from specbench.errors import UserError


class WeightReader:
    """Hands out tensors of a checked checkpoint by name, and counts the bytes handed out. Of a tensor in `parts` it
    reads this rank's slice alone."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        parallel: TensorParallel = ALONE,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        self.dtype = dtype
        self.device = device
        #: The ranks that share the model, for the layers that are read.
        self.parallel = parallel
        self._parts = parts or {}
        #: Bytes of all tensors read so far, as they lie on the device.
        self.num_bytes = 0
        self._tensors = checkpoint.tensors
        self._is_random = checkpoint.is_random
        # file -> open handle
        self._handles: dict[Path, Any] = {}

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """One tensor, cast to `dtype` (the model's where None)."""
        return self._read_into(name, None, dtype or self.dtype)

    def read_rows(self, names: Sequence[str]) -> Tensor:
        """Tensors [rows_i, ...] stacked into one [sum of rows, ...], each read straight into its place."""
        shapes = [self._shape(name) for name in names]
        num_rows = sum(rows for rows, *_ in shapes)
        fused = torch.empty(num_rows, *shapes[0][1:], dtype=self.dtype, device=self.device)
        start = 0
        for name, (rows, *_) in zip(names, shapes, strict=True):
            self._read_into(name, fused[start : start + rows], self.dtype)
            start += rows
        return fused

    def _shape(self, name: str) -> tuple[int, ...]:
        part, whole = self._parts.get(name), self._tensors[name].shape
        return whole if part is None else part.shape_of(whole)

    def _read_into(self, name: str, destination: Tensor | None, dtype: torch.dtype) -> Tensor:
        if self._is_random:
            return self._draw_into(name, destination, dtype)
        file, part = self._tensors[name].file, self._parts.get(name)
        handle = self._handle(file)
        stored = handle.get_tensor(name) if part is None else handle.get_slice(name)[part.index]
        if not stored.isfinite().all():
            # An argmax over NaN is the same everywhere: target, drafts and replay would agree on nonsense.
            raise UserError(f"{file}: tensor {name}: holds values that are not finite; fetch or export the file again")
        self.num_bytes += stored.numel() * dtype.itemsize
        if destination is None:
            destination = torch.empty(stored.shape, dtype=dtype, device=self.device)
        return destination.copy_(stored)

    def _draw_into(self, name: str, destination: Tensor | None, dtype: torch.dtype) -> Tensor:
        if destination is None:
            destination = torch.empty(self._shape(name), dtype=dtype, device=self.device)
        self.num_bytes += destination.nbytes
        part = self._parts.get(name)
        if part is None:
            return fill_at_random(destination, name)
        # The slice of what one rank alone would draw: the same model on any number of ranks.
        whole = torch.empty(self._tensors[name].shape, dtype=dtype, device=self.device)
        return destination.copy_(fill_at_random(whole, name)[part.index])

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt", device="cpu")
        return self._handles[file]
