"""One rank of several, the others of which do not exist: for all that needs no collective."""

from __future__ import annotations

from specbench.engine.layers.parallel import TensorParallel
from specbench.engine.shard import Shard


class NoGroup:
    """Never asked for anything."""


def rank_alone(shard: Shard) -> TensorParallel:
    """The rank's view of a group that is not there."""
    return TensorParallel(shard, NoGroup())  # type: ignore[arg-type]
