"""Memory of one GPU that the other ranks' GPUs write to: which ranks can have it, and how it is made.

Belongs here: finding out, allocating, mapping, letting go of who waits. Does not belong here: what is exchanged through
it (kernels/all_reduce.py and its users), groups of processes (rank_groups.py).

All ranks have it, or none. It is mapped by CUDA's handles between processes, as torch shares tensors; NVLink multicast
is never asked for.
"""

from __future__ import annotations

import json
import pickle
import socket
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import Store

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
    mappings: tuple[Any, ...]
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


def open_peer_memory(store: Store, shard: Shard, device: torch.device, kind: RowKind) -> PeerMemory | str:
    """Inboxes for such rows, or why there are none. Every rank calls it at the same time, and hears the same."""
    reason = _obstacle(store, shard, device)
    if reason:
        return reason
    row_bytes = NUM_PLACES * shard.size * kind.width * kind.dtype.itemsize
    sizes = {
        "rows": (min(_MAX_ROWS, _MAX_BYTES // row_bytes), kind.width, kind.dtype.itemsize),
        "keys": (_MAX_KEYS, 1, torch.int64.itemsize),
    }
    shapes = {name: (rows, NUM_PLACES, shard.size, columns) for name, (rows, columns, _) in sizes.items()}
    buffers = {
        name: torch.full(shapes[name], EMPTY[itemsize], dtype=BITS[itemsize], device=device)
        for name, (_, _, itemsize) in sizes.items()
    }
    torch.cuda.synchronize(device)
    mapped: dict[str, list[Any]] = {name: [] for name in sizes}
    error = ""
    try:
        handles = _gather(store, "handles", shard, {name: _handle(buffer) for name, buffer in buffers.items()})
        for name, mappings in mapped.items():
            mappings += [
                buffers[name].untyped_storage() if rank == shard.rank else _open(theirs[name], device)
                for rank, theirs in enumerate(handles)
            ]
    except PeerLost:
        raise
    except RuntimeError as failure:
        error = f"rank {shard.rank} cannot map the others' memory ({' '.join(str(failure).split())[:200]})"
    errors = [each for each in _gather(store, "mapped", shard, error) if each]
    if errors:
        return errors[0]
    is_aborted = torch.zeros(1, dtype=torch.int32, device=device)
    inboxes = {
        name: Inboxes(
            shard.rank,
            torch.tensor([mapping.data_ptr() for mapping in mapped[name]], device=device),
            buffers[name],
            torch.zeros(sizes[name][0], dtype=torch.int32, device=device),
            is_aborted,
        )
        for name in sizes
    }
    return PeerMemory(
        PeerInboxes(**inboxes),
        tuple(each for mappings in mapped.values() for each in mappings),
        torch.cuda.Stream(device),
        torch.ones(1, dtype=torch.int32).pin_memory(),
    )


def _obstacle(store: Store, shard: Shard, device: torch.device) -> str:
    """Why the ranks' devices cannot write to each other's memory; nothing where they can."""
    index = torch.cuda.current_device() if device.index is None else device.index
    own = {"host": socket.gethostname(), "index": index, "uuid": str(torch.cuda.get_device_properties(index).uuid)}
    ranks = _gather(store, "devices", shard, own)
    if len({each["host"] for each in ranks}) > 1:
        return "the ranks are on several machines"
    if len({each["uuid"] for each in ranks}) < shard.size:
        return "several ranks share a GPU"
    reasons = [_no_access(index, rank, each) for rank, each in enumerate(ranks) if rank != shard.rank]
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


def _handle(buffer: torch.Tensor) -> str:
    return pickle.dumps(buffer.untyped_storage()._share_cuda_()).hex()


def _open(handle: str, device: torch.device) -> torch.UntypedStorage:
    """Another process's memory, for kernels of this process's device rather than of the one that it lies on."""
    _, *rest = pickle.loads(bytes.fromhex(handle))
    return torch.UntypedStorage._new_shared_cuda(device.index, *rest)


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
