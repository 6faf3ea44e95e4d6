"""The other ranks as rank 0 sees them, and what a rank lets be known of itself: signs of life, last words, its process.

Belongs here: one other rank: is it there, what did it say, how is it ended. Does not belong here: what follows from
that (rank_processes.py), collectives.

A rank says once a second that it lives, a child of rank 0 from its first moment on, any other through the store: one
that is stopped, or whose machine hangs, is noticed in any phase of a run, in a collective or not.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from ctypes import c_uint64
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from specbench.engine.execution.rank_child import BEAT_S
from specbench.engine.layers.parallel import PeerLost

if TYPE_CHECKING:
    from torch.distributed import Store

#: Silence that says something where a rank is late anyway.
_NOTABLE_SILENCE_S = 3.0


@dataclass(frozen=True, slots=True)
class LastWords:
    """What a rank said before it ended; no text where it could not."""

    text: str | None
    #: Whether it is about another rank.
    is_echo: bool


class Peer(Protocol):
    """One other rank."""

    rank: int

    @property
    def name(self) -> str:
        """Its number and its process."""
        ...

    def num_beats(self) -> int:
        """Signs of life so far."""
        ...

    def has_ended(self) -> bool: ...

    def last_words(self) -> LastWords: ...

    def death(self) -> str:
        """What is known of the end of one without words."""
        ...

    def end(self, end_s: float) -> None:
        """Wait until then for it to go by itself, and kill it."""
        ...

    def kill(self) -> None: ...


class Child:
    """A rank that rank 0 has started."""

    def __init__(self, rank: int, process: SpawnProcess, connection: Connection, beats: c_uint64) -> None:
        """beats: the child counts it up."""
        self.rank = rank
        self.process = process
        self._connection = connection
        self._beats = beats

    @property
    def name(self) -> str:
        return f"rank {self.rank} (process {self.process.pid})"

    def num_beats(self) -> int:
        return self._beats.value

    def has_ended(self) -> bool:
        return self.process.exitcode is not None

    def last_words(self) -> LastWords:
        try:
            if self._connection.poll():
                is_echo, text = self._connection.recv()
                return LastWords(text, is_echo)
        except (EOFError, OSError):
            pass
        return LastWords(None, is_echo=False)

    def death(self) -> str:
        exit_code = self.process.exitcode
        assert exit_code is not None
        if exit_code >= 0:
            return f"ended with exit code {exit_code}"
        name = signal.Signals(-exit_code).name
        return f"was ended by {name}{_WANT_OF_MEMORY if name == 'SIGKILL' else ''}"

    def end(self, end_s: float) -> None:
        self.process.join(max(0.0, end_s - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._connection.close()

    def kill(self) -> None:
        self.process.kill()


_WANT_OF_MEMORY = ": killed from outside, or by the system for want of memory"
_ENDED, _WORDS, _PROCESS, _BEAT = "ended", "words", "process", "beat"


class LaunchedPeer:
    """A rank that something else has started. On another machine it is known by what it says alone."""

    def __init__(self, rank: int, store: Store) -> None:
        self.rank = rank
        self._store = store
        #: None until it has said so, and on another machine.
        self._pid: int | None = None

    @property
    def name(self) -> str:
        self._find_process()
        return f"rank {self.rank}" + ("" if self._pid is None else f" (process {self._pid})")

    def num_beats(self) -> int:
        return _beats_in(self._store, self.rank)

    def has_ended(self) -> bool:
        if self._store.check([_key(_WORDS, self.rank)]):
            return True
        self._find_process()
        return self._pid is not None and not _is_running(self._pid)

    def last_words(self) -> LastWords:
        key = _key(_WORDS, self.rank)
        if not self._store.check([key]):
            return LastWords(None, is_echo=False)
        kind, _, text = self._store.get(key).decode().partition(" ")
        return LastWords(text, kind == _ECHO)

    def death(self) -> str:
        return f"has gone{_WANT_OF_MEMORY}"

    def end(self, end_s: float) -> None:
        key = _key(_ENDED, self.rank)
        with contextlib.suppress(Exception):  # the store may be gone
            while time.monotonic() < end_s and not self._store.check([key]) and not self.has_ended():
                time.sleep(0.02)
        # What has heard that it should end, and does not, is stopped or hangs.
        while time.monotonic() < end_s and self._pid is not None and _is_running(self._pid):
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        if self._pid is not None and _is_running(self._pid):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)

    def _find_process(self) -> None:
        key = _key(_PROCESS, self.rank)
        if self._pid is None and self._store.check([key]):
            host, _, pid = self._store.get(key).decode().rpartition(" ")
            if host == socket.gethostname():
                self._pid = int(pid)


_ECHO, _CAUSE = "echo", "cause"


class SignsOfLife:
    """Says which process this rank is, and from now on that it lives."""

    def __init__(self, store: Store, rank: int) -> None:
        store.set(_key(_PROCESS, rank), f"{socket.gethostname()} {os.getpid()}")
        store.add(_key(_BEAT, rank), 1)
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, args=(store, rank), name="signs of life", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The store is let go of."""
        self._has_ended.set()
        self._thread.join()

    def _beat(self, store: Store, rank: int) -> None:
        with contextlib.suppress(Exception):  # with rank 0 the store goes
            while not self._has_ended.wait(BEAT_S):
                store.add(_key(_BEAT, rank), 1)


