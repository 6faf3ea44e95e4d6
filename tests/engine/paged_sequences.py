"""Runs a model over paged caches as a runner would: several sequences, shuffled blocks, any packing of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.layers.attention_backends.choose import make_backend
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.metadata import (
    AttentionMetadata,
    RowLayout,
    num_table_columns,
)
from specbench.engine.layers.metadata_builder import AttentionMetadataBuilder
from specbench.engine.models.inkling import InklingModel
from specbench.engine.models.registry import build_model, build_modules, load_model_config
from specbench.engine.models.target import MTPModules, TargetModel


def load_target(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", attention: str = "torch"
) -> InklingModel:
    checkpoint = Checkpoint.open(folder)
    model_config, backend = load_model_config(checkpoint), make_backend(attention)
    return build_model(checkpoint, model_config, dtype, torch.device(device), backend)


def load_modules(folder: Path, target: InklingModel, num_modules: int, faults: tuple[str, ...] = ()) -> MTPModules:
    return build_modules(Checkpoint.open(folder), target, num_modules, faults)


class PagedSequences:
    """Caches and block tables of one owner for `num_sequences` sequences of up to `max_positions` tokens."""

    def __init__(
        self,
        owner: TargetModel | MTPModules,
        num_sequences: int,
        max_positions: int,
        block_size: int,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        groups = owner.cache_groups()
        num_blocks = num_table_columns(max_positions, block_size) - 1
        total = 1 + num_sequences * num_blocks
        dtype = {2: torch.bfloat16, 4: torch.float32}[groups[0].element_size]
        self.caches = {spec.name: CachePool(spec, total, block_size, dtype, torch.device(device)) for spec in groups}
        self.builder = AttentionMetadataBuilder(
            groups, block_size, owner.relative_extents, torch.device(device), owner.attention.needs_segments
        )
        self.block_size = block_size
        self.device = device
        # [num_groups, num_sequences, 1 + num_blocks]
        self.tables = torch.zeros(len(groups), num_sequences, 1 + num_blocks, dtype=torch.int32)
        generator = torch.Generator().manual_seed(seed)
        for table in self.tables:
            blocks = torch.randperm(total - 1, generator=generator) + 1
            table[:, 1:] = blocks.view(num_sequences, num_blocks)
        self.tables = self.tables.to(device)

    def metadata(
        self,
        sequences: Sequence[int],
        first_positions: Sequence[int],
        num_rows: Sequence[int],
        num_live: Sequence[int] | None = None,
    ) -> AttentionMetadata:
        layout = self.layout(first_positions, num_rows, num_live)
        return self.builder.build(self.tables[:, list(sequences)], layout)

    def layout(
        self, first_positions: Sequence[int], num_rows: Sequence[int], num_live: Sequence[int] | None = None
    ) -> RowLayout:
        starts = [0]
        for count in num_rows:
            starts.append(starts[-1] + count)
        return RowLayout(
            tuple(starts),
            torch.tensor(first_positions, device=self.device),
            None if num_live is None else torch.tensor(num_live, device=self.device),
            [first + count for first, count in zip(first_positions, num_rows, strict=True)],
        )
