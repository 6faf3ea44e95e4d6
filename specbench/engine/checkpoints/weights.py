"""Reads weights from safetensors, one tensor at a time, in the model's dtype on its device, or draws them at random.
Quantised ones are dequantised on the device. Nothing unpickles.

Belongs here: a tensor by its name, whole or a rank's part of it. Does not belong here: files and headers
(checkpoint.py, file_reader.py), what a code means (dequantise.py), where a tensor goes (models/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.dequantise import dequantise, nvfp4_scale, scale_by_row
from specbench.engine.checkpoints.file_reader import TORCH_DTYPES, FileReader
from specbench.engine.checkpoints.quantised import NVFP4
from specbench.engine.checkpoints.quantised_slices import stored_slices
from specbench.engine.checkpoints.random_weights import fill_at_random, random_fp8, random_nvfp4
from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.engine.layers.linear import Fp8Matrix, Matrix, Nvfp4Matrix, Nvfp4Stack
from specbench.engine.layers.parallel import ALONE, TensorParallel
from specbench.engine.shard import Part
from specbench.errors import UserError

#: All bits but the sign of the one code of float8_e4m3fn that is no number.
_FP8_NAN = 0x7F

#: Bytes of rows that are on the device at once while columns are taken from them.
_SLICED_BYTES = 64 << 20


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
        self._on_read = checkpoint.on_read
        self._files = FileReader(device)

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

    def read_matrix(self, names: Sequence[str]) -> Matrix:
        """Matrices of one product, stacked as `read_rows` does; in codes where they are kept so."""
        if not self._tensors[names[0]].is_kept:
            return self.read_rows(names)
        parts = [self._stored_parts(self._tensors[name], self._parts.get(name)) for name in names]
        if self._tensors[names[0]].dtype == NVFP4:
            return self._nvfp4_matrix(self._tensors[names[0]], parts)
        codes = torch.cat([part["codes"] for part in parts])
        scale = torch.cat([scale_by_row(part["codes"], part["scale"]) for part in parts])
        self.num_bytes += codes.nbytes + scale.nbytes
        _check_finite(self._tensors[names[0]], scale.isfinite())
        _check_finite(self._tensors[names[0]], (codes.view(torch.uint8) & _FP8_NAN) != _FP8_NAN)
        return Fp8Matrix(codes, scale)

    def _nvfp4_matrix(self, entry: TensorEntry, parts: Sequence[Mapping[str, Tensor]]) -> Nvfp4Matrix:
        matrix = Nvfp4Matrix(
            codes=torch.cat([part["codes"] for part in parts]),
            block_scale=torch.cat([part["block_scale"] for part in parts]),
            row_scale=torch.cat([nvfp4_scale(part).expand(len(part["codes"])) for part in parts]),
        )
        self._take_codes(entry, matrix.codes, matrix.block_scale, matrix.row_scale)
        return matrix

    def _take_codes(self, entry: TensorEntry, codes: Tensor, block_scale: Tensor, scale: Tensor) -> None:
        """Every code of NVFP4 is a number; scales may be none."""
        self.num_bytes += codes.nbytes + block_scale.nbytes + scale.nbytes
        _check_finite(entry, (block_scale.view(torch.uint8) & _FP8_NAN) != _FP8_NAN)
        _check_finite(entry, scale.isfinite())

    def read_stack(self, name: str) -> Nvfp4Stack:
        """Matrices of experts that stay in codes."""
        entry = self._tensors[name]
        parts = self._stored_parts(entry, self._parts.get(name))
        scale = nvfp4_scale(parts).expand(len(parts["codes"])).contiguous()
        stack = Nvfp4Stack(parts["codes"], parts["block_scale"], scale)
        self._take_codes(entry, stack.codes, stack.block_scale, scale)
        return stack

    def is_kept(self, name: str) -> bool:
        """Whether the weight stays in codes."""
        return self._tensors[name].is_kept

    def _shape(self, name: str) -> tuple[int, ...]:
        part, whole = self._parts.get(name), self._tensors[name].shape
        return whole if part is None else part.shape_of(whole)

    def _read_into(self, name: str, destination: Tensor | None, dtype: torch.dtype) -> Tensor:
        entry, part = self._tensors[name], self._parts.get(name)
        if destination is None:
            destination = torch.empty(self._shape(name), dtype=dtype, device=self.device)
        self.num_bytes += destination.nbytes
        if part is not None and self._is_random:
            # The slice of what one rank alone would draw or hold: the same model on any number of ranks.
            whole = torch.empty(entry.shape, dtype=dtype, device=self.device)
            self._fill(entry, whole)
            destination.copy_(whole[part.index])
        else:
            self._fill(entry, destination, part)
        if not self._is_random:
            _check_finite(entry, destination.isfinite())
        return destination

    def _fill(self, entry: TensorEntry, destination: Tensor, part: Part | None = None) -> None:
        """A whole tensor, or a part of one that is not drawn."""
        if entry.parts is not None:
            self._fill_dequantised(entry, destination, part)
        elif self._is_random:
            fill_at_random(destination, entry.name)
        elif part is None:
            destination.copy_(self._read_stored(entry))
        else:
            self._fill_slice(entry, destination, part)

    def _fill_dequantised(self, entry: TensorEntry, destination: Tensor, part: Part | None) -> None:
        if part is not None and stored_slices(entry, part) is None:
            whole = torch.empty(entry.shape, dtype=destination.dtype, device=self.device)
            dequantise(self._stored_parts(entry, None), whole)
            destination.copy_(whole[part.index])
        else:
            dequantise(self._stored_parts(entry, part), destination)

    def _fill_slice(self, entry: TensorEntry, destination: Tensor, part: Part) -> None:
        """A rank's slice of a tensor that is stored as it is. What lies together is all that is read; of a matrix's
        columns whole rows are, a few at a time, since disks read no less."""
        if part.dim == 0:
            destination.copy_(self._read_stored(entry.rows(part.start, part.stop)))
        elif len(entry.shape) > 2:  # a stack of matrices
            inner = Part(part.dim - 1, part.start, part.stop)
            for index in range(entry.shape[0]):
                self._fill_slice(entry.row(index), destination[index], inner)
        else:
            num_rows = max(1, _SLICED_BYTES * entry.shape[0] // entry.num_bytes)
            for start in range(0, entry.shape[0], num_rows):
                stop = min(start + num_rows, entry.shape[0])
                destination[start:stop].copy_(self._read_stored(entry.rows(start, stop))[part.index])

    def _stored_parts(self, entry: TensorEntry, part: Part | None) -> dict[str, Tensor]:
        """Codes and scales of a quantised weight, or of a slice of it that ends between blocks."""
        assert entry.parts is not None
        slices = {} if part is None else stored_slices(entry, part)
        assert slices is not None
        if self._is_random:
            draw = random_nvfp4 if entry.dtype == NVFP4 else random_fp8
            drawn = draw(entry.shape, entry.name, self.device)
            return {role: tensor[slices[role].index] if role in slices else tensor for role, tensor in drawn.items()}
        return {
            role: self._read_slice(stored, slices[role]) if role in slices else self._read_stored(stored)
            for role, stored in entry.parts.items()
        }

    def _read_slice(self, entry: TensorEntry, part: Part) -> Tensor:
        """A slice of a tensor, in its stored type."""
        if part.dim == 0:
            return self._read_stored(entry.rows(part.start, part.stop))
        shape = part.shape_of(entry.shape)
        sliced = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype], device=self.device)
        self._fill_slice(entry, sliced, part)
        return sliced

    def _read_stored(self, entry: TensorEntry) -> Tensor:
        self._on_read(entry.num_bytes)
        return self._files.read(entry)


def _check_finite(entry: TensorEntry, is_finite: Tensor) -> None:
    """An argmax over NaN is the same everywhere: target, drafts and replay would agree on nonsense."""
    if not is_finite.all():
        raise UserError(
            f"{entry.file}: tensor {entry.name}: holds values that are not finite; fetch or export the file again"
        )
