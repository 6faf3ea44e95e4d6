"""The processes of the ranks: started or found, watched, and ended however the run ends.

Belongs here: processes, the store between them, what follows when one fails. Does not belong here: one of them
(rank_peers.py), what a rank does (parallel_engine.py), collectives.

Rank 0 is the process of the run. The others are its children (spawn), or were started beside it (torchrun). A thread
looks after them: when one ends, gives no sign of life, or keeps rank 0 waiting too long in a step, it ends those that
it can, which breaks rank 0's collectives, and whoever waits gets a RankFailure that says which rank it was and why. A
child whose parent has gone ends too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING

import torch

from specbench.engine.config import EngineConfig
from specbench.engine.execution import rank_child
from specbench.engine.execution.rank_peers import (
    Child,
    LastWords,
    LaunchedPeer,
    Peer,
    SignsOfLife,
    Silence,
    error_text,
    leave_with_rank_0,
    leave_words,
    say_ended,
)
from specbench.engine.layers.parallel import PeerLost
from specbench.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import Store

#: How often the store is asked.
_POLL_S = 0.02
#: How often the other ranks are looked at.
_WATCH_S = 0.1
#: After the first sign of trouble, what others have to say is waited for this long.
_GRACE_S = 1.0
#: A rank that is told to end does so within this, or is killed.
_END_S = 5.0
#: A rank without a sign of life for timeout_s hangs, and for this long at least: an import can take as long.
_LEAST_SILENCE_S = 10.0
#: Until the first sign of life a rank that something else has started may take this long: it starts, and imports torch.
_LAUNCHED_FIRST_SIGN_S = 120.0
#: Weights are loaded within this.
START_TIMEOUT_S = 3600.0
_END = "end"
#: torchrun's variables.
_RANK, _WORLD_SIZE, _LOCAL_RANK, _MASTER_ADDR, _MASTER_PORT = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


class RankFailure(RuntimeError):
    """A rank died, or does not answer: the run cannot go on."""


@dataclass(frozen=True, slots=True)
class Launched:
    """This process's place among ranks that something else has started."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int

    @classmethod
    def find(cls, environment: Mapping[str, str] = os.environ) -> Launched | None:
        """From torchrun's variables; None where this process was started alone."""
        if _number(environment, _WORLD_SIZE, "1") <= 1:
            return None
        for name in (_RANK, _MASTER_ADDR, _MASTER_PORT):
            if name not in environment:
                raise UserError(f"{_WORLD_SIZE} is set and {name} is not: start ranks with torchrun, or set both")
        rank = _number(environment, _RANK)
        return cls(
            rank,
            _number(environment, _WORLD_SIZE),
            _number(environment, _LOCAL_RANK, str(rank)),
            environment[_MASTER_ADDR],
            _number(environment, _MASTER_PORT),
        )


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name, default)
    if not text.isdecimal():
        raise UserError(f"{name}: must be a whole number, not {text!r}; torchrun sets it")
    return int(text)


def find_launched(start: str, size: int) -> Launched | None:
    """Ranks that are there already. UserError where they do not fit the configuration."""
    launched = None if start == "spawn" else Launched.find()
    if launched is None and start == "torchrun":
        raise UserError(f"parallel.start: torchrun starts {size} processes, and this one was started alone; say spawn")
    if launched is not None and launched.size != size:
        raise UserError(
            f"parallel.tensor_parallel_size: {size}, and {launched.size} ranks were started; make them equal"
        )
    return launched


def rank_device(device: str, rank: int, ranks_per_gpu: int = 1) -> str:
    """The device of a rank of this machine: GPUs in a row from the configured one."""
    name, _, first = device.partition(":")
    return device if name == "cpu" else f"{name}:{int(first or 0) + rank // ranks_per_gpu}"


#: (store, engine's name, its config): runs an engine's steps until it is closed.
ServeEngine = Callable[["Store", str, EngineConfig], None]


