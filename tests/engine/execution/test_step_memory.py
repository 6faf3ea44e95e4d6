"""What the largest steps take is measured before the caches are sized, and the budget with it is what a run takes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from specbench.engine.execution.step_memory import StepMemory, measure_step_memory
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposer_table import PROPOSERS
from specbench.errors import UserError
from tests.engine.harness import engine_config, make_engine, outputs, run, token_request
from tests.engine.proposers.test_sharing import engine_of, recorded
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

MIB = 1 << 20


class CountedMemory:
    """In place of torch.cuda, where there is none: an allocator that nobody gives anything back to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_bytes = 0
        for name in ("synchronize", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, lambda *_: None)
        for name in ("memory_allocated", "max_memory_allocated"):
            monkeypatch.setattr(torch.cuda, name, self.count)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "memory_snapshot", list)

    def count(self, *_: object) -> int:
        self.num_bytes += 10 * MIB
        return self.num_bytes


@pytest.mark.parametrize("proposer", ["none", *PROPOSERS])
def test_the_largest_steps_of_every_proposer_run_on_one_block(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """They leave an engine that says what plain decoding says."""
    requests = [token_request(f"r{i}", prompt, 8) for i, prompt in enumerate(ragged_prompts(4, seed=3))]
    plain = outputs(make_engine(tiny_folder), requests)
    drafts = recorded(tmp_path / "drafts.jsonl", requests, plain)
    sizes = {"max_num_batched_tokens": 40, "max_model_len": 64, "cuda_graphs": True}
    k = 0 if proposer == "none" else 3
    engine = engine_of(proposer, tiny_folder, tiny_folder, drafts, k, max_num_seqs=3, **sizes)
    CountedMemory(monkeypatch)
    measured = measure_step_memory(
        engine.config, engine.model, engine.runner.proposer, engine.memory.specs, content_encoder=None
    )
    assert measured.activations == 10 * MIB and measured.graphs > 10 * MIB
    assert outputs(engine, requests) == plain


def test_what_steps_take_leaves_fewer_blocks(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config(tiny_folder, 2, max_num_seqs=2)
    logits = LLMEngine(config).memory.lines["logits"]
    fields = {"max_num_seqs": 2, "memory_limit": LLMEngine(config).memory.total_bytes + MIB, "device": "cpu"}
    alone = make_engine(tiny_folder, 2, **fields).memory
    assert "graphs" not in alone.lines
    plan = step_memory_plan(monkeypatch, tiny_folder, StepMemory(activations=logits + 5, graphs=MIB + 50_000), fields)
    assert plan.lines["activations"] == 5 and plan.lines["graphs"] == MIB + 50_000
    assert plan.num_full_blocks < alone.num_full_blocks and plan.total_bytes <= fields["memory_limit"]
    with pytest.raises(UserError, match=r"beside .*activations .*, graphs 100.0"):
        step_memory_plan(monkeypatch, tiny_folder, StepMemory(MIB, 100 * MIB), fields)


def step_memory_plan(monkeypatch: pytest.MonkeyPatch, folder: Path, measured: StepMemory, fields: dict):
    """The budget of an engine of whose steps so much was measured."""
    monkeypatch.setattr("specbench.engine.llm_engine.measures_steps", lambda device: True)
    monkeypatch.setattr("specbench.engine.llm_engine.measure_step_memory", lambda *_: measured)
    return make_engine(folder, 2, **fields).memory


@pytest.mark.parametrize("has_graphs", [False, pytest.param(True, id="graphs")])
@pytest.mark.parametrize(("proposer", "k"), [("none", 0), ("mtp_multi", 8), ("mtp_single", 3)])
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_budget_is_what_a_run_takes(tmp_path: Path, proposer: str, k: int, has_graphs: bool) -> None:
    """A vocabulary and widths at which logits and activations count; prompts as long as the context, full batches, and
    every parameter of sampling."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    folder = build_tiny_inkling(
        tmp_path / "wide", num_modules=8, vocab_size=32_768, unpadded_vocab_size=32_768, hidden_size=1024,
        dense_intermediate_size=4096,
    )  # fmt: skip
    engine = make_engine(
        folder, k, proposer=proposer, device="cuda", attention_backend="triton", dtype="bfloat16", block_size=16,
        cuda_graphs=has_graphs, pipeline_depth=1, max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=1024,
    )  # fmt: skip
    torch.cuda.reset_peak_memory_stats()
    asked = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "repetition_penalty": 1.1, "logprobs": 1}
    requests = [
        token_request(f"r{i}", [7 + i] * (1000 - 20 * i), 12, **(asked if i % 2 else {"temperature": float(i % 4 > 0)}))
        for i in range(40)
    ]
    run(engine, requests)
    planned = engine.memory.total_bytes
    held = torch.cuda.max_memory_allocated() - before[0]
    print(engine.memory.lines, planned, held, torch.cuda.memory_reserved() - before[1])
    assert held <= planned * 1.02 + 8 * MIB
    assert held >= planned * 0.85 - 64 * MIB
    assert torch.cuda.memory_reserved() - before[1] <= planned * 1.15 + 128 * MIB
