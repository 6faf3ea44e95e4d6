"""Starts embedded engines, on one rank or on several, and ends what it started.

Belongs here: which kind of engine a configuration asks for, the ranks' lifetime. Does not belong here: anything of
either kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakSet

import torch

from specbench.engine.config import EngineConfig
from specbench.engine.execution.engine_memory import plan_engine_memory
from specbench.engine.execution.rank_processes import RankProcesses, find_launched, follow_launched
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.parallel_engine import ParallelEngine, serve_engine
from specbench.engine.replay import check_output
from specbench.generate import GenerateResult
from specbench.records import OutputCheck


class Engines:
    """The engines of one run. Those on several ranks share the ranks' processes."""

    def __init__(self) -> None:
        self._processes: RankProcesses | None = None
        #: Those that somebody holds.
        self._parallel: WeakSet[ParallelEngine] = WeakSet()

    def start(self, config: EngineConfig, clock: Callable[[], float], on_progress: Callable[[str], None]) -> LLMEngine:
        """Load the weights. Raises RankFailure when a rank does not get ready."""
        if config.shard.size == 1:
            return LLMEngine(config, clock, on_progress)
        plan_engine_memory(config)  # what cannot be split or does not fit is refused before anything starts
        engine = ParallelEngine(config, self.start_ranks(config), clock, on_progress)
        self._parallel.add(engine)
        return engine

    def start_ranks(self, config: EngineConfig) -> RankProcesses:
        """The ranks' processes, which begin to import what they need where they are not there yet."""
        if self._processes is None:
            launched = find_launched(config.rank_start, config.shard.size)
            self._processes = RankProcesses(config.shard.size, launched, config.rank_timeout_s, serve_engine)
            if config.device == "cpu" and launched is None:  # ranks share its cores
                torch.set_num_threads(max(1, torch.get_num_threads() // config.shard.size))
        assert self._processes.size == config.shard.size, "the engines of a run have one layout"
        return self._processes

    def check_output(self, engine: LLMEngine, results: Sequence[GenerateResult], limit: int) -> OutputCheck:
        """replay.check_output, on all ranks of the engine."""
        if isinstance(engine, ParallelEngine):
            return engine.check_output(results, limit)
        return check_output(engine, results, limit)

    def close(self) -> None:
        """Close engines on several ranks, and end the ranks' processes."""
        try:
            for engine in list(self._parallel):
                engine.close()
        finally:
            if self._processes is not None:
                self._processes.close()


def follow(start: str, size: int, timeout_s: float) -> None:
    """Where this process is one of several that were started together, and not the first: run what rank 0 says until
    that has ended, and end. Returns at once where it is not."""
    launched = find_launched(start, size)
    if launched is not None and launched.rank > 0:
        follow_launched(launched, timeout_s, serve_engine)
