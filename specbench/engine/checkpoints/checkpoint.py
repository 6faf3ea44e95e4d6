"""A checkpoint folder as it lies on disk: its config and an index of its tensors, read from the headers alone.

Belongs here: finding files, parsing config.json and safetensors headers, hashing. Does not belong here: which tensors a
model family expects (models/), reading weights (weights.py), torch.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from specbench.engine.checkpoints.quantised import fold_quantised
from specbench.engine.checkpoints.tensor_entry import BYTES_OF, TensorEntry
from specbench.errors import UserError

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
INDEX_FILE = "model.safetensors.index.json"
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder with config.json and safetensors files."""

    path: Path
    config: dict[str, Any]
    #: tensor name -> entry
    tensors: dict[str, TensorEntry]
    #: The safetensors files, sorted by name; none where weights are random.
    files: tuple[Path, ...]
    #: Weights are drawn, not read; `tensors` is what the model would read from a checkpoint.
    is_random: bool = False
    #: Told the bytes of each tensor as it is read.
    on_read: Callable[[int], None] = lambda num_bytes: None

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the config and every header. Raises UserError when the folder is not a whole checkpoint."""
        folder = Path(path)
        if not folder.is_dir():
            raise UserError(f"checkpoint {folder}: no such folder; set model.checkpoint to a folder with {CONFIG_FILE}")
        config = read_json(folder / CONFIG_FILE)
        files = _weight_files(folder)
        tensors: dict[str, TensorEntry] = {}
        for file in files:
            for entry in _read_header(file):
                if entry.name in tensors:
                    raise UserError(
                        f"{file}: tensor {entry.name} is also in {tensors[entry.name].file.name}; "
                        f"remove one of the files, or add {INDEX_FILE} to say which to read"
                    )
                tensors[entry.name] = entry
        return cls(folder, config, fold_quantised(tensors), files)

    @classmethod
    def of_config(cls, path: str | Path) -> Checkpoint:
        """config.json alone, for random weights. The model family fills in `tensors`."""
        folder = Path(path)
        return cls(folder, read_json(folder / CONFIG_FILE), {}, (), is_random=True)

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as they are stored."""
        parts = [part for entry in self.tensors.values() for part in (entry.parts or {"": entry}).values()]
        return sum(part.num_bytes for part in parts)

    def sha256(self) -> str:
        """One hash over config.json and all weight files."""
        digest = hashlib.sha256(b"random weights" if self.is_random else b"")
        for file in (self.path / CONFIG_FILE, *self.files):
            digest.update(f"{file.name}:{file.stat().st_size}\n".encode())
            with file.open("rb") as stream:
                while chunk := stream.read(_READ_BYTES):
                    digest.update(chunk)
        return digest.hexdigest()


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file, or a UserError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{file}: no such file; name a checkpoint folder, or fetch what is missing") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise UserError(f"{file}: expected a JSON object, found {type(value).__name__}; fetch the file again")
    return value


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_FILE
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or {type(name) for name in weight_map.values()} != {str}:
            raise UserError(f"{index}: key 'weight_map' is missing, empty or no object of names; fetch the file again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file}: named in {INDEX_FILE} but not there; fetch the missing file")
        return tuple(files)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder}: no *.safetensors file, and weights are read from those only; convert or fetch them")
    return tuple(files)


def _entry(file: Path, name: str, fields: dict[str, Any], data_start: int) -> TensorEntry:
    """ValueError, TypeError or KeyError for what is no entry of a header."""
    dtype, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    if not isinstance(dtype, str) or any(type(number) is not int or number < 0 for number in (*shape, start, end)):
        raise ValueError
    entry = TensorEntry(name, file, dtype, shape, data_start + start, end - start)
    if dtype in BYTES_OF and prod(shape) * BYTES_OF[dtype] != entry.num_bytes:
        raise UserError(
            f"{file}: tensor {name} {list(shape)} of {dtype} has {entry.num_bytes} bytes by its header, not "
            f"{prod(shape) * BYTES_OF[dtype]}; fetch the file again"
        )
    return entry


def _read_header(file: Path) -> list[TensorEntry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        num_header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if len(prefix) < 8 or 8 + num_header_bytes > size:
            raise UserError(f"{file}: truncated in its header, {size} bytes in all; fetch the file again")
        header_bytes = stream.read(num_header_bytes)
    try:
        header = json.loads(header_bytes)
        header.pop("__metadata__", None)
        entries = [_entry(file, name, fields, 8 + num_header_bytes) for name, fields in header.items()]
    except UserError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{file}: its header is not a safetensors header; fetch the file again") from None
    expected_size = max((entry.offset + entry.num_bytes for entry in entries), default=8 + num_header_bytes)
    if expected_size > size:
        raise UserError(
            f"{file}: truncated, its header promises {expected_size} bytes and it holds {size}; fetch the file again"
        )
    return entries
