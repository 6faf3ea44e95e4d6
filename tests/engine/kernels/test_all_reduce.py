"""Ranks exchange rows over each other's memory: two and three processes at once, in the interpreter over shared memory,
and on GPUs over theirs, which is one that they share where there are no two."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing import get_context

from specbench.engine.execution.peer_memory import PeerMemory, RowKind, open_peer_memory
from specbench.engine.execution.rank_groups import join_store, open_store
from specbench.engine.kernels.all_reduce import (
    look_up,
    sum_add_norm,
    sum_add_norm_reference,
    sum_reference,
    sum_rows,
)
from specbench.engine.kernels.draft_inputs import InputNorms, module_inputs
from specbench.engine.kernels.inboxes import BITS, EMPTY, NUM_PLACES, Inboxes, OwnIds, PeerInboxes
from specbench.engine.kernels.sampling import NoiseRows, best_ids, best_of_chunks
from specbench.engine.kernels.short_conv import CachedConv, conv_add_norm
from specbench.engine.kernels.split_conv import can_sum, split_conv_add_norm, sum_own_channels
from specbench.engine.kernels.split_sampling import best_ids_over_ranks, best_keys, ids_of_keys
from specbench.engine.kernels.step_rows import PoolTokens
from specbench.engine.shard import Shard
from tests.engine.kernels.test_fused_layers import KERNEL, ROWS

WIDTH, MAX_ROWS, EPS = 24, 12, 1e-6
#: Enough for every place to be used again.
NUM_ROUNDS = 3
#: Ranks that wait for each other for good have not ended by then.
LONG_S = 60.0


def shared_inboxes(size: int, dtype: torch.dtype) -> list[list[Tensor]]:
    """Of each rank, those for rows and those for keys, in memory that processes share."""
    kinds = ((WIDTH + 8, dtype.itemsize), (1, 8))
    return [
        [
            torch.full((MAX_ROWS, NUM_PLACES, size, width), EMPTY[itemsize], dtype=BITS[itemsize]).share_memory_()
            for width, itemsize in kinds
        ]
        for _ in range(size)
    ]


def on_cpu(rank: int, shared: list[list[Tensor]]) -> PeerInboxes:
    is_aborted = torch.zeros(1, dtype=torch.int32)
    rows, keys = (
        Inboxes(rank, torch.tensor([each.data_ptr() for each in boxes]), boxes[rank], counts, is_aborted)
        for boxes, counts in zip(zip(*shared, strict=True), torch.zeros(2, MAX_ROWS, dtype=torch.int32), strict=True)
    )
    return PeerInboxes(rows, keys)


class Rank:
    """One rank's calls, and what they must give: every rank draws the parts of all."""

    def __init__(self, inboxes: PeerInboxes, size: int, dtype: torch.dtype, device: str) -> None:
        self.inboxes, self.rank, self.size = inboxes, inboxes.rows.rank, size
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator().manual_seed(1)

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device="cpu").to(self.device, dtype or self.dtype)

    def check_sums(self, num_rows: int) -> None:
        parts = [self.randn(num_rows, WIDTH) for _ in range(self.size)]
        for part in parts:
            part[0, :3] = -0.0  # the mark's bits
        residual, weight = self.randn(num_rows, WIDTH), self.randn(WIDTH)
        own, rows = parts[self.rank], self.inboxes.rows
        assert torch.equal(sum_rows(own, rows), sum_reference(parts))
        summed, normed = sum_add_norm(own, residual, weight, EPS, rows)
        expected, expected_norm = sum_add_norm_reference(parts, residual, weight, EPS)
        assert torch.equal(summed, expected)
        tolerance = 1e-5 if self.dtype == torch.float32 else 1e-2
        torch.testing.assert_close(normed, expected_norm, rtol=tolerance, atol=tolerance)
        splits = self.randn(self.size, 3, num_rows, WIDTH, dtype=torch.float32)
        found = sum_add_norm(splits[self.rank].contiguous(), residual, weight, EPS, rows)
        expected = sum_add_norm_reference(
            [sum_reference(list(part)).to(self.dtype) for part in splits], residual, weight, EPS
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)

    def check_look_up(self, num_rows: int) -> None:
        share = 5
        table = self.randn(self.size * share, WIDTH)
        ids = torch.randint(0, len(table), (num_rows,), generator=self.generator).to(self.device)
        own = table[self.rank * share : (self.rank + 1) * share].contiguous()
        assert torch.equal(look_up(own, ids, OwnIds(self.rank * share, self.inboxes.rows)), table[ids])

    def check_module_inputs(self, has_embed_norm: bool) -> None:
        share, lookahead = 7, 2
        num_ids, num_rows = self.size * share, 11
        pool = torch.randint(-1, num_ids, (4, 30), generator=self.generator).to(self.device)
        request_of_row, positions = torch.randint(0, 3, (2, num_rows), generator=self.generator).to(self.device)
        tokens = PoolTokens(pool, torch.tensor([3, 0, 1]).to(self.device), request_of_row, positions, lookahead)
        hidden, table = self.randn(num_rows, WIDTH), self.randn(num_ids, WIDTH)
        embed_weight = self.randn(WIDTH) if has_embed_norm else None
        whole = InputNorms(table, embed_weight, 1e-5, self.randn(2, WIDTH), EPS)
        own = table[self.rank * share : (self.rank + 1) * share].contiguous()
        split = replace(whole, table=own, own_ids=OwnIds(self.rank * share, self.inboxes.rows))
        tolerance = 1e-5 if self.dtype == torch.float32 else 1e-2
        found, expected = (module_inputs(tokens, hidden, norms) for norms in (split, whole))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)

    def check_conv(self, name: str, has_norm: bool) -> None:
        torch.manual_seed(2)
        paged = ROWS[name]()
        num_rows, share = len(paged.slot_mapping), WIDTH // self.size
        own = slice(self.rank * share, (self.rank + 1) * share)
        parts = [self.randn(num_rows, WIDTH) for _ in range(self.size)]
        residual, weight = self.randn(num_rows, WIDTH), self.randn(WIDTH) if has_norm else None
        taps, cache = self.randn(KERNEL, WIDTH, dtype=torch.float32), paged.cache(WIDTH, self.dtype)
        whole = CachedConv(taps, cache.clone(), paged.slot_mapping, paged.tap_slots)
        mine = CachedConv(taps[:, own].contiguous(), cache[:, own].contiguous(), paged.slot_mapping, paged.tap_slots)
        summed = sum_own_channels(parts[self.rank], self.inboxes.rows)
        assert torch.equal(summed, sum_reference(parts)[:, own])
        if can_sum(paged.rows, num_rows):
            summed = parts[self.rank]
        found = split_conv_add_norm(summed, residual, mine, paged.rows, weight, EPS, self.inboxes.rows)
        expected = conv_add_norm(sum_reference(parts), residual, whole, paged.rows, weight, EPS)
        tolerance = 1e-5 if self.dtype == torch.float32 else 2e-2
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
        assert torch.equal(mine.cache[:-1], whole.cache[:-1, own])

    def check_argmax(self, num_rows: int, has_noise: bool) -> None:
        share = 5000
        logits = self.randn(num_rows, self.size * share, dtype=torch.float32)
        logits[0] = float("nan")
        logits[1, 3], logits[1, 2 * share - 1] = 40.0, 40.0  # of equal ones the lowest
        noise = None
        if has_noise:
            keys, positions = torch.arange(2 * num_rows, device=self.device).view(2, num_rows) * 977
            noise = NoiseRows(keys, positions, torch.tensor([1.0, 0.0, 1.0]).to(self.device)[:num_rows], 3)
        first_id = self.rank * share
        own = logits[:, first_id : first_id + share].contiguous()
        expected = best_ids(logits, noise)
        bests = best_of_chunks(own, noise, first_id)
        assert torch.equal(best_ids_over_ranks(bests, first_id, share, self.inboxes.keys), expected)
        if num_rows > 1:
            all_keys = [
                best_keys(
                    best_of_chunks(logits[:, rank * share : (rank + 1) * share].contiguous(), noise, rank * share),
                    rank * share,
                    share,
                )
                for rank in range(self.size)
            ]
            assert torch.equal(ids_of_keys(torch.stack(all_keys).amax(0)), expected)

    def check_all(self) -> None:
        for round_number in range(NUM_ROUNDS):
            self.check_sums(1 + round_number % 3)
            self.check_look_up(1 + round_number % 2)
            self.check_module_inputs(has_embed_norm=round_number % 2 == 0)
            name = list(ROWS)[round_number % len(ROWS)]
            self.check_conv(name, has_norm=round_number % 2 == 0)
            self.check_argmax(3, has_noise=round_number % 2 == 1)