class RankProcesses:
    """The ranks beside this process, rank 0, for any number of engines. `close` ends them."""

    def __init__(self, size: int, launched: Launched | None, timeout_s: float, serve: ServeEngine) -> None:
        """timeout_s: a step that takes longer has failed."""
        self.size = size
        self.local_rank = 0 if launched is None else launched.local_rank
        self.timeout_s = timeout_s
        self.failure: str | None = None
        self._on_failure: list[Callable[[], None]] = []
        self._num_engines = 0
        self._allowed_s = timeout_s
        self._deadline_s: float | None = None
        self._is_ending = threading.Event()
        self._has_failed = threading.Event()
        self.peers: Sequence[Peer] = ()
        self._signs: SignsOfLife | None = None
        #: What SIGTERM did before; None where it still does.
        self._before: Callable[[int, FrameType | None], object] | int | None = None
        self._words: dict[Peer, LastWords] = {}
        first_sign_s = 0.0
        if launched is None:
            self.store = self._start(serve)
        else:
            self.store = join_launched(launched)
            first_sign_s = _LAUNCHED_FIRST_SIGN_S
            self.peers = [LaunchedPeer(rank, self.store) for rank in range(1, size)]
            self._signs = SignsOfLife(self.store, 0)
            if threading.current_thread() is threading.main_thread():
                self._before = signal.signal(signal.SIGTERM, self._on_terminate)
        self._silence = Silence({peer.rank: peer.num_beats for peer in self.peers}, first_sign_s)
        self._watcher = threading.Thread(target=self._watch, name="rank watcher", daemon=True)
        self._watcher.start()

    def _start(self, serve: ServeEngine) -> Store:
        from specbench.engine.execution.rank_groups import open_store

        store, port = open_store()
        context = multiprocessing.get_context("spawn")
        # Ctrl-C reaches every process of the terminal. Rank 0 ends the others; they inherit that they ignore it.
        is_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main_thread else None
        children = []
        try:
            for rank in range(1, self.size):
                receiving, sending = context.Pipe(duplex=False)
                beats = context.RawValue("Q", 0)
                child = context.Process(
                    target=rank_child.begin,
                    args=(pickle.dumps(partial(_serve_as_child, rank, self.size, port, serve)), sending, beats),
                    daemon=True,
                    name=f"specbench rank {rank}",
                )
                child.start()
                sending.close()
                children.append(Child(rank, child, receiving, beats))
        finally:
            self.peers = children
            if before is not None:
                signal.signal(signal.SIGINT, before)
        return store

    # ---- Engines

    def announce_engine(self, config: EngineConfig) -> str:
        """Have every rank begin to load an engine with this configuration; returns the engine's name."""
        name = f"engine{self._num_engines}"
        self._num_engines += 1
        self.store.set(name, pickle.dumps(config).hex())
        self._wait_for([f"{name}/up/{rank}" for rank in range(1, self.size)])
        return name

    def wait_until_loaded(self, name: str) -> None:
        self._wait_for([f"{name}/loaded/{rank}" for rank in range(1, self.size)])

    def wait_until_closed(self, name: str) -> None:
        self._wait_for([f"{name}/closed/{rank}" for rank in range(1, self.size)])

    def call_on_failure(self, call: Callable[[], None]) -> None:
        """From the watcher's thread."""
        self._on_failure.append(call)

    def forget(self, call: Callable[[], None]) -> None:
        """What is closed is not told of failures."""
        self._on_failure.remove(call)

    def _wait_for(self, keys: list[str]) -> None:
        end_s = time.monotonic() + START_TIMEOUT_S
        while not self.store.check(keys):
            self._raise_failure()
            if time.monotonic() > end_s:
                self._fail(f"ranks are not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)

    # ---- Failure

    @contextmanager
    def watching(self, allowed_s: float | None = None) -> Iterator[None]:
        """Around what needs all ranks: it ends within `allowed_s` (timeout_s where None), or in a RankFailure."""
        self._raise_failure()
        self._allowed_s = allowed_s or self.timeout_s
        self._deadline_s = time.monotonic() + self._allowed_s
        try:
            yield
        except Exception as error:
            self._deadline_s = None
            # What is wrong here may be what is wrong there: the watcher finds out.
            self._has_failed.wait(2 * _END_S if isinstance(error, PeerLost) else 0.0)
            if self.failure is not None:
                raise RankFailure(self.failure) from error
            if isinstance(error, PeerLost):
                raise RankFailure(f"another rank has gone, or does not answer ({error})") from error
            if isinstance(error, MemoryError | torch.OutOfMemoryError):
                raise RankFailure(f"rank 0: {error_text(error)}") from error
            raise
        finally:
            self._deadline_s = None
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            raise RankFailure(self.failure)

    def _watch(self) -> None:
        while not self._is_ending.wait(_WATCH_S):
            try:
                failure = self._look()
            except Exception as error:  # the store has gone, and with it whoever served it
                failure = f"ranks cannot be reached any more ({error_text(error)})"
            if failure is not None:
                if not self._is_ending.is_set():
                    self._fail(failure)
                return

    def _look(self) -> str | None:
        """What has gone wrong, if anything has."""
        if any(peer.has_ended() for peer in self.peers):
            return self._first_cause()
        self._silence.look()
        limit_s = _silence_limit_s(self.timeout_s)
        if silent := self._silence.silent(limit_s):
            lasted_s = self._silence.limit_s(silent[0], limit_s)
            since = "parallel.timeout_s" if lasted_s == limit_s else "since it was started"
            return f"{self._names(silent)} hangs: no sign of life for {lasted_s:g} s ({since})"
        deadline_s = self._deadline_s
        if deadline_s is None or time.monotonic() <= deadline_s:
            return None
        silent = self._silence.silent()
        hint = f" (no sign of life: {self._names(silent)})" if silent else ""
        return (
            f"no answer within {self._allowed_s:g} s from {self._names(range(1, self.size))}{hint}: a rank hangs, or a "
            f"step takes longer than parallel.timeout_s={self.timeout_s:g}"
        )

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(self.peers[rank - 1].name for rank in ranks)

    def _first_cause(self) -> str:
        """Of what ranks leave behind: an error that is not about another rank, or else a death. Where one has only
        lost another, that one has its say first."""
        start_s = time.monotonic()
        while True:
            deaths: list[str] = []
            for peer in self.peers:
                if not peer.has_ended():
                    continue
                if peer not in self._words:
                    self._words[peer] = peer.last_words()
                if self._words[peer].text is None:
                    deaths.append(f"{peer.name} {peer.death()}")
            errors = {peer: words for peer, words in self._words.items() if words.text is not None}
            first = [f"{peer.name}: {words.text}" for peer, words in errors.items() if not words.is_echo]
            waited_s = time.monotonic() - start_s
            if ((first or deaths) and waited_s > _GRACE_S) or waited_s > _END_S:
                echoes = [f"{peer.name}: {words.text}" for peer, words in errors.items()]
                return next(iter([*first, *deaths, *echoes]))
            time.sleep(_WATCH_S)

    def _fail(self, failure: str) -> None:
        self.failure = failure
        for peer in self.peers:
            peer.kill()
        # Whoever waits for that lets go of what the calls may have to wait for.
        self._has_failed.set()
        for call in self._on_failure:
            with contextlib.suppress(Exception):
                call()

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        """torchrun ends all ranks when one has gone: which one it was is said. Where none has, it does what it did
        before."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._has_failed.wait(3 * _GRACE_S)
        self._raise_failure()
        if callable(self._before):
            self._before(number, frame)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # ---- The end

    def close(self) -> None:
        """End the ranks: those that do not go by themselves are killed. Nothing is left of them when this returns."""
        self._is_ending.set()
        if self._signs is not None and threading.current_thread() is threading.main_thread():
            # torchrun, which sees that one has been killed, need not end a run that is done, or on its way out.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._watcher.join(_END_S)
        if self.failure is None:
            with contextlib.suppress(Exception):
                self.store.set(f"engine{self._num_engines}", _END)
        end_s = time.monotonic() + _END_S
        for peer in self.peers:
            peer.end(end_s)
        self.peers = ()
        if self._signs is not None:
            self._signs.stop()
        del self.store, self._silence  # with the store goes the port


def join_launched(launched: Launched) -> Store:
    """The store of ranks that were started together: torchrun serves one itself, else rank 0 does."""
    from torch.distributed import PrefixStore, TCPStore

    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = launched.rank == 0 and not is_served
    store = TCPStore(launched.host, launched.port, is_master=is_master, wait_for_workers=False)
    # A run that torchrun starts again must not read what the last one left.
    return PrefixStore(f"specbench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def serve_engines(
    store: Store, rank: int, local_rank: int, serve: ServeEngine, on_error: Callable[[BaseException], None]
) -> None:
    """A rank's life: each engine that rank 0 announces runs in a thread of its own, until there are no more."""
    for number in range(sys.maxsize):
        name = f"engine{number}"
        # A wait of the store's own would keep every other thread from it.
        while not store.check([name]):
            time.sleep(_POLL_S)
        announced = store.get(name)
        if announced == _END.encode():
            break
        config: EngineConfig = pickle.loads(bytes.fromhex(announced.decode()))
        own_shard = replace(config.shard, rank=rank)
        own = replace(config, shard=own_shard, device=rank_device(config.device, local_rank, config.ranks_per_gpu))
        threading.Thread(target=_reporting, args=(on_error, serve, store, name, own), daemon=True).start()


def _reporting(on_error: Callable[[BaseException], None], serve: ServeEngine, *arguments: object) -> None:
    try:
        serve(*arguments)  # type: ignore[arg-type]
    except BaseException as error:
        on_error(error)


def _silence_limit_s(timeout_s: float) -> float:
    return max(timeout_s, _LEAST_SILENCE_S)


def follow_launched(launched: Launched, timeout_s: float, serve: ServeEngine) -> None:
    """What a process that was started beside rank 0 does: run what that says until it has ended, and end."""
    # Ctrl-C reaches every process of the terminal. Rank 0 ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    has_ended = threading.Event()
    store = join_launched(launched)

    def on_terminate(number: int, frame: FrameType | None) -> None:
        # Which torchrun does to all ranks when one has gone: not the first cause then.
        leave_words(store, launched.rank, "ended by SIGTERM", is_echo=True)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, on_terminate)

    def say_and_die(error: BaseException) -> None:
        if has_ended.is_set():  # rank 0 has gone, as it should
            return
        text = error_text(error)
        leave_words(store, launched.rank, text, is_echo=isinstance(error, PeerLost))
        print(f"specbench: rank {launched.rank}: {text}", file=sys.stderr, flush=True)
        os._exit(1)

    try:
        SignsOfLife(store, launched.rank)
        leave_with_rank_0(store, _silence_limit_s(timeout_s), say_and_die)
        serve_engines(store, launched.rank, launched.local_rank, serve, say_and_die)
    except BaseException as error:
        say_and_die(error)
    has_ended.set()
    say_ended(store, launched.rank)
    os._exit(0)  # threads still wait for what rank 0 might say


def _serve_as_child(rank: int, size: int, port: int, serve: ServeEngine, sending: Connection) -> None:
    """What a child does once torch is there."""

    def say_and_die(error: BaseException) -> None:
        with contextlib.suppress(OSError):
            sending.send((isinstance(error, PeerLost), error_text(error)))
        os._exit(1)

    try:
        from specbench.engine.execution.rank_groups import LOOPBACK, join_store

        torch.set_num_threads(max(1, torch.get_num_threads() // size))
        serve_engines(join_store(LOOPBACK, port), rank, rank, serve, say_and_die)
    except BaseException as error:
        say_and_die(error)
    os._exit(0)  # libraries' threads may still wait for other ranks
