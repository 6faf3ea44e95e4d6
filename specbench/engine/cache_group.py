"""What a model or a proposer registers about its caches. Scheduling and memory see these specs only, never a model.

Belongs here: the three lookaheads and what a group costs. Does not belong here: blocks (scheduling/kv_cache.py),
tensors (layers/cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Owner = Literal["target", "draft"]
CacheKind = Literal["full_attention", "sliding_window", "short_conv"]


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """One tensor per layer and token: [slots, *shape]."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class CacheGroupSpec:
    """Layers of one owner that share block tables and slots: same kind, same window.

    A token of a sequence has one slot per group; each layer of the group stores every stream of it at that slot.
    """

    name: str
    owner: Owner
    kind: CacheKind
    #: Names of the layers, in the order in which their caches are stored.
    layers: tuple[str, ...]
    #: Per layer, its streams.
    streams: tuple[tuple[StreamSpec, ...], ...]
    #: Bytes of one element.
    element_size: int
    #: A row at position p reads positions p - window + 1 .. p (a convolution's window is its kernel). None: all.
    window: int | None
    #: Prompt tokens beyond its own position that a row reads: N for multi-module drafting, 0 for a target.
    num_prompt_lookahead: int = 0
    #: Newest rows that a later pass may still rewrite: N - 1 for multi-module drafting, 0 for a target.
    num_provisional_rows: int = 0
    #: Slots past the newest committed token that drafting itself writes: 0 for multi-module drafting.
    num_draft_slots: int = 0

    @property
    def bytes_per_token(self) -> int:
        return self.element_size * sum(stream.num_elements for layer in self.streams for stream in layer)