def _work_on_cpu(rank: int, size: int, shared: list[list[Tensor]], dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    Rank(on_cpu(rank, shared), size, dtype, "cpu").check_all()


def run_ranks(size: int, work: Callable[..., None], *arguments: Any) -> None:
    context = get_context("spawn")
    processes = [context.Process(target=work, args=(rank, size, *arguments), daemon=True) for rank in range(size)]
    for process in processes:
        process.start()
    end_s = time.monotonic() + LONG_S
    for process in processes:
        process.join(max(0.0, end_s - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * size


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_at_once_in_the_interpreter(size: int) -> None:
    run_ranks(size, _work_on_cpu, shared_inboxes(size, torch.float32), torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")
def test_a_rank_that_was_told_so_waits_for_nobody() -> None:
    shared = shared_inboxes(2, torch.float32)
    inboxes = on_cpu(0, shared).rows
    inboxes.is_aborted.fill_(1)
    x = torch.ones(1, WIDTH)
    # The other rank never answers: what comes is the mark, which is zero.
    assert torch.equal(sum_rows(x, inboxes), x)


def _work_on_gpu(rank: int, size: int, port: int, dtype: torch.dtype) -> None:
    num_gpus = min(torch.cuda.device_count(), size)
    device = torch.device(f"cuda:{rank % num_gpus}")
    torch.cuda.set_device(device)
    store = join_store("127.0.0.1", port)
    memory = open_peer_memory(store, Shard(rank, size), device, RowKind(WIDTH, dtype), size // num_gpus)
    assert isinstance(memory, PeerMemory), memory
    Rank(memory.inboxes, size, dtype, str(device)).check_all()
    torch.cuda.synchronize()
    store.set(f"done/{rank}", "1")
    store.wait([f"done/{other}" for other in range(size)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_gpus(dtype: torch.dtype) -> None:
    store, port = open_store()
    run_ranks(2, _work_on_gpu, port, dtype)
    del store
