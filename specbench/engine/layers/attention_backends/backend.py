"""The contract of an attention backend: who turns queries and cached keys into what a layer hands on.

Belongs here: the two objects, what one layer asks, and capabilities as data. Does not belong here: any backend, and
which one runs (choose.py). Layers and runners read what a backend declares and never ask what it is called.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specbench.engine.kernels.attention import RelativeBias
from specbench.engine.layers.metadata import AttentionMetadata, HostRows


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer asks for, the same at every step."""

    #: Cache group of the keys and values.
    kv_group: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Factor of query . key.
    scale: float
    #: Keys that a row sees, its own included; None: all up to its own.
    window: int | None
    #: What distances add to scores; None: nothing.
    bias: RelativeBias | None = None


class AttentionPass(Protocol):
    """One forward pass. Layers call it in turn."""

    def attend(
        self,
        layer: LayerAttention,
        query: Tensor,
        kv_cache: Tensor,
        relative: Tensor | None = None,
        log_scale: Tensor | None = None,
    ) -> Tensor:
        """query [T, heads, d], kv_cache [slots + 1, 2, kv_heads, d] with this pass' keys and values in it,
        relative [T, heads, d_rel] where the layer has a bias, log_scale [T, 1, 1] fp32 (a factor of every score of a
        row) -> [T, heads * d]. Rows that are dead give finite garbage."""
        ...


class ReplayPlans(Protocol):
    """What the host decides about the passes of one function that is recorded in a graph."""

    def calls(self) -> AbstractContextManager[None]:
        """The function is called in here, each time from its start: before it is recorded, and while it is."""
        ...

    def make(self, rows: HostRows) -> None:
        """Before a replay. Requests of padding at the end may be without a bound. Passes of which the host knew who has
        which row when they were recorded keep to that, and take the bounds alone."""
        ...


class AttentionBackend(Protocol):
    """One object an engine, handed to its models when they are loaded."""

    #: Whether metadata must hold segments, which depend on lengths that the host knows.
    needs_segments: bool
    #: Whether query heads lie by place in the group that shares a key head and then by key head (see `by_group`), or
    #: the other way round, as checkpoints have them.
    heads_by_group: bool
    #: Whether a CUDA graph may hold its launches.
    is_capturable: bool

    def start(self, metadata: AttentionMetadata) -> AttentionPass:
        """Prepare a forward pass over the rows of `metadata`."""
        ...

    def replay_plans(self, max_seq_len: int) -> ReplayPlans | None:
        """For a function whose rows are recorded with this upper bound of their lengths; None where nothing is
        planned."""
        ...
