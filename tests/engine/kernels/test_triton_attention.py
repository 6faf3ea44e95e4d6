"""The Triton kernel equals attention in plain torch: in Triton's interpreter on a CPU, and on a GPU in both dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.attention_bias import RelativeTerm
from specbench.engine.kernels.attention_plan import TilePlan, plan_tiles
from specbench.engine.kernels.paged_attention import (
    new_arrivals,
    paged_attention,
    paged_attention_reference,
)
from specbench.engine.kernels.step_rows import PagedBatch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK_SIZE = 4


@dataclass(frozen=True)
class Case:
    """Requests of some rows at some positions."""

    first_positions: tuple[int, ...]
    counts: tuple[int, ...]
    live: tuple[int, ...] | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    window: int | None = None
    extent: int | None = None
    d_rel: int = 3
    has_log_scale: bool = False
    num_splits: int | None = 1


@dataclass(frozen=True)
class Inputs:
    query: torch.Tensor
    kv_cache: torch.Tensor
    batch: PagedBatch
    scale: float
    window: int | None
    relative: RelativeTerm | None
    log_scale: torch.Tensor | None


def draw(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> Inputs:
    """Random inputs; every slot that no live row may read is NaN, and so are dead rows."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    num_reqs, num_rows = len(case.counts), sum(case.counts)
    live = case.live or case.counts
    ends = [first + rows for first, rows in zip(case.first_positions, live, strict=True)]
    columns = 1 + -(
        -max(first + rows for first, rows in zip(case.first_positions, case.counts, strict=True)) // BLOCK_SIZE
    )
    num_blocks = 1 + num_reqs * columns
    table = torch.zeros(num_reqs, columns, dtype=torch.int32)
    blocks = (torch.randperm(num_blocks - 1, generator=generator) + 1).to(torch.int32)
    kv_cache = torch.full((num_blocks * BLOCK_SIZE + 1, 2, case.kv_heads, case.head_dim), math.nan).to(DEVICE, dtype)
    starts = [0]
    query = randn(num_rows, case.heads + 3, case.head_dim)[:, : case.heads]
    relative = (
        None
        if case.extent is None
        else RelativeTerm(randn(num_rows, case.heads, case.d_rel), randn(case.extent, case.d_rel))
    )
    for request, (end, count) in enumerate(zip(ends, case.counts, strict=True)):
        used = blocks[request * columns :][: -(-end // BLOCK_SIZE)] if live[request] else blocks[:0]
        table[request, 1 : 1 + len(used)] = used
        keys = torch.arange(end if live[request] else 0)
        slots = table[request, 1 + keys // BLOCK_SIZE].long() * BLOCK_SIZE + keys % BLOCK_SIZE
        kv_cache[slots.to(DEVICE)] = randn(len(keys), 2, case.kv_heads, case.head_dim)
        query[starts[-1] + live[request] : starts[-1] + count] = math.nan
        starts.append(starts[-1] + count)
    batch = PagedBatch(
        query_start_loc=torch.tensor(starts, dtype=torch.int32, device=DEVICE),
        first_position=torch.tensor(case.first_positions, device=DEVICE),
        num_live=None if case.live is None else torch.tensor(case.live, device=DEVICE),
        block_table=table.to(DEVICE),
        block_size=BLOCK_SIZE,
        max_rows=max(case.counts),
        arrivals=new_arrivals(torch.device(DEVICE)),
    )
    log_scale = 1 + torch.rand(num_rows, generator=generator).to(DEVICE) if case.has_log_scale else None
    return Inputs(query, kv_cache, batch, 0.3, case.window, relative, log_scale)


@contextmanager
def poisoned_outputs() -> Iterator[None]:
    """What is allocated meanwhile is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def plan_of(case: Case, element_size: int) -> TilePlan:
    counts = case.counts
    return plan_tiles(
        len(counts), sum(counts), max(counts), case.heads // case.kv_heads, case.kv_heads,
        case.head_dim * element_size, case.num_splits, is_relative=case.extent is not None,
    )  # fmt: skip


def error(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0) -> float:
    """Relative to the reference in fp64; NaN where the kernel left something out or read what it must not."""
    inputs = draw(case, dtype, seed)
    plan = plan_of(case, dtype.itemsize)
    with poisoned_outputs():
        output = paged_attention(*(getattr(inputs, name) for name in Inputs.__dataclass_fields__), plan=plan)
    wide = replace(
        inputs,
        query=inputs.query.double(),
        kv_cache=inputs.kv_cache.double(),
        relative=inputs.relative and RelativeTerm(inputs.relative.rows.double(), inputs.relative.profiles.double()),
    )
    expected = paged_attention_reference(*(getattr(wide, name) for name in Inputs.__dataclass_fields__))
    assert expected.isfinite().all()
    return float((output - expected).norm() / expected.norm())


CASES = {
    "decode": Case((0, 5, 70), (1, 1, 1)),
    "decode in splits": Case((130, 5, 70), (1, 1, 1), num_splits=4),
    "verify": Case((0, 61, 70), (3, 3, 3)),
    "verify in splits": Case((0, 61, 200), (3, 3, 3), num_splits=4),
    "dead rows": Case((0, 61, 7), (3, 3, 3), live=(3, 1, 0)),
    "dead rows in splits": Case((0, 161, 7), (3, 3, 3), live=(3, 1, 0), num_splits=2),
    "ragged": Case((0, 61, 9), (2, 1, 5), live=(2, 1, 4)),
    "chunks": Case((0, 61, 9), (70, 1, 5)),
    "one long chunk": Case((30,), (150,), live=(140,), heads=8),
    "window": Case((0, 61, 130), (3, 3, 3), window=20),
    "window in splits": Case((0, 61, 130), (3, 3, 3), window=100, num_splits=4),
    "window over chunks": Case((0, 100, 9), (70, 1, 5), window=33),
    "odd heads": Case((0, 61, 9), (2, 1, 5), heads=6, head_dim=20),
    "one head each": Case((3, 70), (3, 1), heads=2),
    "relative decode": Case((0, 90), (1, 1), extent=40),
    "relative verify": Case((0, 190), (3, 3), extent=70, has_log_scale=True),
    "relative in splits": Case((0, 190), (3, 3), extent=70, has_log_scale=True, num_splits=2),
    "relative window": Case((0, 190), (3, 3), extent=24, window=24),
    "relative in a tile of many rows": Case((0, 190), (9, 9), extent=70, heads=8, has_log_scale=True, num_splits=2),
    "relative chunks": Case((0, 100), (70, 1), extent=50, has_log_scale=True, heads=6),
    "relative window over chunks": Case((20, 100), (70, 1), extent=33, window=33, heads=6, d_rel=17),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    assert error(CASES[name]) < 1e-6


def test_few_tiles_of_many_rows_read_fewer_keys_at_a_time() -> None:
    assert [plan_tiles(n, n * 9, 9, 4, 8, 256).tile_keys for n in (1, 8, 16, 64)] == [32, 32, 64, 64]


def test_the_last_program_adds_up_where_that_was_faster() -> None:
    assert plan_tiles(1, 1, 1, 4, 8, 256).is_combined
    assert not plan_tiles(4, 4, 1, 4, 8, 256).is_combined and not plan_tiles(16, 16, 1, 4, 8, 256).is_combined
    assert plan_tiles(32, 32 * 3, 3, 4, 8, 256).is_combined
    assert plan_tiles(16, 16 * 9, 9, 4, 8, 256).is_combined
    assert plan_tiles(1, 3, 3, 4, 8, 256).is_combined
    assert not plan_tiles(1, 5, 5, 4, 8, 256).is_combined and not plan_tiles(1, 9, 9, 4, 8, 256).is_combined
    assert not plan_tiles(64, 64, 1, 4, 8, 256).is_combined, "one split has nothing to add up"


def test_splits_follow_from_what_the_host_knows() -> None:
    assert plan_tiles(1, 1, 1, 4, 8, 256).num_splits == 16
    assert plan_tiles(16, 16, 1, 4, 8, 256).num_splits == 4
    assert plan_tiles(16, 16 * 5, 5, 4, 8, 256).num_splits == 2
    assert plan_tiles(16, 16 * 9, 9, 4, 8, 256).num_splits == 2
    assert plan_tiles(64, 64 * 9, 9, 4, 8, 256).num_splits == 1
    assert plan_tiles(16, 16 * 9, 9, 4, 4, 256, is_relative=True).num_splits == 4
    assert plan_tiles(1, 4096, 4096, 4, 8, 256).num_splits == 1


@pytest.mark.parametrize("name", [name for name in CASES if "splits" in name])
def test_the_last_program_of_a_tile_adds_up_its_splits(name: str) -> None:
    inputs = draw(CASES[name])
    plan = replace(plan_of(CASES[name], 4), is_combined=True)
    arguments = [getattr(inputs, field) for field in Inputs.__dataclass_fields__]
    apart = paged_attention(*arguments, plan=replace(plan, is_combined=False))
    for _ in range(2):
        with poisoned_outputs():
            output = paged_attention(*arguments, plan=plan)
        assert torch.allclose(output, apart, rtol=1e-6, atol=1e-7)
        assert not inputs.batch.arrivals.any()


LARGE = {
    "8B decode": Case((1023, 5000, 17), (1, 1, 1), heads=32, kv_heads=8, head_dim=128, num_splits=None),
    "8B verify": Case((1023, 5000, 17), (9, 9, 9), (9, 1, 0), heads=32, kv_heads=8, head_dim=128, num_splits=None),
    "8B chunks": Case((0, 5000, 17), (1500, 1, 9), heads=32, kv_heads=8, head_dim=128, num_splits=None),
    "global verify": Case(
        (1023, 5000), (9, 9), heads=32, kv_heads=8, head_dim=128, extent=1024, d_rel=16, has_log_scale=True
    ),
    "local decode": Case((100, 5000), (1, 1), heads=64, kv_heads=16, head_dim=128, extent=512, window=512, d_rel=16),
    "local verify": Case((100, 5000), (9, 9), heads=64, kv_heads=16, head_dim=128, extent=512, window=512, d_rel=16),
    "local chunks": Case((0, 5000), (1500, 9), heads=32, kv_heads=8, head_dim=128, extent=512, window=512, d_rel=16),
    "global chunks": Case((0, 5000), (1500, 9), heads=64, kv_heads=8, head_dim=128, extent=1024, d_rel=16),
}


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_equals_the_reference_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    case = {**CASES, **LARGE}[name]
    # Biases are rounded before they are added, and these are large.
    narrow = 6e-3 if case.extent is None else 2e-2
    assert error(case, dtype, seed=torch.seed() % 1000) < (1e-5 if dtype == torch.float32 else narrow)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["8B decode", "8B verify"])
def test_the_last_program_always_sees_all_splits(name: str) -> None:
    inputs = draw(LARGE[name], torch.bfloat16)
    plan = replace(plan_of(LARGE[name], 2), is_combined=True)
    arguments = [getattr(inputs, field) for field in Inputs.__dataclass_fields__]
    expected = paged_attention(*arguments, plan=plan)
    graph = torch.cuda.CUDAGraph()
    num_wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with torch.cuda.graph(graph):
        for _ in range(20):
            output = paged_attention(*arguments, plan=plan)
            num_wrong += (output != expected).sum()
    for _ in range(500):
        graph.replay()
    assert not num_wrong
    assert not inputs.batch.arrivals.any()
