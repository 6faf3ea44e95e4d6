"""How a model is split over ranks: which share a rank has of a count, and which slice of a tensor. No torch.

Belongs here: arithmetic of shares. Does not belong here: what a family splits (its config file), collectives
(layers/parallel.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specbench.errors import UserError

#: Sizes that a refusal offers.
_OFFERED_SIZES = range(1, 65)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of `size` that hold a model together."""

    rank: int = 0
    size: int = 1
    #: Each rank has some experts whole, in place of a part of the width of each.
    whole_experts: bool = False

    def range_of(self, count: int) -> tuple[int, int]:
        """First and one past the last of this rank's share of things that need not split evenly: all ranks but the last
        have equally many."""
        width = -(-count // self.size)
        return min(self.rank * width, count), min((self.rank + 1) * width, count)

    def experts_of(self, count: int) -> range:
        """Which of the experts of a layer this rank reads: a part of each of them, or all of some."""
        if not self.whole_experts:
            return range(count)
        return range(*self.range_of(count))


#: A model that one rank holds alone.
WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class SplitCount:
    """Something that ranks share evenly."""

    count: int
    #: As a refusal calls it.
    what: str
    #: Shares hold whole multiples of it.
    unit: int = 1
    #: Whether ranks beyond the count hold the same one: such as key heads.
    is_replicable: bool = False

    def allows(self, size: int) -> bool:
        """Whether `size` ranks can share it."""
        if self.is_replicable and size > self.count:
            return size % self.count == 0
        return self.count % (size * self.unit) == 0

    def share(self, size: int) -> int:
        """How many each rank has."""
        return max(1, self.count // size) if self.is_replicable else self.count // size


def check_split(counts: Iterable[SplitCount], size: int) -> None:
    """UserError naming the first count that `size` ranks cannot share, and the sizes that all of them allow."""
    counts = list(counts)
    for count in counts:
        if not count.allows(size):
            allowed = [str(other) for other in _OFFERED_SIZES if all(each.allows(other) for each in counts)]
            unit = f" in multiples of {count.unit}" if count.unit > 1 else ""
            raise UserError(
                f"parallel.tensor_parallel_size: {size} ranks cannot share {count.count} {count.what}{unit}; say "
                f"{', '.join(allowed)}"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's slice of a tensor."""

    dim: int
    start: int
    stop: int

    def shape_of(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.stop - self.start, *whole[self.dim + 1 :])

    @property
    def index(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.dim, slice(self.start, self.stop))


def tensor_parts(
    whole: Mapping[str, tuple[int, ...]], own: Mapping[str, tuple[int, ...]], shard: Shard
) -> dict[str, Part]:
    """Tensor name -> the slice that this rank reads, for the tensors of which it does not read all.

    whole, own: shapes in the checkpoint, and of the rank's shares. They differ in one dimension at most. Ranks that
    hold the same share (a key head that several have) lie side by side.
    """
    parts = {}
    for name, own_shape in own.items():
        for dim, (count, share) in enumerate(zip(whole[name], own_shape, strict=True)):
            if count != share:
                start = shard.rank * (count // share) // shard.size * share
                parts[name] = Part(dim, start, start + share)
    return parts
