"""What execution and proposers ask of a model: contracts, no model.

Belongs here: methods that shared code calls, with their shapes. Does not belong here: anything that one family alone
has, or that a proposer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.kernels.step_rows import PoolTokens
from specbench.engine.layers.attention_backends.backend import AttentionBackend
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.metadata import AttentionMetadata, TargetOutput
from specbench.engine.layers.parallel import TensorParallel, Vocabulary

if TYPE_CHECKING:
    from specbench.engine.kernels.sampling import ChunkBests


class LogitsModel(Protocol):
    """What has a head."""

    vocabulary: Vocabulary

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] -> fp32 [num_rows, vocab]."""
        ...

    def compute_own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] -> fp32 [num_rows, this rank's range of the vocabulary]."""
        ...

    def compute_bests(self, hidden: torch.Tensor) -> ChunkBests:
        """On a GPU: the best of each part of what compute_own_logits gives, which need not exist for it."""
        ...


class TargetModel(LogitsModel, Protocol):
    """A model that verifies."""

    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    parallel: TensorParallel
    #: Attention group name -> distances that its relative bias covers.
    relative_extents: dict[str, int]
    attention: AttentionBackend

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]: ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden], as the first layer takes it."""
        ...

    def embed_raw(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden], before the norm on the embedding."""
        ...

    def forward(
        self, embeds: torch.Tensor, metadata: AttentionMetadata, caches: Mapping[str, CachePool]
    ) -> TargetOutput: ...

    def final_norm(self, x: torch.Tensor) -> torch.Tensor: ...


class ContentEncoder(Protocol):
    """A target that hears or sees."""

    def encode_content(self, kind: str, rows: torch.Tensor) -> torch.Tensor:
        """Raw content of one kind, one token a row -> [num_rows, hidden], as the first layer takes it."""
        ...


class MTPModules(LogitsModel, Protocol):
    """A stack of multi-token prediction modules; module m's row p predicts the token at p + m + 2."""

    num_modules: int
    relative_extents: dict[str, int]
    attention: AttentionBackend

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]: ...

    def forward_module(
        self,
        module: int,
        token_embeds: torch.Tensor,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        caches: Mapping[str, CachePool],
    ) -> torch.Tensor:
        """Row p: the embedding of the token at p + module + 1 and the previous hidden at p -> this module's hidden."""
        ...

    def forward_module_on_tokens(
        self,
        module: int,
        tokens: PoolTokens,
        hidden: torch.Tensor,
        metadata: AttentionMetadata,
        caches: Mapping[str, CachePool],
        last_rows: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same from the token pool, and the hiddens at last_rows ([num_requests], one of each, which has as many
        rows as any other; None: all rows once more). For a GPU that holds the whole token table."""
        ...
