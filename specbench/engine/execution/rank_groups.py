"""How ranks find and reach each other: a store, and groups of processes over it.

Belongs here: stores, groups, what is bound to which address. Does not belong here: starting and watching processes
(rank_processes.py), what is said (step_message.py, layers/parallel.py).

Nothing is registered with torch.distributed's process-wide default group: engines of one process each have their own.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroup, ProcessGroupGloo, Store, TCPStore

from specbench.engine.execution.peer_memory import PeerMemory, RowKind, open_peer_memory
from specbench.engine.execution.step_message import StepMessage
from specbench.engine.layers.parallel import PeerLost, TensorParallel
from specbench.engine.shard import Shard

LOOPBACK = "127.0.0.1"
#: Ranks that are up find each other within this.
_CONNECT_TIMEOUT = timedelta(seconds=15)
#: Whoever watches the ranks has the first word on what hangs: it knows which rank that is.
_LATER = timedelta(seconds=10)
#: A rank waits for the next step for as long as there is none.
_NO_TIMEOUT = timedelta(days=20)


def open_store() -> tuple[Store, int]:
    """A store that this process serves on the loopback device alone, and its port."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


def join_store(host: str, port: int) -> Store:
    """A store that another process serves."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_NO_TIMEOUT)


@dataclass(frozen=True, slots=True, eq=False)
class RankGroups:
    """One engine's groups, as one rank sees them."""

    parallel: TensorParallel
    control: Control
    #: Those of `parallel`: for collectives that run at once, and for recorded ones.
    data: tuple[ProcessGroup, ...]
    #: What small sums go through; else why it is not there.
    peer_memory: PeerMemory | str

    def abort(self) -> None:
        """Let go of whoever waits for another rank on a GPU. Sockets between processes break by themselves."""
        if isinstance(self.peer_memory, PeerMemory):
            self.peer_memory.abort()
        for group in self.data:
            if not isinstance(group, ProcessGroupGloo):
                group.abort()

    @property
    def sums_text(self) -> str:
        """How sums over ranks are made, on one line."""
        if isinstance(self.data[0], ProcessGroupGloo):
            return "sums over ranks: gloo"
        if isinstance(self.peer_memory, str):
            return f"sums over ranks: NCCL ({self.peer_memory})"
        return f"sums over ranks: over the GPUs' memory for up to {self.peer_memory.max_rows} rows, NCCL for more"


def join_groups(
    store: Store,
    name: str,
    shard: Shard,
    device: torch.device,
    host: str | None,
    timeout_s: float,
    kind: RowKind | None = None,
    ranks_per_gpu: int = 1,
) -> RankGroups:
    """Connect with the other ranks of the engine called `name`; each of them does the same at the same time.

    host: the address that this rank listens on; None leaves it to the network's configuration. timeout_s: how long a
    collective may wait for a rank. kind: what is summed over the GPUs' memory, where that can be done; None: nothing.
    ranks_per_gpu: how many share one.
    """
    timeout = timedelta(seconds=timeout_s) + _LATER
    control = _gloo_group(PrefixStore(f"{name}/control", store), shard, host)
    data_store = PrefixStore(f"{name}/data", store)
    memory: PeerMemory | str = "parallel.all_reduce=nccl" if device.type == "cuda" else "ranks are on CPUs"
    if device.type == "cuda":
        if ranks_per_gpu > 1:
            _pose_as_several_machines(shard)
        data = tuple(
            _nccl_group(PrefixStore(use, data_store), shard, device, host, timeout) for use in ("now", "recorded")
        )
        if kind is not None:
            memory = open_peer_memory(PrefixStore(f"{name}/memory", store), shard, device, kind, ranks_per_gpu)
    else:
        data = (_gloo_group(data_store, shard, host),)
        data[0]._set_default_timeout(timeout)  # type: ignore[attr-defined]
    inboxes = memory.inboxes if isinstance(memory, PeerMemory) else None
    return RankGroups(TensorParallel(shard, data, inboxes), Control(control, shard.rank), data, memory)


def _gloo_group(store: Store, shard: Shard, host: str | None) -> ProcessGroup:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    device = ProcessGroupGloo.create_default_device() if host is None else ProcessGroupGloo.create_device(hostname=host)
    options._devices = [device]
    options._timeout = _CONNECT_TIMEOUT
    return cast(ProcessGroup, ProcessGroupGloo(store, shard.rank, shard.size, options))


def _pose_as_several_machines(shard: Shard) -> None:
    """NCCL lets no two ranks of a machine have one GPU: let it take each for a machine of its own, which it reaches
    through sockets."""
    os.environ["NCCL_HOSTID"] = f"specbench rank {shard.rank}"
    os.environ["NCCL_IB_DISABLE"] = "1"


def _nccl_group(store: Store, shard: Shard, device: torch.device, host: str | None, timeout: timedelta) -> ProcessGroup:
    if host == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # Left alone it ends this process where another rank has gone, before anybody can say which.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    # What keeps recorded collectives apart from others of their group takes thrice their time: they have their own one.
    os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = cast(ProcessGroup, dist.ProcessGroupNCCL(store, shard.rank, shard.size, options))
    # The first collectives connect the ranks: no graph may record that.
    parallel = TensorParallel(shard, (group,))
    x = torch.zeros(shard.size, shard.size, device=device)
    for call in (parallel.all_reduce, parallel.all_gather, parallel.reduce_scatter_channels):
        call(x)
    torch.cuda.synchronize(device)
    return group


class Control:
    """What rank 0 tells the others before each step, by the host alone."""

    def __init__(self, group: ProcessGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def send(self, message: StepMessage, following: bytes) -> None:
        self._broadcast(torch.from_numpy(message.buffer_np))
        if following:
            self._broadcast(torch.frombuffer(bytearray(following), dtype=torch.uint8))

    def receive(self, message: StepMessage) -> bytes:
        """Wait for the next message, as long as it takes; returns what follows the buffer."""
        self._broadcast(torch.from_numpy(message.buffer_np))
        if not message.num_following_bytes:
            return b""
        following = torch.empty(message.num_following_bytes, dtype=torch.uint8)
        self._broadcast(following)
        return following.numpy().tobytes()

    def _broadcast(self, values: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = _NO_TIMEOUT
        try:
            self._group.broadcast([values], options).wait()
        except RuntimeError as error:
            raise PeerLost(str(error)) from error
