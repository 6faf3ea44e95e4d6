"""Tensor parallelism: what the ranks that hold one model together say to each other inside a step.

Belongs here: collectives on tensors, which do nothing and cost nothing where there is one rank. Does not belong here:
how ranks are started (execution/rank_processes.py), what is split (the families' configs), steps and their results.

A model gets the object when it is loaded. Every rank computes the same from what a collective returns, bit for bit:
sums are made once and handed out, so that tokens and accepted counts are equal on all ranks without being sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, ReduceOp, ReduceScatterOptions

from specbench.engine.kernels.inboxes import Inboxes, OwnIds, PeerInboxes
from specbench.engine.layers.norm import RMSNorm
from specbench.engine.shard import WHOLE, Shard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from specbench.engine.kernels.sampling import ChunkBests


class PeerLost(RuntimeError):
    """A collective failed: another rank has gone, or does not answer."""


class TensorParallel:
    """One rank's view of the group."""

    def __init__(
        self, shard: Shard = WHOLE, groups: Sequence[ProcessGroup] = (), inboxes: PeerInboxes | None = None
    ) -> None:
        """groups: the first for collectives that run at once, the last for recorded ones. inboxes: taken for what fits
        them, a group for everything else."""
        assert bool(groups) == (shard.size > 1)
        self.shard = shard
        self.rank = shard.rank
        self.size = shard.size
        self._groups = groups
        self._inboxes = inboxes

    @property
    def takes_partial_sums(self) -> bool:
        """Whether `add_norm` adds up partial sums as it goes."""
        return not self._groups or self._inboxes is not None

    def row_inboxes(self, num_rows: int, like: Tensor) -> Inboxes | None:
        """Those for `num_rows` rows of hidden states as wide as rows of `like`, where they fit."""
        if self._inboxes is None:
            return None
        inboxes = self._inboxes.rows
        return inboxes if inboxes.takes(num_rows, like.shape[1], like.element_size()) else None

    def key_inboxes(self, num_rows: int) -> Inboxes | None:
        """Those for one int64 a row, where they fit."""
        if self._inboxes is None:
            return None
        inboxes = self._inboxes.keys
        return inboxes if inboxes.takes(num_rows, 1, torch.int64.itemsize) else None

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place where `x` is contiguous."""
        if not self._groups:
            return x
        x = x.contiguous()
        self._complete(lambda group: group.allreduce([x], _now(AllreduceOptions())))
        return x

    def add_norm(self, norm: RMSNorm, x: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
        """x + the sum over ranks of `part`, and its norm; [T, hidden] each, the part also as partial sums of Linear."""
        if not self._groups:
            return norm.of_sum(x, part)
        inboxes = self.row_inboxes(len(x), x)
        if inboxes is None:
            whole = part if part.dim() == x.dim() else part.sum(0).to(x.dtype)
            return norm.of_sum(x, self.all_reduce(whole))
        from specbench.engine.kernels.all_reduce import sum_add_norm

        return sum_add_norm(part.contiguous(), x, norm.weight, norm.eps, inboxes)

    def largest(self, keys: Tensor) -> Tensor:
        """The maximum over ranks, in place."""
        assert self._groups
        options = _now(AllreduceOptions())
        options.reduceOp = ReduceOp.MAX
        self._complete(lambda group: group.allreduce([keys], options))
        return keys

    def all_gather(self, x: Tensor) -> Tensor:
        """Those of all ranks, in their order: [...] -> [size, ...]."""
        if not self._groups:
            return x.unsqueeze(0)
        own, gathered = x.contiguous(), x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._complete(lambda group: group._allgather_base(gathered, own, _now(AllgatherOptions())))
        return gathered.view(self.size, *x.shape)

    def reduce_scatter_channels(self, x: Tensor) -> Tensor:
        """This rank's channels of the sum over ranks: [T, channels] -> [T, channels / size]."""
        if not self._groups:
            return x
        by_rank = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous().flatten(0, 1)
        own = x.new_empty(x.shape[0], x.shape[1] // self.size)
        self._complete(lambda group: group._reduce_scatter_base(own, by_rank, _now(ReduceScatterOptions())))
        return own

    def all_gather_channels(self, x: Tensor) -> Tensor:
        """[T, channels / size] of each rank -> [T, channels]."""
        if not self._groups:
            return x
        return self.all_gather(x).transpose(0, 1).flatten(1)

    def _complete(self, begin: Callable[[ProcessGroup], Any]) -> None:
        is_recorded = len(self._groups) > 1 and torch.cuda.is_current_stream_capturing()
        try:
            work = begin(self._groups[-1 if is_recorded else 0])
            if work is not None:
                work.wait()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PeerLost(str(error)) from error


def _now(options: Any) -> Any:
    """On the stream of the step itself: there is nothing to run beside a collective, and a stream of its own costs two
    events."""
    options.asyncOp = False
    return options


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

    def own_ids(self, num_rows: int, table: Tensor) -> OwnIds | None:
        """How kernels look up rows of the split table, so many at once; None where the table is whole, or they
        cannot."""
        inboxes = self.parallel.row_inboxes(num_rows, table)
        return None if inboxes is None else OwnIds(self.start, inboxes)

    def look_up(self, table: Tensor, token_ids: Tensor) -> Tensor:
        """Rows of the split table: [T] -> [T, hidden]. table: [stop - start, hidden]."""
        own_ids = self.own_ids(len(token_ids), table)
        if own_ids is not None:
            from specbench.engine.kernels.all_reduce import look_up

            return look_up(table, token_ids, own_ids)
        rows = token_ids - self.start
        is_here = (rows >= 0) & (rows < len(table))
        rows = rows.clamp(0, len(table) - 1)
        # The operation named embedding takes several times as long for few rows on a GPU.
        found = table[rows] if table.is_cuda else torch.nn.functional.embedding(rows, table)
        return self.parallel.all_reduce(found * is_here.unsqueeze(-1))

    def gather(self, logits: Tensor) -> Tensor:
        """Own columns [R, stop - start] -> all, [R, size]."""
        if self.is_whole:
            return logits
        padded = torch.nn.functional.pad(logits, (0, self._width - logits.shape[1]))
        return self.parallel.all_gather(padded).transpose(0, 1).flatten(1)[:, : self.size]

    def argmax(self, scores: Tensor) -> Tensor:
        """Global ids of the largest of fp32 scores, int64 [R], from own columns [R, stop - start]; of equal ones the
        lowest. One or two numbers a row are sent, not its scores."""
        if scores.is_cuda:
            from specbench.engine.kernels.sampling import best_of_chunks

            return self.ids_of_bests(best_of_chunks(scores))
        if self.is_whole:
            return scores.argmax(dim=-1)
        ids = scores.argmax(dim=-1)
        values = scores.gather(1, ids[:, None])[:, 0]
        # fp32 and ids are exact in fp64. The first of equal maxima over ranks has the lowest ids.
        best = self.parallel.all_gather(torch.stack([values.double(), (ids + self.start).double()], dim=-1))
        rank = best[:, :, 0].argmax(dim=0)
        return best[:, :, 1].gather(0, rank[None])[0].long()

    def ids_of_bests(self, bests: ChunkBests) -> Tensor:
        """The same on a GPU, from the best of parts of own columns."""
        from specbench.engine.kernels.sampling import ids_of_bests
        from specbench.engine.kernels.split_sampling import best_ids_over_ranks, best_keys, ids_of_keys

        num_ids = self.stop - self.start
        if self.is_whole:
            return ids_of_bests(bests, num_ids)
        inboxes = self.parallel.key_inboxes(len(bests.values))
        if inboxes is not None:
            return best_ids_over_ranks(bests, self.start, num_ids, inboxes)
        return ids_of_keys(self.parallel.largest(best_keys(bests, self.start, num_ids)))
