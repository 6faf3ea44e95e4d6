"""Devices that a run is to have: what auto stands for, whether they are here, what is free on them.

Does not belong here: what they are called and how fast they run (environment.py).
"""

from __future__ import annotations

import math
from pathlib import Path

from specbench import environment


def default_device() -> str:
    """What engine.device=auto stands for. torch takes seconds to import: it is asked only where there may be a GPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def missing_device(device: str, num_ranks: int = 1, ranks_per_gpu: int = 1) -> str | None:
    """What to say of a GPU that is not there. None where all are."""
    if not device.startswith("cuda"):
        return None
    import torch

    index = int(device.partition(":")[2] or 0)
    num_gpus = math.ceil(num_ranks / ranks_per_gpu)
    if num_gpus > 1 and index + num_gpus > torch.cuda.device_count():
        return (
            f"parallel.tensor_parallel_size: {num_ranks} ranks from device {index} on take more than the "
            f"{torch.cuda.device_count()} CUDA devices that torch sees; say parallel=tp1, or parallel.ranks_per_gpu=N "
            "to see on fewer that texts are right, not how fast they come"
        )
    if index >= torch.cuda.device_count():
        return (
            f"engine.device: {device} is not there, torch sees {torch.cuda.device_count()} CUDA devices; say "
            "engine.device=auto (`specbench doctor` shows why)"
        )
    return None


def free_bytes(device: str, num_ranks: int = 1, ranks_per_gpu: int = 1) -> int | None:
    """Memory that is free for each rank: of its device or its share of one, or its share of the machine's. None where
    it is not known, as of devices that are not here."""
    if device == "cpu":
        free = environment.free_memory_bytes()
        return None if free is None else free // num_ranks
    if missing_device(device, num_ranks, ranks_per_gpu) is not None:
        return None
    import torch

    first = int(device.partition(":")[2] or 0)
    last = first + math.ceil(num_ranks / ranks_per_gpu) - 1
    return min(torch.cuda.mem_get_info(index)[0] for index in range(first, last + 1)) // min(ranks_per_gpu, num_ranks)
