"""Where one tensor of a checkpoint lies. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

#: Types that are read, as safetensors spells them -> bytes of a number.
BYTES_OF = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    file: Path
    #: As safetensors spells it: "F32", "BF16", ..., or the type of a quantised weight (quantised.py).
    dtype: str
    shape: tuple[int, ...]
    #: Where its bytes begin in the file, and how many there are.
    offset: int = 0
    num_bytes: int = 0
    #: Of a quantised weight: "codes" and the roles of its scales -> their entries.
    parts: Mapping[str, TensorEntry] | None = None
    #: Of a quantised weight: stays in codes on the device, for products that take these.
    is_kept: bool = False

    def rows(self, start: int, stop: int) -> TensorEntry:
        """A range of the first dimension, where the tensor is stored as it is."""
        row_bytes = self.num_bytes // self.shape[0]
        shape = (stop - start, *self.shape[1:])
        return replace(self, shape=shape, offset=self.offset + start * row_bytes, num_bytes=(stop - start) * row_bytes)

    def row(self, index: int) -> TensorEntry:
        """One entry of the first dimension."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:])
