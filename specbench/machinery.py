"""The parts of a run that import torch, as benchmark.py asks for them.

Belongs here: which engine there is and what replays its output. Does not belong here: anything of either.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from specbench.engine.config import EngineConfig
from specbench.generate import GenerateResult, Target
from specbench.records import OutputCheck


class EngineFactory(Protocol):
    """Loads the weights."""

    def __call__(
        self, config: EngineConfig, clock: Callable[[], float], on_progress: Callable[[str], None]
    ) -> Target: ...


@dataclass(frozen=True, slots=True)
class Machinery:
    """Made when it is needed."""

    start_engine: EngineFactory
    #: (engine, results, how many of them) -> their replay without speculation
    check_output: Callable[[Any, list[GenerateResult], int], OutputCheck]
    #: Ends what engines started beside this process.
    close: Callable[[], None] = lambda: None


def embedded_machinery() -> Machinery:
    """The embedded engine. Importing torch takes seconds, so it comes after everything that may be wrong."""
    from specbench.engine.engines import Engines

    engines = Engines()
    return Machinery(engines.start, engines.check_output, engines.close)


def follow_rank_0(start: str, num_ranks: int, timeout_s: float) -> None:
    """Where ranks were started together and this is not the first: do as rank 0 says until it ends, and end."""
    from specbench.engine.engines import follow

    follow(start, num_ranks, timeout_s)
