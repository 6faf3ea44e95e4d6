"""Greedy decoding without an engine: what its layers alone can do."""

from __future__ import annotations

import time

import torch

from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.metadata import AttentionMetadata, PagedRows, Segment, SegmentKeys
from specbench.engine.llm_engine import LLMEngine

BLOCK_SIZE = 16


class BareLoop:
    """Greedy decoding of one static batch of equally long prompts with the engine's layers, and nothing around them."""

    def __init__(self, engine: LLMEngine, batch_size: int, num_prompt: int, num_output: int):
        self.model = engine.model
        self.batch_size = batch_size
        self.num_prompt = num_prompt
        self.num_output = num_output
        self.specs = self.model.cache_groups()
        blocks_each = -(-(num_prompt + num_output) // BLOCK_SIZE)
        #: Slot of position 0 of each request, [batch]; the null block comes first.
        self.origin = BLOCK_SIZE + torch.arange(batch_size) * blocks_each * BLOCK_SIZE
        num_blocks = 1 + batch_size * blocks_each
        self.caches = {
            spec.name: CachePool(spec, num_blocks, BLOCK_SIZE, self.model.dtype, self.model.device)
            for spec in self.specs
        }

    def metadata(self, start: int, num_rows: int) -> AttentionMetadata:
        """Rows at positions start .. start + num_rows - 1 of every request."""
        positions = torch.arange(start, start + num_rows)
        slots = (self.origin[:, None] + positions).flatten()
        keys, taps = {}, {}
        for spec in self.specs:
            if spec.kind == "short_conv":
                window = positions[:, None] + torch.arange(1 - spec.window, 1)
                taps[spec.name] = torch.where(window < 0, 0, self.origin[:, None, None] + window).flatten()
                continue
            first_key = 0 if spec.window is None else max(start - spec.window + 1, 0)
            key_positions = torch.arange(first_key, start + num_rows)
            extent = self.model.relative_extents[spec.name]
            column = (positions[:, None] - key_positions + 1).clamp(0, extent + 1)
            keys[spec.name] = SegmentKeys(
                slots=(self.origin[:, None] + key_positions).flatten(),
                columns=column.expand(self.batch_size, 1, 1, -1, -1),
            )
        segment = Segment(self.batch_size, num_rows, None, keys)
        return AttentionMetadata(
            num_tokens=len(slots),
            max_seq_len=start + num_rows,
            positions=positions.repeat(self.batch_size),
            slot_mapping={spec.name: slots for spec in self.specs},
            tap_slots=taps,
            paged=self._paged(start, num_rows),
            segments=(segment,),
        )

    def _paged(self, start: int, num_rows: int) -> PagedRows:
        num_blocks = -(-(self.num_prompt + self.num_output) // BLOCK_SIZE)
        table = torch.zeros(self.batch_size, 1 + num_blocks, dtype=torch.int32)
        table[:, 1:] = self.origin[:, None] // BLOCK_SIZE + torch.arange(num_blocks)
        return PagedRows(
            num_reqs=self.batch_size,
            max_rows=num_rows,
            query_start_loc=torch.arange(self.batch_size + 1, dtype=torch.int32) * num_rows,
            first_position=torch.full((self.batch_size,), start),
            num_live=None,
            block_tables={spec.name: table for spec in self.specs},
            block_size=BLOCK_SIZE,
            host=None,
        )

    @torch.inference_mode()
    def run(self, token_ids: list[list[int]]) -> tuple[int, float, list[list[int]]]:
        """Tokens emitted, seconds and output of one batch of prompts, prefill included."""
        start = time.perf_counter()
        ids = torch.tensor(token_ids)
        newest = self._forward(ids.flatten(), self.metadata(0, self.num_prompt), self.num_prompt)
        emitted = [newest]
        for step in range(self.num_output - 1):
            newest = self._forward(newest, self.metadata(self.num_prompt + step, 1), 1)
            emitted.append(newest)
        output = torch.stack(emitted, 1).tolist()
        return self.batch_size * self.num_output, time.perf_counter() - start, output

    def _forward(self, ids: torch.Tensor, metadata: AttentionMetadata, num_rows: int) -> torch.Tensor:
        hidden = self.model.forward(self.model.embed(ids), metadata, self.caches).hidden_states
        last = hidden.view(self.batch_size, num_rows, -1)[:, -1]
        return self.model.compute_logits(last).argmax(-1)
