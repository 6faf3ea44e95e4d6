"""What a drafter's caches hold after every pass, against an oracle that recomputes every module from scratch.

The reference sequence of a pass is the committed tokens followed by the pass's own drafts. Whoever wrote an entry (this
request, or an earlier one whose block was shared) and whenever, it must be the one that this sequence gives.
"""

from __future__ import annotations

import torch

from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposers.proposer import DraftBatch
from tests.engine.oracle import Oracle

TOLERANCE = 1e-4


class EntryChecker:
    """Wraps the proposer of an engine; after each pass compares every entry that a later row may read."""

    def __init__(self, engine: LLMEngine, oracle: Oracle):
        self.engine, self.oracle = engine, oracle
        self.num_modules = engine.config.num_speculative_tokens
        self.num_entries = 0
        #: request row -> drafts of its passes, since the row was taken over
        self.drafts: dict[int, list[list[int]]] = {}
        propose = engine.runner.proposer.propose

        def checked(batch: DraftBatch) -> None:
            propose(batch)
            for index, row in enumerate(batch.rows_np):
                self._check(batch, index, row)

        engine.runner.proposer.propose = checked

    def _check(self, batch: DraftBatch, index: int, row: int) -> None:
        newest = int(batch.first_position[index] + batch.num_valid[index]) - 1
        pool = batch.token_pool[row]
        if batch.is_partial_np[index]:
            tokens, drafts = pool[: newest + 1 + self.num_modules].tolist(), []
        else:
            column = int(batch.draft_columns[index])
            tokens = pool[: column + self.num_modules].tolist()
            drafts = tokens[column:]
        self._check_pass(row, newest, tokens, drafts)

    def check_decoding_rows(self) -> int:
        """Compare from outside what the last step left for every request that decodes, none of them in flight: for
        steps that are replayed, in which nothing can be wrapped. Returns how many there were."""
        state, requests = self.engine.runner.state, self.engine.scheduler.running
        decoding = [one for one in requests if one.num_output_tokens and not one.is_prefilling and not one.is_finished]
        for request in decoding:
            assert not request.in_flight
            num_tokens, num_computed = state.counts[:, request.row].tolist()
            assert (num_tokens, num_computed) == (request.num_tokens, request.num_computed_tokens)
            tokens = state.token_pool[request.row, : num_tokens + self.num_modules].tolist()
            self._check_pass(request.row, num_computed - 1, tokens, tokens[num_tokens:])
        return len(decoding)

    def _check_pass(self, row: int, newest: int, tokens: list[int], drafts: list[int]) -> None:
        assert min(tokens) >= 0
        for module, (_, logits) in enumerate(self.oracle.mtp_chain(tokens, self.num_modules)):
            if drafts:
                difference = float(logits[newest].max() - logits[newest, drafts[module]])
                assert difference < TOLERANCE, (module, newest, difference)
        self._compare_entries(row, newest)

    def _compare_entries(self, row: int, newest: int) -> None:
        state, size = self.engine.runner.state, self.engine.config.block_size
        for group, spec in enumerate(self.engine.memory.specs):
            if spec.owner != "draft" or spec.kind == "short_conv":
                continue
            reach = newest + 1 if spec.window is None else spec.window - 1 + spec.num_provisional_rows
            positions = torch.arange(max(0, newest + 1 - reach), newest + 1)
            blocks = state.block_tables[group, row].cpu()[positions // size + 1].long()
            assert (blocks > 0).all()
            slots = blocks * size + positions % size
            for name, (stored,) in zip(spec.layers, self.engine.caches[spec.name].layers, strict=True):
                prefix = next(prefix for prefix in self.oracle.keys_values if prefix.startswith(name))
                difference = (stored.cpu()[slots] - self.oracle.keys_values[prefix][positions]).abs()
                assert difference.max() < TOLERANCE, (name, newest, positions[difference.flatten(1).amax(1).argmax()])
                self.num_entries += len(positions)
