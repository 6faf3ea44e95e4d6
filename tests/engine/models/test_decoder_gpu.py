"""Plain decoders on a CUDA device: the CPU's logits, and no wait for the device while decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.engine.models.test_inkling import random_ids
from tests.engine.paged_sequences import PagedSequences, load_target
from tests.engine.tiny_decoders import build_tiny_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ["llama yarn in full", "qwen3 windows", "moe among dense layers"]


@torch.inference_mode()
def logits_of(folder: Path, device: str, dtype: torch.dtype, sizes: list[int]) -> torch.Tensor:
    target, ids = load_target(folder, dtype, device), random_ids(sum(sizes))
    sequences = PagedSequences(target, 1, 256, 16, device=device)
    outputs, first = [], 0
    for size in sizes:
        metadata = sequences.metadata([0], [first], [size])
        token_ids = torch.tensor(ids[first : first + size], device=device)
        hidden = target.forward(target.embed(token_ids), metadata, sequences.caches).hidden_states
        outputs.append(target.compute_logits(hidden))
        first += size
    return torch.cat(outputs).cpu()


@pytest.mark.parametrize("sizes", [[200], [20, 1, 5, 174]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fp32_equals_the_cpu(name: str, sizes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    folder = build_tiny_decoder(tmp_path, name)
    expected = logits_of(folder, "cpu", torch.float32, [200])
    torch.testing.assert_close(logits_of(folder, "cuda", torch.float32, sizes), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bf16_stays_near(name: str, tmp_path: Path) -> None:
    folder = build_tiny_decoder(tmp_path, name)
    expected = logits_of(folder, "cpu", torch.float32, [60])
    logits = logits_of(folder, "cuda", torch.bfloat16, [20, 1, 39])
    # Where two experts weigh nearly the same, rounding may choose the other one.
    assert torch.nn.functional.cosine_similarity(logits, expected).median() > 0.99


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("name", NAMES)
def test_a_decode_step_never_waits_for_the_device(name: str, num_rows: int, dtype: torch.dtype, tmp_path: Path) -> None:
    num_reqs = 12
    target = load_target(build_tiny_decoder(tmp_path, name), dtype, device="cuda")
    sequences = PagedSequences(target, num_reqs, 128, 16, device="cuda")
    layout = sequences.layout([40] * num_reqs, [num_rows] * num_reqs)
    token_ids = torch.arange(num_reqs * num_rows, device="cuda")

    def step() -> torch.Tensor:
        metadata = sequences.builder.build(sequences.tables, layout)
        hidden = target.forward(target.embed(token_ids), metadata, sequences.caches).hidden_states
        return target.compute_logits(hidden)

    with torch.inference_mode():
        step()  # constants are made and kept here
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()
