"""What FlashInfer is asked for, by a stand-in that does it in plain torch; and FlashInfer itself where it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench.engine.layers.attention_backends.backend import LayerAttention
from specbench.engine.layers.attention_backends.choose import choose_backend
from specbench.engine.layers.attention_backends.flashinfer_backend import FlashInferAttention
from specbench.engine.layers.metadata import PagedRows
from specbench.errors import UserError
from tests.engine.layers.test_attention_backends import hiddens
from tests.engine.tiny_decoders import build_tiny_decoder


class PlainWrapper:
    """BatchPrefillWithPagedKVCacheWrapper's contract, as its documentation gives it."""

    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert (layout, backend) == ("NHD", "fa2")

    def plan(self, *arguments: Any, **options: Any) -> None:
        self._indptr, self._page_indptr, self._pages, self._last, *self._shape = arguments
        self._options = options
        assert all(tensor.dtype == torch.int32 for tensor in arguments[:4]) and options["causal"]

    def run(self, query: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        num_heads, num_kv_heads, head_dim, size = self._shape
        assert query.shape[0] == self._indptr[-1] and query.shape[1:] == (num_heads, head_dim)
        output = torch.empty_like(query)
        for request, last in enumerate(self._last.tolist()):
            rows = slice(int(self._indptr[request]), int(self._indptr[request + 1]))
            pages = self._pages[int(self._page_indptr[request]) : int(self._page_indptr[request + 1])].long()
            num_keys = (len(pages) - 1) * size + last
            keys, values = (
                part[pages].flatten(0, 1)[:num_keys].repeat_interleave(num_heads // num_kv_heads, 1) for part in cache
            )
            scores = torch.einsum("rhd,khd->hrk", query[rows], keys) * self._options["sm_scale"]
            positions = num_keys - (rows.stop - rows.start) + torch.arange(rows.stop - rows.start)
            distance = positions[:, None] - torch.arange(num_keys)
            is_seen = distance >= 0
            if self._options["window_left"] >= 0:
                is_seen &= distance <= self._options["window_left"]
            weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
            output[rows] = torch.einsum("hrk,khd->rhd", weights, values)
        return output


@pytest.mark.parametrize("name", ["llama yarn in full", "qwen3 windows"])
def test_it_is_asked_for_what_plain_torch_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=PlainWrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)  # type: ignore[arg-type]
    folder = build_tiny_decoder(tmp_path, name)
    steps: list[tuple[list[int], list[int], list[int] | None]] = [
        ([0, 0], [40, 7], None),
        ([40, 7], [20, 1], None),
        ([60, 8], [3, 3], [3, 0]),
        ([63, 8], [3, 3], [2, 1]),
        ([65, 9], [1, 1], None),
    ]
    expected = hiddens(folder, "torch", steps, device="cpu")
    torch.testing.assert_close(hiddens(folder, "flashinfer", steps, device="cpu"), expected, rtol=1e-4, atol=1e-5)


def test_models_that_it_cannot_do_are_refused() -> None:
    with pytest.raises(UserError, match=r"attention_backend: flashinfer .*; say triton or torch, or auto"):
        choose_backend("flashinfer", "cuda", "bfloat16", {"relative_bias"})
    with pytest.raises(UserError, match="flashinfer does not run on cpu"):
        choose_backend("flashinfer", "cpu", "float32", ())


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None, reason="needs it and a GPU"
)
@pytest.mark.parametrize("window", [None, 50])
def test_flashinfer_itself(window: int | None) -> None:
    """Slow, for it compiles its kernels on first use."""
    from specbench.engine.kernels.paged_attention import PagedBatch, paged_attention_reference

    query = torch.randn(12, 32, 128, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(16 * 40 + 1, 2, 8, 128, device="cuda", dtype=torch.bfloat16)
    table = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(39) + 1]).view(2, 20).int().cuda()
    table[1, 1:] = torch.arange(1, 20)
    starts = torch.tensor([0, 3, 12], dtype=torch.int32, device="cuda")
    first, live = torch.tensor([200, 60], device="cuda"), torch.tensor([2, 9], device="cuda")
    paged = PagedRows(2, 9, starts, first, live, {"kv": table}, 16)
    attention = FlashInferAttention().start(SimpleNamespace(paged=paged))  # type: ignore[arg-type]
    output = attention.attend(LayerAttention("kv", 32, 8, 128, 0.1, window), query, cache)
    batch = PagedBatch(starts, first, live, table, 16, 9)
    expected = paged_attention_reference(query.double(), cache.double(), batch, 0.1, window).flatten(1)
    assert float((output.double() - expected).norm() / expected.norm()) < 1e-2
