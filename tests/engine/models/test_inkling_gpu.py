"""The model on a CUDA device: the oracle's values, experts both ways, and no wait for the device while decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.layers.moe import MixtureOfExperts
from tests.engine.models.test_inkling import random_ids
from tests.engine.oracle import Oracle
from tests.engine.paged_sequences import PagedSequences, load_modules, load_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("sizes", [[200], [20, 1, 5, 174]], ids=str)
def test_fp32_equals_the_oracle(tiny_folder: Path, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    target, ids = load_target(tiny_folder, device="cuda"), random_ids(200)
    sequences = PagedSequences(target, 1, 256, 16, device="cuda")
    outputs, first = [], 0
    with torch.inference_mode():
        for size in sizes:
            metadata = sequences.metadata([0], [first], [size])
            token_ids = torch.tensor(ids[first : first + size], device="cuda")
            outputs.append(target.forward(target.embed(token_ids), metadata, sequences.caches).hidden_states)
            first += size
    expected = Oracle(tiny_folder).target_hidden_and_logits(ids)[0]
    torch.testing.assert_close(torch.cat(outputs).cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_equals_dense(tiny_folder: Path, dtype: torch.dtype) -> None:
    target = load_target(tiny_folder, dtype, device="cuda")
    experts = target._blocks[-1]._mlp
    assert isinstance(experts, MixtureOfExperts)
    x = torch.randn(77, 64, device="cuda", dtype=dtype)
    chosen, weights = experts._router(x)
    (stack,) = experts._stacks
    grouped, dense = stack.grouped(x, chosen, weights), stack.dense(x, chosen, weights)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(grouped, dense, rtol=tolerance, atol=tolerance * float(dense.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_live"), [(1, None), (9, 4)])
def test_a_decode_step_never_waits_for_the_device(
    tiny_folder: Path, dtype: torch.dtype, num_rows: int, num_live: int | None
) -> None:
    num_reqs = 12
    target = load_target(tiny_folder, dtype, device="cuda")
    modules = load_modules(tiny_folder, target, 3)
    sequences = PagedSequences(target, num_reqs, 128, 16, device="cuda")
    drafting = PagedSequences(modules, num_reqs, 128, 16, device="cuda")
    live = None if num_live is None else [num_live] * num_reqs
    layout = sequences.layout([40] * num_reqs, [num_rows] * num_reqs, live)
    token_ids = torch.arange(num_reqs * num_rows, device="cuda")

    def step() -> torch.Tensor:
        metadata = sequences.builder.build(sequences.tables, layout)
        embeds = target.embed(token_ids)
        hidden = target.forward(embeds, metadata, sequences.caches).hidden_states
        draft_metadata = drafting.builder.build(drafting.tables, layout)
        for module in range(3):
            hidden = modules.forward_module(module, embeds, hidden, draft_metadata, drafting.caches)
        return modules.compute_logits(hidden)

    with torch.inference_mode():
        step()  # constants are made and kept here
        torch.cuda.set_sync_debug_mode("error")
        try:
            logits = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert logits.isfinite().all()
