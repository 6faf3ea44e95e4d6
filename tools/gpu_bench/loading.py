"""How fast weights come from a disk, against what the disk gives to reading alone.

The files are dropped from the system's cache before each pass, as far as it lets go of them.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, Checkpoint
from specbench.engine.checkpoints.weights import WeightReader

from .cases import synchronize
from .shapes import open_shape

_PIECE_BYTES = 8 << 20
_NUM_THREADS = 4


def write_checkpoint(shape: Path, folder: Path, num_layers: int) -> Path:
    """A checkpoint of a shape's first layers, a file for every few tensors."""
    config = json.loads((shape / CONFIG_FILE).read_text(encoding="utf-8")) | {"num_hidden_layers": num_layers}
    folder.mkdir()
    (folder / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")
    tensors = {
        name: torch.empty(entry.shape, dtype=torch.bfloat16).fill_(0.01)
        for name, entry in open_shape(folder).tensors.items()
    }
    names = list(tensors)
    for index in range(4):
        save_file({name: tensors[name] for name in names[index::4]}, folder / f"model-{index}.safetensors")
    return folder


def drop_from_cache(checkpoint: Checkpoint) -> None:
    for file in checkpoint.files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def disk_bytes_per_s(checkpoint: Checkpoint) -> float:
    """Of reading the files from end to end into host memory, several pieces at once."""
    drop_from_cache(checkpoint)
    pieces = [(file, start) for file in checkpoint.files for start in range(0, file.stat().st_size, _PIECE_BYTES)]

    def read(piece: tuple[Path, int]) -> int:
        with piece[0].open("rb", buffering=0) as stream:
            stream.seek(piece[1])
            return len(stream.read(_PIECE_BYTES))

    start_s = time.perf_counter()
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        num_bytes = sum(threads.map(read, pieces))
    return num_bytes / (time.perf_counter() - start_s)


def load_bytes_per_s(checkpoint: Checkpoint, device: torch.device) -> float:
    """Of reading every tensor to the device, checked, by the engine's own reader."""
    drop_from_cache(checkpoint)
    start_s = time.perf_counter()
    reader = WeightReader(checkpoint, torch.bfloat16, device)
    for name in checkpoint.tensors:
        reader.read(name)
    synchronize(device)
    return checkpoint.num_bytes / (time.perf_counter() - start_s)
