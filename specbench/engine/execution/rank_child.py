"""How the process of a rank begins that rank 0 has started: it says that it lives before it imports torch.

Belongs here: what a child does until the rest of the program is there. Does not belong here: what it does then
(rank_processes.py). Imports nothing of ours, and nothing that takes time.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from ctypes import c_uint64
from multiprocessing.connection import Connection

BEAT_S = 1.0
#: Linux: signal that a process gets when its parent dies.
_PR_SET_PDEATHSIG = 1


def begin(work: bytes, sending: Connection, beats: c_uint64) -> None:
    """Do what rank 0 has started this process for.

    work: a pickled function of `sending`; what it needs is imported when it is read. beats: counted up once a second,
    for rank 0 to see.
    """
    _die_with_parent()
    threading.Thread(target=_beat, args=(beats,), name="signs of life", daemon=True).start()
    try:
        pickle.loads(work)(sending)
    except BaseException as error:  # of an import: what comes later is said there
        with contextlib.suppress(OSError):
            sending.send((False, f"{type(error).__name__}: {error}"))
        os._exit(1)


def _beat(beats: c_uint64) -> None:
    while True:
        beats.value += 1
        time.sleep(BEAT_S)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait_for_end() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_end, name="parent watcher", daemon=True).start()
