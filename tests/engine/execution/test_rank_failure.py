"""What is said of ranks that fail, and that none is left. The ranks here do nothing but fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed import Store

from specbench.engine.config import EngineConfig
from specbench.engine.execution.rank_peers import Child
from specbench.engine.execution.rank_processes import RankFailure, RankProcesses
from specbench.engine.layers.parallel import PeerLost
from tests.engine.harness import engine_config


def run_out_of_memory(store: Store, name: str, config: EngineConfig) -> None:
    """Rank 2 loses rank 1 before that has said why."""
    store.set(f"{name}/up/{config.shard.rank}", "1")
    while not store.check([f"{name}/up/1", f"{name}/up/2"]):
        time.sleep(0.01)
    if config.shard.rank == 2:
        raise PeerLost("Connection closed by peer")
    time.sleep(2.0)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def hang(store: Store, name: str, config: EngineConfig) -> None:
    store.set(f"{name}/up/{config.shard.rank}", "1")
    time.sleep(1000)


def start(size: int, serve: Callable[[Store, str, EngineConfig], None], tmp_path: Path) -> tuple[RankProcesses, str]:
    processes = RankProcesses(size, None, 60.0, serve)
    return processes, processes.announce_engine(engine_config(tmp_path))


def check_nothing_is_left(processes: RankProcesses) -> None:
    children = [peer.process for peer in processes.peers if isinstance(peer, Child)]
    assert len(children) == processes.size - 1
    processes.close()
    assert not any(child.is_alive() for child in children)


def test_the_first_cause_is_told(tmp_path: Path) -> None:
    processes, name = start(3, run_out_of_memory, tmp_path)
    with pytest.raises(
        RankFailure, match=r"rank 1 \(process \d+\): OutOfMemoryError: CUDA out of memory\. Tried to allocate 20"
    ):
        processes.wait_until_loaded(name)
    check_nothing_is_left(processes)


def test_a_rank_that_hangs_is_ended(tmp_path: Path) -> None:
    processes, _ = start(2, hang, tmp_path)
    with pytest.raises(RankFailure, match=r"no answer within .* from rank 1"), processes.watching(allowed_s=0.5):
        while processes.failure is None:  # where the collective would be
            time.sleep(0.01)
    check_nothing_is_left(processes)
