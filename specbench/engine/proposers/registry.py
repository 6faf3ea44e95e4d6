"""From a proposer's name to the proposer. Its file imports torch, and is imported when it is made."""

from __future__ import annotations

import importlib

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.proposer_table import PROPOSERS
from specbench.engine.proposers.proposer import Proposer


def make_proposer(config: EngineConfig, checkpoint: Checkpoint) -> Proposer | None:
    """The proposer that `config` names, nothing loaded yet; None for "none"."""
    if config.proposer == "none":
        return None
    file, _, name = PROPOSERS[config.proposer].implementation.partition(".")
    proposer: Proposer = getattr(importlib.import_module(f"specbench.engine.proposers.{file}"), name)(
        config, checkpoint
    )
    return proposer
