"""Tensor parallelism: what the ranks that hold one model together say to each other inside a step.

Belongs here: collectives on tensors, which do nothing and cost nothing where there is one rank. Does not belong here:
how ranks are started (ranks.py), what is split (the families' configs), steps and their results.

A model gets the object when it is loaded. Every rank computes the same from what a collective returns, bit for bit:
sums are made once and handed out, so that tokens and accepted counts are equal on all ranks without being sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, ReduceScatterOptions

from specbench.engine.shard import WHOLE, Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class PeerLost(RuntimeError):
    """A collective failed: another rank has gone, or does not answer."""


class TensorParallel:
    """One rank's view of the group."""

    def __init__(self, shard: Shard = WHOLE, group: ProcessGroup | None = None) -> None:
        assert (group is None) == (shard.size == 1)
        self.shard = shard
        self.rank = shard.rank
        self.size = shard.size
        self._group = group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place where `x` is contiguous."""
        if self._group is None:
            return x
        x = x.contiguous()
        _complete(lambda group: group.allreduce([x], _now(AllreduceOptions())), self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Those of all ranks, in their order: [...] -> [size, ...]."""
        if self._group is None:
            return x.unsqueeze(0)
        own, gathered = x.contiguous(), x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        _complete(lambda group: group._allgather_base(gathered, own, _now(AllgatherOptions())), self._group)
        return gathered.view(self.size, *x.shape)

    def reduce_scatter_channels(self, x: Tensor) -> Tensor:
        """This rank's channels of the sum over ranks: [T, channels] -> [T, channels / size]."""
        if self._group is None:
            return x
        by_rank = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous().flatten(0, 1)
        own = x.new_empty(x.shape[0], x.shape[1] // self.size)
        _complete(lambda group: group._reduce_scatter_base(own, by_rank, _now(ReduceScatterOptions())), self._group)
        return own

    def all_gather_channels(self, x: Tensor) -> Tensor:
        """[T, channels / size] of each rank -> [T, channels]."""
        if self._group is None:
            return x
        return self.all_gather(x).transpose(0, 1).flatten(1)


def _now(options: Any) -> Any:
    """On the stream of the step itself: there is nothing to run beside a collective, and a stream of its own costs two
    events."""
    options.asyncOp = False
    return options


def _complete(begin: Callable[[ProcessGroup], Any], group: ProcessGroup) -> None:
    try:
        work = begin(group)
        if work is not None:
            work.wait()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PeerLost(str(error)) from error


#: A model that one rank holds alone.
ALONE = TensorParallel()


class Vocabulary:
    """Token ids split over ranks: each has a range of the token table's rows, and of the logits' columns."""

    def __init__(self, size: int, parallel: TensorParallel) -> None:
        self.size = size
        self.parallel = parallel
        self.start, self.stop = parallel.shard.range_of(size)
        #: Columns that every rank sends, the last one's padded.
        self._width = -(-size // parallel.size)

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of it."""
        return self.parallel.size == 1

    def look_up(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of the split table: [T] -> [T, hidden]. table: [stop - start, hidden]."""
        rows = token_ids - self.start
        is_here = (rows >= 0) & (rows < len(table))
        found = torch.nn.functional.embedding(rows.clamp(0, len(table) - 1), table)
        return self.parallel.all_reduce(found * is_here.unsqueeze(-1))

    def gather(self, logits: Tensor) -> Tensor:
        """Own columns [R, stop - start] -> all, [R, size]."""
        if self.is_whole:
            return logits
        padded = torch.nn.functional.pad(logits, (0, self._width - logits.shape[1]))
        return self.parallel.all_gather(padded).transpose(0, 1).flatten(1)[:, : self.size]

    def argmax(self, scores: Tensor) -> Tensor:
        """Global ids of the largest of fp32 scores, int64 [R], from own columns [R, stop - start]; of equal ones the
        lowest. Two numbers a row are sent, not its scores."""
        if self.is_whole:
            return scores.argmax(dim=-1)
        ids = scores.argmax(dim=-1)
        values = scores.gather(1, ids[:, None])[:, 0]
        # fp32 and ids are exact in fp64. The first of equal maxima over ranks has the lowest ids.
        best = self.parallel.all_gather(torch.stack([values.double(), (ids + self.start).double()], dim=-1))
        rank = best[:, :, 0].argmax(dim=0)
        return best[:, :, 1].gather(0, rank[None])[0].long()
