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
    #: That of `parallel`.
    data: ProcessGroup

    def abort(self) -> None:
        """Let go of whoever waits in a collective on a GPU. Sockets between processes break by themselves."""
        if isinstance(self.data, ProcessGroupGloo):
            return
        self.data.abort()


def join_groups(
    store: Store, name: str, shard: Shard, device: torch.device, host: str | None, timeout_s: float
) -> RankGroups:
    """Connect with the other ranks of the engine called `name`; each of them does the same at the same time.

    host: the address that this rank listens on; None leaves it to the network's configuration. timeout_s: how long a
    collective may wait for a rank.
    """
    timeout = timedelta(seconds=timeout_s) + _LATER
    control = _gloo_group(PrefixStore(f"{name}/control", store), shard, host)
    data_store = PrefixStore(f"{name}/data", store)
    if device.type == "cuda":
        data = _nccl_group(data_store, shard, device, host, timeout)
    else:
        data = _gloo_group(data_store, shard, host)
        data._set_default_timeout(timeout)  # type: ignore[attr-defined]
    return RankGroups(TensorParallel(shard, data), Control(control, shard.rank), data)


def _gloo_group(store: Store, shard: Shard, host: str | None) -> ProcessGroup:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    device = ProcessGroupGloo.create_default_device() if host is None else ProcessGroupGloo.create_device(hostname=host)
    options._devices = [device]
    options._timeout = _CONNECT_TIMEOUT
    return cast(ProcessGroup, ProcessGroupGloo(store, shard.rank, shard.size, options))


def _nccl_group(store: Store, shard: Shard, device: torch.device, host: str | None, timeout: timedelta) -> ProcessGroup:
    if host == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = cast(ProcessGroup, dist.ProcessGroupNCCL(store, shard.rank, shard.size, options))
    # The first collective connects the ranks: no graph may record that.
    group.allreduce([torch.zeros(1, device=device)]).wait()
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
