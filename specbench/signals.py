"""Signals that end a run early: as exceptions, so that what ends it is written down; and none while that is done.

Belongs here: SIGTERM and Ctrl-C of the run's own process. Does not belong here: what ranks do about them
(engine/execution/rank_processes.py). Python handles signals in the main thread alone: elsewhere nothing is changed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATED_EXIT_CODE = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM: a scheduler's time is up, or somebody ends the run."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises Terminated, unless a part of the run takes it over."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def ignore_signals() -> None:
    """Until `terminable` ends: the ending itself is not ended."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise Terminated
