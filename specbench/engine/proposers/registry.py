"""The table of proposers: one line each. A proposer's file imports torch, and is imported when its proposer is made."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig

if TYPE_CHECKING:
    from specbench.engine.proposers.proposer import Proposer

#: EngineConfig.proposer -> file of this folder and class in it, made with (EngineConfig, the target's Checkpoint).
PROPOSERS = {
    "draft_model": "draft_model.DraftModel",
    "mtp_multi": "mtp_multi.MultiModuleMTP",
    "mtp_single": "mtp_single.SingleModuleMTP",
    "ngram": "ngram.NgramLookup",
    "stub": "stub.StubProposer",
}


def make_proposer(config: EngineConfig, checkpoint: Checkpoint) -> Proposer | None:
    """The proposer that `config` names, nothing loaded yet; None for "none"."""
    if config.proposer == "none":
        return None
    file, _, name = PROPOSERS[config.proposer].partition(".")
    proposer: Proposer = getattr(importlib.import_module(f"specbench.engine.proposers.{file}"), name)(
        config, checkpoint
    )
    return proposer
