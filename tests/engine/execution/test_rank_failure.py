"""What is said of ranks that fail, and that none is left. The ranks here do nothing but fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.distributed import Store

from specbench.engine.config import EngineConfig
from specbench.engine.execution import rank_processes
from specbench.engine.execution.rank_peers import Child, LaunchedPeer, SignsOfLife, Silence, leave_words
from specbench.engine.execution.rank_processes import Launched, RankFailure, RankProcesses, follow_launched
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


def stop_at_once(store: Store, name: str, config: EngineConfig) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_while_loading(store: Store, name: str, config: EngineConfig) -> None:
    store.set(f"{name}/up/{config.shard.rank}", "1")
    os.kill(os.getpid(), signal.SIGSTOP)


def start(
    size: int, serve: Callable[[Store, str, EngineConfig], None], tmp_path: Path, timeout_s: float = 60.0
) -> tuple[RankProcesses, str]:
    processes = RankProcesses(size, None, timeout_s, serve)
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


def test_a_rank_that_stops_before_it_is_up_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but a sign of life is waited for."""
    monkeypatch.setattr(rank_processes, "_LEAST_SILENCE_S", 2.0)
    processes = RankProcesses(2, None, 2.0, stop_at_once)
    with pytest.raises(RankFailure, match=r"rank 1 \(process \d+\) hangs: no sign of life for 2 s"):
        processes.announce_engine(engine_config(tmp_path))
    check_nothing_is_left(processes)


def test_a_rank_that_stops_before_it_has_torch_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_LEAST_SILENCE_S", 2.0)
    processes = RankProcesses(2, None, 2.0, hang)
    child = processes.peers[0]
    assert isinstance(child, Child) and child.process.pid is not None
    while not child.num_beats():
        time.sleep(0.001)
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(RankFailure, match=r"rank 1 \(process \d+\) hangs: no sign of life for 2 s"):
        processes.announce_engine(engine_config(tmp_path))
    check_nothing_is_left(processes)


def test_a_first_sign_of_life_may_take_longer_and_the_figure_is_its_own() -> None:
    silence = Silence({1: lambda: 0, 2: lambda: 0}, first_sign_s=0.2)
    assert silence.limit_s(1, 0.1) == 0.2 and not silence.silent(0.1)
    time.sleep(0.3)
    assert silence.silent(0.1) == [1, 2] and silence.silent(0.5) == []


def test_a_rank_that_stops_while_it_loads_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_LEAST_SILENCE_S", 2.0)
    processes, name = start(2, stop_while_loading, tmp_path, timeout_s=2.0)
    with pytest.raises(RankFailure, match=r"rank 1 \(process \d+\) hangs: no sign of life for 2 s"):
        processes.wait_until_loaded(name)
    check_nothing_is_left(processes)


def test_rank_0_that_runs_out_of_memory_is_named(tmp_path: Path) -> None:
    processes, _ = start(2, hang, tmp_path)
    with pytest.raises(RankFailure, match="rank 0: OutOfMemoryError: CUDA out of memory"), processes.watching():
        raise torch.OutOfMemoryError("CUDA out of memory")
    check_nothing_is_left(processes)


def test_words_of_a_rank_that_was_launched() -> None:
    """Over the store: which process it is, and what it has said."""
    store = torch.distributed.HashStore()
    peer = LaunchedPeer(3, store)
    assert peer.name == "rank 3" and not peer.has_ended()
    signs = SignsOfLife(store, 3)
    assert peer.name == f"rank 3 (process {os.getpid()})" and not peer.has_ended()
    leave_words(store, 3, "OutOfMemoryError: 20 GiB", is_echo=False)
    assert peer.has_ended()
    assert peer.last_words().text == "OutOfMemoryError: 20 GiB" and not peer.last_words().is_echo
    signs.stop()


# ---- Ranks that something else has started


def out_of_memory_at_once(store: Store, name: str, config: EngineConfig) -> None:
    store.set(f"{name}/up/{config.shard.rank}", "1")
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@contextmanager
def launched_beside(serve: Callable[[Store, str, EngineConfig], None]) -> Iterator[tuple[RankProcesses, int]]:
    """Rank 0 here, and the process of rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = signal.getsignal(signal.SIGTERM)
    arguments = (Launched(1, 2, 1, "127.0.0.1", port), 2.0, serve)
    process = multiprocessing.get_context("spawn").Process(target=follow_launched, args=arguments, daemon=True)
    process.start()
    try:
        processes = RankProcesses(2, Launched(0, 2, 0, "127.0.0.1", port), 2.0, serve)
        assert process.pid is not None
        yield processes, process.pid
        processes.close()
        process.join(10.0)
        assert not process.is_alive()
    finally:
        process.kill()
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (out_of_memory_at_once, "OutOfMemoryError: CUDA out of memory. Tried to allocate 20"),
        (stop_while_loading, "hangs: no sign of life for 2 s"),
    ],
)
def test_a_launched_rank_that_fails_is_named_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Callable[[Store, str, EngineConfig], None], reason: str
) -> None:
    monkeypatch.setattr(rank_processes, "_LEAST_SILENCE_S", 2.0)
    with launched_beside(serve) as (processes, pid):
        name = processes.announce_engine(engine_config(tmp_path))
        with pytest.raises(RankFailure) as failure:
            processes.wait_until_loaded(name)
        assert f"rank 1 (process {pid})" in str(failure.value) and reason in str(failure.value)


def test_sigterm_does_what_it_did_before_where_no_rank_has_gone(tmp_path: Path) -> None:
    def terminate(number: int, frame: FrameType | None) -> None:
        raise InterruptedError

    signal.signal(signal.SIGTERM, terminate)
    with launched_beside(hang) as (processes, _):
        name = processes.announce_engine(engine_config(tmp_path))
        with pytest.raises(InterruptedError):
            os.kill(os.getpid(), signal.SIGTERM)
            processes.wait_until_loaded(name)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_sigterm_of_a_launcher_names_the_rank_that_has_gone(tmp_path: Path) -> None:
    """torchrun ends all ranks when one has gone, within a moment."""
    with launched_beside(hang) as (processes, pid):
        name = processes.announce_engine(engine_config(tmp_path))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailure, match=rf"rank 1 \(process {pid}\) has gone: killed from outside"):
            os.kill(os.getpid(), signal.SIGTERM)
            processes.wait_until_loaded(name)
