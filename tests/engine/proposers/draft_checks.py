"""Every draft of every step against a recomputation from scratch on the committed tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposers.proposer import DraftBatch
from specbench.generate import GenerateRequest

#: A draft may differ where two logits are as close as rounding moves them.
TOLERANCE = 1e-4

#: (committed tokens, number of drafts) -> logits [vocab] of each draft.
Recompute = Callable[[list[int], int], list[torch.Tensor]]


def run_and_check_drafts(engine: LLMEngine, requests: list[GenerateRequest], recompute: Recompute) -> int:
    """Run the requests to their end; returns the drafts compared."""
    proposer = engine.runner.proposer
    propose = proposer.propose
    num_drafts = 0

    def checked(batch: DraftBatch) -> None:
        nonlocal num_drafts
        propose(batch)
        for index, row in enumerate(batch.rows_np):
            if not batch.is_partial_np[index]:
                column = int(batch.draft_columns[index])
                pool = batch.token_pool[row, : column + proposer.k].tolist()
                num_drafts += check_drafts(pool[:column], pool[column:], engine.config.max_model_len, recompute)

    proposer.propose = checked
    for request in requests:
        engine.add_request(request, 0.0)
    while engine.has_requests:
        engine.step()
    return num_drafts


def check_drafts(committed: list[int], drafts: list[int], max_model_len: int, recompute: Recompute) -> int:
    """Drafts behind the context's end are never verified."""
    drafts = drafts[: max(max_model_len - len(committed), 0)]
    if not drafts:
        return 0
    for index, logits in enumerate(recompute(committed, len(drafts))):
        difference = float(logits.max() - logits[drafts[index]])
        assert difference < TOLERANCE, (len(committed), index, difference)
        if int(logits.argmax()) != drafts[index]:
            return index + 1  # later drafts follow another one
    return len(drafts)