def leave_words(store: Store, rank: int, text: str, *, is_echo: bool) -> None:
    """Last words of a rank that rank 0 has not started."""
    with contextlib.suppress(Exception):
        store.set(_key(_WORDS, rank), f"{_ECHO if is_echo else _CAUSE} {text}")


def say_ended(store: Store, rank: int) -> None:
    """That a rank which rank 0 has not started has heard that there is no more to do."""
    with contextlib.suppress(Exception):
        store.set(_key(_ENDED, rank), "1")


class Silence:
    """How long each of some ranks has given no sign of life."""

    def __init__(self, counts: Mapping[int, Callable[[], int]], first_sign_s: float) -> None:
        """counts: rank -> its signs so far. first_sign_s: how long the first one may take, if longer than others."""
        self._counts = counts
        self._first_sign_s = first_sign_s
        now_s = time.monotonic()
        #: rank -> its last count, and when that was new
        self._seen = dict.fromkeys(counts, (0, now_s))
        self._asked_s = now_s

    def look(self) -> None:
        """Ask for the counts, once a beat at most."""
        now_s = time.monotonic()
        if now_s - self._asked_s < BEAT_S:
            return
        if now_s - self._asked_s > 2 * BEAT_S:  # this process itself has been stopped
            self._seen = {rank: (count, now_s) for rank, (count, _) in self._seen.items()}
        self._asked_s = now_s
        for rank, (count, _) in self._seen.items():
            current = self._counts[rank]()
            if current != count:
                self._seen[rank] = (current, now_s)

    def silent(self, for_s: float = _NOTABLE_SILENCE_S) -> list[int]:
        """Ranks that have been silent for longer."""
        now_s = time.monotonic()
        return [rank for rank, (_, since_s) in self._seen.items() if now_s - since_s > self.limit_s(rank, for_s)]

    def limit_s(self, rank: int, for_s: float) -> float:
        """The limit of this rank: a longer one before its first sign."""
        count, _ = self._seen[rank]
        return for_s if count else max(for_s, self._first_sign_s)


def leave_with_rank_0(store: Store, limit_s: float, leave: Callable[[BaseException], None]) -> None:
    """Once that has given a first sign of life, which may take it as long as reading data and checkpoint does: call
    `leave` when it is silent for longer than the limit."""

    def watch() -> None:
        with contextlib.suppress(Exception):  # the store goes with rank 0, or with whoever started all
            silence = Silence({0: partial(_beats_in, store, 0)}, math.inf)
            while not silence.silent(limit_s):
                time.sleep(BEAT_S)
                silence.look()
            leave(PeerLost(f"rank 0 hangs: no sign of life for {limit_s:g} s (parallel.timeout_s)"))

    threading.Thread(target=watch, name="rank 0's signs of life", daemon=True).start()


def error_text(error: BaseException) -> str:
    """One line, and where it was."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _beats_in(store: Store, rank: int) -> int:
    key = _key(_BEAT, rank)
    return int(store.get(key)) if store.check([key]) else 0


def _key(what: str, rank: int) -> str:
    return f"{what}/{rank}"


def _is_running(pid: int) -> bool:
    """Whether a process of this machine is there, and no zombie."""
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():
        try:
            return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
