"""The embedded engine on several ranks: rank 0 schedules and answers, the others run the same steps on their shares.

Belongs here: rank 0's engine, and what another rank does with what it is told. Does not belong here: processes
(execution/rank_processes.py), groups and messages (execution/), what is split (models/).

Every rank builds the whole engine and uses its model, caches and request rows; scheduler and tokenizer work on rank 0
alone. Tokens and accepted counts are never sent: each rank computes them from the same reductions and the same keys.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch.distributed import Store

from specbench.engine.config import EngineConfig
from specbench.engine.execution.peer_memory import RowKind
from specbench.engine.execution.rank_groups import LOOPBACK, RankGroups, join_groups
from specbench.engine.execution.rank_processes import (
    START_TIMEOUT_S,
    RankFailure,
    RankProcesses,
    find_launched,
    rank_device,
)
from specbench.engine.execution.step_message import CLOSE, REPLAY, STEP, StepMessage
from specbench.engine.execution.step_results import PendingStep
from specbench.engine.llm_engine import DTYPES, LLMEngine
from specbench.engine.models.registry import load_model_config, open_checkpoint
from specbench.engine.replay import check_output
from specbench.engine.scheduling.step import SchedulerOutput
from specbench.errors import UserError
from specbench.generate import GenerateResult
from specbench.records import EngineStep, OutputCheck

#: A replay runs at this many tokens a second at least.
_SLOWEST_REPLAY = 1.0
#: Ranks have closed an engine within this, or are ended.
_CLOSE_S = 10.0


class ParallelEngine(LLMEngine):
    """Rank 0's engine."""

    def __init__(
        self,
        config: EngineConfig,
        processes: RankProcesses,
        clock: Callable[[], float],
        on_progress: Callable[[str], None],
    ) -> None:
        """`config` is rank 0's. Raises RankFailure when a rank does not get ready."""
        on_progress(f"starting {config.shard.size} ranks")
        own = replace(config, device=rank_device(config.device, processes.local_rank, config.ranks_per_gpu))
        self._processes = processes
        self._name = name = processes.announce_engine(config)
        with processes.watching():
            self._groups = _join(processes.store, name, own)
        on_progress(self._groups.sums_text)
        processes.call_on_failure(self._groups.abort)
        # Loading has collectives where graphs are recorded, and no bound but the start's.
        with processes.watching(allowed_s=START_TIMEOUT_S):
            super().__init__(own, clock, on_progress, self._groups.parallel)
        processes.wait_until_loaded(name)
        self._message = StepMessage(config.max_num_seqs)
        self._is_broken_off = self._is_closed = False

    def step(self) -> tuple[list[GenerateResult], EngineStep | None]:
        with self._together():
            return super().step()

    def _execute(self, output: SchedulerOutput) -> PendingStep:
        self._groups.control.send(self._message, self._message.pack(output))
        return super()._execute(output)

    def check_output(self, results: Sequence[GenerateResult], limit: int) -> OutputCheck:
        """replay.check_output, on every rank."""
        chosen = list(results)
        allowed_s = self._processes.timeout_s + sum(len(each.output_token_ids) for each in chosen) / _SLOWEST_REPLAY
        with self._together(allowed_s):
            self._groups.control.send(self._message, self._message.pack_command(REPLAY, (chosen, limit)))
            return check_output(self, chosen, limit)

    @contextmanager
    def _together(self, allowed_s: float | None = None) -> Iterator[None]:
        """Around what all ranks do. Broken off, the others may wait in its middle for what never comes."""
        self._is_broken_off = True
        with self._processes.watching(allowed_s):
            yield
        self._is_broken_off = False

    def close(self) -> None:
        """Every rank lets go of its share and of its groups; nothing runs on them afterwards. Once is enough."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if not self._is_broken_off:
                self._close_others()
        finally:
            self._processes.forget(self._groups.abort)
            _let_go(self, self._groups)

    def _close_others(self) -> None:
        with suppress(RankFailure), self._processes.watching(_CLOSE_S):
            _synchronize(self)  # while all are there
            self._groups.control.send(self._message, self._message.pack_command(CLOSE))
            self._processes.wait_until_closed(self._name)


def _synchronize(engine: LLMEngine) -> None:
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize(engine.model.device)


def _let_go(engine: LLMEngine, groups: RankGroups) -> None:
    """In this order: NCCL lets no group go before the graphs that have recorded its collectives, and whoever drops one
    waits for that, a process that ends included."""
    engine.runner.release_graphs()
    groups.abort()


def _join(store: Store, name: str, config: EngineConfig) -> RankGroups:
    launched = find_launched(config.rank_start, config.shard.size)
    host = LOOPBACK if launched is None or launched.host in ("localhost", LOOPBACK) else None
    device = torch.device(config.device)
    kind = None
    if device.type == "cuda" and config.rank_all_reduce != "nccl":
        checkpoint = open_checkpoint(config.checkpoint, config.load, config.quantised_weights)
        kind = RowKind(load_model_config(checkpoint).hidden_size, DTYPES[config.dtype])
    groups = join_groups(store, name, config.shard, device, host, config.rank_timeout_s, kind, config.ranks_per_gpu)
    if config.rank_all_reduce == "one_shot" and isinstance(groups.peer_memory, str):
        raise UserError(f"parallel.all_reduce: one_shot cannot be had ({groups.peer_memory}); say auto or nccl")
    return groups


def serve_engine(store: Store, name: str, config: EngineConfig) -> None:
    """What a rank other than 0 does with an engine: load it, and run what it is told."""
    rank = config.shard.rank
    device = torch.device(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store.set(f"{name}/up/{rank}", "1")
    groups = _join(store, name, config)
    engine = LLMEngine(config, parallel=groups.parallel)
    store.set(f"{name}/loaded/{rank}", "1")
    message = StepMessage(config.max_num_seqs)
    outstanding: deque[PendingStep] = deque()
    while True:
        following = groups.control.receive(message)
        if message.command == STEP:
            outstanding.append(engine.runner.execute(message.unpack(following)))
            if len(outstanding) > config.pipeline_depth:
                outstanding.popleft().wait()
        elif message.command == REPLAY:
            check_output(engine, *message.unpack_content(following))
        else:
            _synchronize(engine)
            _let_go(engine, groups)
            store.set(f"{name}/closed/{rank}", "1")
            return
