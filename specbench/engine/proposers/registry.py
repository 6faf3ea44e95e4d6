"""The table of proposers: one line each."""

from __future__ import annotations

from collections.abc import Callable

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.proposers.mtp_multi import MultiModuleMTP
from specbench.engine.proposers.proposer import Proposer

PROPOSERS: dict[str, Callable[[EngineConfig, Checkpoint], Proposer]] = {
    "mtp_multi": MultiModuleMTP,
}
