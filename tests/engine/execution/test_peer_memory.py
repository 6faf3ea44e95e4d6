"""All ranks map each other's memory, or none does, and all of them say why."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from specbench.engine.execution import peer_memory
from specbench.engine.execution.memory_handles import MemoryHandle
from specbench.engine.shard import Shard


class FakeMapping:
    def __init__(self, handle: MemoryHandle) -> None:
        if handle.allocation == "closed":
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        self.address = handle.offset


def map_others(monkeypatch: pytest.MonkeyPatch, allocations: list[str | None]) -> list[Any]:
    """What each rank hears. An allocation of None has no handle."""
    storages = [torch.empty(rank + 1, dtype=torch.uint8).untyped_storage() for rank in range(len(allocations))]
    rank_of = {storage.data_ptr(): rank for rank, storage in enumerate(storages)}

    def handle(address: int) -> MemoryHandle:
        allocation = allocations[rank_of[address]]
        if allocation is None:
            raise RuntimeError("CUDA_ERROR_NOT_SUPPORTED")
        return MemoryHandle(allocation, 100 + rank_of[address])

    monkeypatch.setattr(peer_memory, "memory_handle", handle)
    monkeypatch.setattr(peer_memory, "Mapping", FakeMapping)
    store = HashStore()
    size = len(allocations)
    with ThreadPoolExecutor(size) as threads:
        return list(
            threads.map(lambda rank: peer_memory._map_others(store, Shard(rank, size), storages[rank]), range(size))
        )


def test_each_rank_maps_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = map_others(monkeypatch, ["a", "b", "c"])
    assert [[each and each.address for each in of_rank] for of_rank in heard] == [
        [None, 101, 102],
        [100, None, 102],
        [100, 101, None],
    ]


@pytest.mark.parametrize(("allocation", "said"), [(None, "NOT_SUPPORTED"), ("closed", "INVALID_VALUE")])
def test_none_does_where_one_cannot(monkeypatch: pytest.MonkeyPatch, allocation: str | None, said: str) -> None:
    heard = map_others(monkeypatch, ["a", allocation, "c"])
    assert len(set(heard)) == 1 and said in heard[0]
