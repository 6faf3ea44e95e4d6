"""Memory of one GPU that the other ranks' GPUs write to: which ranks can have it, and how it is made.

Belongs here: finding out, allocating, mapping, letting go of who waits. Does not belong here: what is exchanged through
it (kernels/all_reduce.py and its users), groups of processes (rank_groups.py).

All ranks have it, or none. It is mapped by CUDA's handles between processes; NVLink multicast is never asked for.
"""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from torch.distributed import Store

from specbench.engine.execution.memory_handles import Mapping, MemoryHandle, memory_handle
from specbench.engine.kernels.inboxes import BITS, EMPTY, NUM_PLACES, Inboxes, PeerInboxes
from specbench.engine.layers.parallel import PeerLost
from specbench.engine.shard import Shard

#: Rows that one exchange may have, and bytes of an inbox: with more, NCCL is as fast.
_MAX_ROWS, _MAX_BYTES = 1024, 1 << 26
#: The same of exchanges of one number a row.
_MAX_KEYS = 2048
#: Ranks that are up answer each other within this.
_ANSWER_S = 30.0
_POLL_S = 0.002

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RowKind:
    """Rows of hidden states."""

    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class PeerMemory:
    """One rank's inboxes, as it and the others see them."""

    inboxes: PeerInboxes
    #: Mappings of the other ranks' memory, which last as long as they are held.
    mappings: tuple[Mapping, ...]
    #: What `abort` needs: a copy, unlike a kernel, waits for nothing that runs.
    abort_stream: torch.cuda.Stream
    # [1] int32, pinned: 1
    one: torch.Tensor

    @property
    def max_rows(self) -> int:
        """The most rows of hidden states that go through it."""
        return len(self.inboxes.rows.own)

    def abort(self) -> None:
        """Wait for no other rank any more, in kernels that run now, too. What they give from now on means nothing."""
        with torch.cuda.stream(self.abort_stream):
            self.inboxes.rows.is_aborted.copy_(self.one, non_blocking=True)
        self.abort_stream.synchronize()


def open_peer_memory(
    store: Store, shard: Shard, device: torch.device, kind: RowKind, ranks_per_gpu: int = 1
) -> PeerMemory | str:
    """Inboxes for such rows, or why there are none. Every rank calls it at the same time, and hears the same.
    ranks_per_gpu: how many may share one."""
    reason = _obstacle(store, shard, device, ranks_per_gpu)
    if reason:
        return reason
    row_bytes = NUM_PLACES * shard.size * kind.width * kind.dtype.itemsize
    kinds = (
        (min(_MAX_ROWS, _MAX_BYTES // row_bytes), kind.width, kind.dtype.itemsize),
        (_MAX_KEYS, 1, torch.int64.itemsize),
    )
    with torch.cuda.device(device):
        buffers = _inbox_buffers(shard.size, kinds)
        mappings = _map_others(store, shard, buffers[0].untyped_storage())
        if isinstance(mappings, str):
            return mappings
        is_aborted = torch.zeros(1, dtype=torch.int32, device=device)
        bases = [buffers[0].data_ptr() if each is None else each.address for each in mappings]
        inboxes = [
            Inboxes(
                shard.rank,
                torch.tensor(bases, device=device) + (buffer.data_ptr() - buffers[0].data_ptr()),
                buffer,
                torch.zeros(len(buffer), dtype=torch.int32, device=device),
                is_aborted,
            )
            for buffer in buffers
        ]
        one = torch.ones(1, dtype=torch.int32).pin_memory()
        others = tuple(each for each in mappings if each is not None)
        return PeerMemory(PeerInboxes(*inboxes), others, torch.cuda.Stream(), one)


def _inbox_buffers(size: int, kinds: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
    """[rows, NUM_PLACES, size, width] of each kind (rows, width, bytes of a number), in one piece of memory, EMPTY."""
    counts = [rows * NUM_PLACES * size * width * itemsize for rows, width, itemsize in kinds]
    pieces = torch.empty(sum(counts), dtype=torch.uint8, device="cuda").split(counts)
    buffers = [
        piece.view(BITS[itemsize]).view(rows, NUM_PLACES, size, width).fill_(EMPTY[itemsize])
        for piece, (rows, width, itemsize) in zip(pieces, kinds, strict=True)
    ]
    torch.cuda.synchronize()
    return buffers


def _map_others(store: Store, shard: Shard, own: torch.UntypedStorage) -> list[Mapping | None] | str:
    """Each rank's memory, this one's own left out, or why not all of them can."""
    handle, error = _attempt(shard, lambda: asdict(memory_handle(own.data_ptr())))
    ranks = _gather(store, "handles", shard, [handle, error])
    mappings: list[Mapping | None] | None = None
    if not any(error for _, error in ranks):
        handles = [MemoryHandle(**handle) for handle, _ in ranks]
        mappings, error = _attempt(
            shard, lambda: [None if rank == shard.rank else Mapping(each) for rank, each in enumerate(handles)]
        )
    errors = [each for each in _gather(store, "mapped", shard, error) if each]
    if errors or mappings is None:
        return next((error for _, error in ranks if error), errors[0])
    return mappings


def _obstacle(store: Store, shard: Shard, device: torch.device, ranks_per_gpu: int) -> str:
    """Why the ranks' devices cannot write to each other's memory; nothing where they can."""
    index = torch.cuda.current_device() if device.index is None else device.index
    own = {"host": socket.gethostname(), "index": index, "uuid": str(torch.cuda.get_device_properties(index).uuid)}
    ranks = _gather(store, "devices", shard, own)
    if len({each["host"] for each in ranks}) > 1:
        return "the ranks are on several machines"
    if max(Counter(each["uuid"] for each in ranks).values()) > ranks_per_gpu:
        return "several ranks share a GPU"
    reasons = [_no_access(index, rank, each) for rank, each in enumerate(ranks) if each["uuid"] != own["uuid"]]
    return next((reason for of_rank in _gather(store, "access", shard, reasons) for reason in of_rank if reason), "")


def _no_access(index: int, rank: int, other: dict[str, Any]) -> str:
    is_visible = (
        other["index"] < torch.cuda.device_count()
        and str(torch.cuda.get_device_properties(other["index"]).uuid) == other["uuid"]
    )
    if not is_visible:
        return f"rank {rank}'s GPU is not visible to the others (CUDA_VISIBLE_DEVICES)"
    if not torch.cuda.can_device_access_peer(index, other["index"]):
        return f"GPU {index} cannot reach the memory of GPU {other['index']}"
    return ""


def _attempt(shard: Shard, work: Callable[[], T]) -> tuple[T | None, str]:
    """What it gives, and the error in its place."""
    try:
        return work(), ""
    except RuntimeError as failure:
        return None, f"rank {shard.rank}: {failure}; memory of allocators with segments that grow cannot be mapped"


def _gather(store: Store, name: str, shard: Shard, value: Any) -> list[Any]:
    """What each rank says, in their order."""
    store.set(f"{name}/{shard.rank}", json.dumps(value))
    keys = [f"{name}/{rank}" for rank in range(shard.size)]
    end_s = time.monotonic() + _ANSWER_S
    # A wait of the store's own would keep every other thread from it.
    while not store.check(keys):
        if time.monotonic() > end_s:
            raise PeerLost(f"another rank has not answered within {_ANSWER_S:.0f} s")
        time.sleep(_POLL_S)
    return [json.loads(store.get(key)) for key in keys]
