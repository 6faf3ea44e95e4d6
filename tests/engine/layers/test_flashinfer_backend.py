"""What FlashInfer is asked for, by a kernel in plain torch that does the same; and FlashInfer itself where it is."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench.engine.kernels.paged_attention import paged_attention_reference
from specbench.engine.kernels.step_rows import PagedBatch
from specbench.engine.layers.attention_backends import flashinfer_backend
from specbench.engine.layers.attention_backends.backend import LayerAttention
from specbench.engine.layers.attention_backends.choose import choose_backend
from specbench.engine.layers.attention_backends.flashinfer_backend import FlashInferAttention
from specbench.engine.layers.metadata import AttentionMetadata, HostRows, PagedRows
from specbench.errors import UserError
from tests.engine.harness import make_engine, outputs, token_request
from tests.engine.layers.test_attention_backends import hiddens
from tests.engine.tiny_decoders import build_tiny_decoder

NEEDS_FLASHINFER = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None, reason="needs it and a GPU"
    ),
]


class PlainKernel:
    """The compiled module's `plan` and `paged_run`, with the variant's rule of what a row sees."""

    def plan(self, workspace: Tensor, tables: Tensor, staging: Tensor, *arguments: Any) -> tuple[int, list[int]]:
        rows, pages, num_keys, num_rows, num_reqs, num_heads, num_kv_heads, size, *rest = arguments
        assert all(tensor.dtype == torch.int32 and tensor.device.type == "cpu" for tensor in (rows, pages, num_keys))
        assert len(rows) == len(pages) == num_reqs + 1 and num_rows == rows[-1] and num_heads % num_kv_heads == 0
        assert (num_keys >= rows.diff()).all() and (pages.diff() == -(-num_keys // size)).all()
        assert rest[3:] == [True, -1, -1, False, 0] and len(staging) == len(tables)
        return num_rows, num_keys.tolist()

    def paged_run(
        self, workspace: Tensor, tables: Tensor, layout: tuple[int, list[int]], query: Tensor, keys: Tensor,
        values: Tensor, row_starts: Tensor, page_starts: Tensor, pages: Tensor, last_page: Tensor, output: Tensor,
        *arguments: Any,
    ) -> None:  # fmt: skip
        sums, mask_mode, order, window_left, _, first_position, scale, window = arguments
        assert (sums, mask_mode, order, window_left) == (None, 1, 0, -1) and len(query) == layout[0]
        size, group = keys.shape[1], query.shape[1] // keys.shape[2]
        for request, (last, bound) in enumerate(zip(last_page.tolist(), layout[1], strict=True)):
            rows = slice(int(row_starts[request]), int(row_starts[request + 1]))
            own = pages[int(page_starts[request]) : int(page_starts[request + 1])].long()
            assert (len(own) - 1) * size + last == bound, "the device's lengths are those of the plan"
            key, value = (part[own].flatten(0, 1)[:bound].repeat_interleave(group, 1) for part in (keys, values))
            scores = torch.einsum("rhd,khd->hrk", query[rows], key) * scale
            offsets, key_position = torch.arange(rows.stop - rows.start)[:, None], torch.arange(bound)
            distance = first_position[request] + offsets - key_position
            is_seen = (distance >= 0) & ((distance < window) if window else True)
            is_seen &= key_position <= bound - len(offsets) + offsets
            weights = scores.masked_fill(~is_seen, -5e4).softmax(-1)
            output[rows] = torch.einsum("hrk,khd->rhd", weights, value)


@pytest.fixture
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend, "_kernel", lambda head_dim, dtype: PlainKernel())


STEPS: list[tuple[list[int], list[int], list[int] | None]] = [
    ([0, 0], [40, 7], None),
    ([40, 7], [20, 1], None),
    ([60, 8], [3, 3], [3, 0]),
    ([63, 8], [3, 3], [2, 1]),
    ([65, 9], [1, 1], None),
]


@pytest.mark.usefixtures("plain_kernel")
@pytest.mark.parametrize("name", ["llama yarn in full", "qwen3 windows"])
def test_it_is_asked_for_what_plain_torch_does(name: str, tmp_path: Path) -> None:
    folder = build_tiny_decoder(tmp_path, name)
    expected = hiddens(folder, "torch", STEPS, device="cpu")
    torch.testing.assert_close(hiddens(folder, "flashinfer", STEPS, device="cpu"), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("plain_kernel")
@pytest.mark.parametrize("cuda_graphs", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("proposer", ["none", "ngram", "draft_model"])
def test_texts_are_those_of_plain_torch(proposer: str, depth: int, cuda_graphs: bool, tmp_path: Path) -> None:
    """With steps that overlap the host knows bounds of lengths alone; recorded steps are padded, and planned before
    each replay. Prompts come in chunks, and blocks run out."""
    folder = build_tiny_decoder(tmp_path / "target", "qwen3 windows")
    draft = build_tiny_decoder(tmp_path / "draft", "qwen3 upper windows")
    rng = random.Random(1)
    requests = [
        token_request(f"r{index}", [rng.randrange(9) for _ in range(rng.randint(3, 30))], 20) for index in range(6)
    ]
    settings = {"max_num_batched_tokens": 20, "max_num_seqs": 5, "max_model_len": 60, "num_blocks": 30}
    fields = {"proposer": proposer, "draft_checkpoint": str(draft), "ngram_min": 1, "pipeline_depth": depth}
    engine = make_engine(
        folder,
        0 if proposer == "none" else 3,
        attention_backend="flashinfer",
        cuda_graphs=cuda_graphs,
        **settings,
        **fields,
    )
    assert outputs(engine, requests) == outputs(make_engine(folder), requests)


def test_models_that_it_cannot_do_are_refused() -> None:
    with pytest.raises(UserError, match=r"attention_backend: flashinfer .*; say triton or torch, or auto"):
        choose_backend("flashinfer", "cuda", "bfloat16", {"relative_bias"})
    with pytest.raises(UserError, match="flashinfer does not run on cpu"):
        choose_backend("flashinfer", "cpu", "float32", ())


def test_a_compiler_that_is_missing_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def build_and_load() -> None:
        raise RuntimeError("Could not find nvcc\nand more")

    names = ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention")
    made = SimpleNamespace(gen_customize_batch_prefill_module=lambda *_: SimpleNamespace(build_and_load=build_and_load))
    for name in names:
        monkeypatch.setitem(sys.modules, name, made)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"cannot compile its kernels \(Could not find nvcc\): .* say triton"):
        flashinfer_backend._kernel(128, torch.bfloat16)


def metadata_of(paged: PagedRows) -> AttentionMetadata:
    return AttentionMetadata(0, 0, paged.first_position, {}, {}, paged, ())


def random_rows(first: list[int], slack: int, num_rows: int, device: str) -> PagedRows:
    """Requests of `num_rows` rows at these positions, bounds so much too high, the last row dead."""
    count = len(first)
    table = torch.zeros(count, 65, dtype=torch.int32)
    table[:, 1:] = torch.randperm(64 * count).view(count, 64) + 1
    starts = torch.arange(0, count * num_rows + 1, num_rows, dtype=torch.int32, device=device)
    live = torch.full((count,), max(num_rows - 1, 1), device=device)
    host = HostRows(tuple(starts.tolist()), [one + num_rows + slack for one in first])
    return PagedRows(
        count, num_rows, starts, torch.tensor(first, device=device), live, {"kv": table.to(device)}, 16, host
    )


def relative_error(output: Tensor, query: Tensor, cache: Tensor, paged: PagedRows, window: int | None) -> float:
    """Of live rows, against fp64."""
    batch = PagedBatch(
        paged.query_start_loc, paged.first_position, paged.num_live, paged.block_tables["kv"], 16, paged.max_rows
    )
    expected = paged_attention_reference(query.double(), cache.double(), batch, 0.1, window).view(*query.shape)
    is_live = torch.arange(len(query), device=query.device) % paged.max_rows < paged.num_live[0]
    wrong = (output.view(*query.shape).double() - expected)[is_live]
    return float(wrong.norm() / expected[is_live].norm())


CASES = [([200, 60, 0], 0, 9), ([900, 17, 333], 9, 9), ([700], 100, 9), ([31, 500, 4, 90], 5, 1), ([0, 300], 3, 300)]


def check_cases(device: str, dtype: torch.dtype, window: int | None, num_heads: int, tolerance: float) -> None:
    for first, slack, num_rows in CASES:
        paged = random_rows(first, slack, num_rows, device)
        query = torch.randn(len(first) * num_rows, num_heads, 128, device=device, dtype=dtype)
        cache = torch.randn(16 * (64 * len(first) + 1) + 1, 2, num_heads // 4, 128, device=device, dtype=dtype)
        layer = LayerAttention("kv", num_heads, num_heads // 4, 128, 0.1, window)
        output = FlashInferAttention().start(metadata_of(paged)).attend(layer, query, cache)
        assert relative_error(output, query, cache, paged, window) < tolerance, (first, slack, num_rows)


@pytest.mark.usefixtures("plain_kernel")
@pytest.mark.parametrize("window", [None, 50])
def test_bounds_may_be_too_high(window: int | None) -> None:
    check_cases("cpu", torch.float32, window, 4, 1e-5)


def check_replays(device: str, dtype: torch.dtype, tolerance: float) -> None:
    """One recorded function for lengths that differ from call to call, those of its second pass 4 longer."""
    num_rows, shape = 3, (3, 65)
    first = torch.zeros(3, dtype=torch.int64, device=device)
    starts = torch.arange(0, 10, num_rows, dtype=torch.int32, device=device)
    table, live = torch.zeros(shape, dtype=torch.int32, device=device), torch.full((3,), num_rows, device=device)
    query = torch.randn(9, 8, 128, device=device, dtype=dtype)
    cache = torch.randn(16 * 193 + 1, 2, 2, 128, device=device, dtype=dtype)
    layer, backend = LayerAttention("kv", 8, 2, 128, 0.1, None), FlashInferAttention()
    plans = backend.replay_plans(1000)

    def passes() -> list[tuple[Tensor, PagedRows]]:
        results = []
        with plans.calls():
            for behind in (0, 4):
                host = HostRows((0, 3, 6, 9), [1000 + behind] * 3)
                paged = PagedRows(3, num_rows, starts, first + behind, live, {"kv": table}, 16, host)
                results.append((backend.start(metadata_of(paged)).attend(layer, query, cache), paged))
        return results

    results, graph = passes(), None
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = passes()
    for lengths in ([0, 400, 900], [5, 1, 0], [990, 3, 500]):
        first.copy_(torch.tensor(lengths))
        table[:, 1:] = torch.randperm(192, device=device).view(3, 64).int() + 1
        plans.make(HostRows((), [one + num_rows + 2 for one in lengths]))
        if graph is None:
            results = passes()
        else:
            graph.replay()
        for output, paged in results:
            assert relative_error(output, query, cache, paged, None) < tolerance, lengths


@pytest.mark.usefixtures("plain_kernel")
def test_a_recorded_function_serves_all_lengths() -> None:
    check_replays("cpu", torch.float32, 1e-5)


@pytest.mark.parametrize("window", [pytest.param(window, marks=NEEDS_FLASHINFER) for window in (None, 50)])
def test_flashinfer_itself(window: int | None) -> None:
    """Slow, for it compiles its kernels on first use."""
    check_cases("cuda", torch.bfloat16, window, 32, 1e-2)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_FLASHINFER)])
def test_flashinfer_in_a_graph(device: str) -> None:
    check_replays(device, torch.bfloat16, 1e-2)
