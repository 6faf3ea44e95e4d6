"""Random weights: the same code path as a checkpoint's, a model per name and shape, no file but config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specbench.engine.checkpoints.random_weights import fill_at_random
from specbench.engine.config import EngineConfig
from specbench.engine.execution.engine_memory import plan_engine_memory
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.models.registry import load_model_config, num_parameters, open_checkpoint
from specbench.generate import GenerateRequest, SamplingParams
from specbench.model_choice import SHAPES_FOLDER
from specbench.run_config import SHAPES
from tests.engine.tiny_inkling import TEXT_FIELDS

INKLING = {
    "architectures": ["InklingForConditionalGeneration"],
    "text_config": TEXT_FIELDS | {"num_hidden_layers": 3},
    "mtp_config": {"num_nextn_predict_layers": 3, "local_layer_ids": [0, 2]},
}


def engine_config(folder: Path, **changes: object) -> EngineConfig:
    values: dict = {
        "checkpoint": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": 64,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "block_size": 8,
        "num_blocks": None,
        "num_speculative_tokens": 0,
        "proposer": "none",
        "load": "random",
    }
    return EngineConfig(**(values | changes))


def generate(config: EngineConfig) -> list[int]:
    engine = LLMEngine(config)
    request = GenerateRequest("0", "0", SamplingParams(12, ignore_eos=True), prompt_token_ids=tuple(range(1, 20)))
    engine.add_request(request, 0.0)
    while engine.has_requests:
        finished, _ = engine.step()
    assert engine.memory.fixed_bytes["target_weights"] == engine.model.num_bytes
    return finished[0].output_token_ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(INKLING))
    return tmp_path


def test_two_engines_hold_the_same_random_model(folder: Path):
    plain = generate(engine_config(folder))
    assert plain == generate(engine_config(folder))
    assert len(set(plain)) > 1
    drafted = engine_config(folder, num_speculative_tokens=3, proposer="mtp_multi")
    assert generate(drafted) == plain


def test_weights_depend_on_the_name_and_keep_their_scale():
    first, second = (fill_at_random(torch.empty(64, 1024), name) for name in ("a.weight", "b.weight"))
    assert not torch.equal(first, second)
    assert torch.equal(first, fill_at_random(torch.empty(64, 1024), "a.weight"))
    assert first.std().item() == pytest.approx(1024**-0.5, rel=0.05)
    norm = fill_at_random(torch.empty(1024), "q_norm.weight")
    assert norm.mean().item() == pytest.approx(1, abs=0.05)


def test_experts_in_codes_are_drawn(folder: Path):
    """Those of the second sparse layer; kept and dequantised they are the same model."""
    text = INKLING["text_config"] | {"hidden_size": 128, "intermediate_size": 128}
    quantisation = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
    (folder / "config.json").write_text(json.dumps(INKLING | {"text_config": text} | quantisation))
    kept = open_checkpoint(folder, "random", "keep").tensors
    assert [name for name, entry in kept.items() if entry.is_kept] == [
        f"model.llm.layers.2.mlp.experts.{name}_weight" for name in ("w13", "w2")
    ]
    texts = [generate(engine_config(folder, quantised_weights=way)) for way in ("keep", "dequantise")]
    assert texts[0] == texts[1] and len(set(texts[0])) > 1


def test_random_weights_have_another_hash_than_any_checkpoint(folder: Path):
    first = open_checkpoint(folder, "random").sha256()
    (folder / "config.json").write_text(json.dumps(INKLING | {"eos_token_id": 3}))
    assert open_checkpoint(folder, "random").sha256() != first


#: Billions of parameters, modules included, and modules.
SIZES = {
    "qwen3_8b": (8.2, 0),
    "qwen3_8b_fp8": (8.2, 0),
    "mimo_7b": (7.8, 1),
    "inkling_8b": (8.0, 8),
    "inkling_nvfp4": (952.3, 8),
    "qwen3_30b_a3b": (30.5, 0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_their_size(name: str):
    billions, num_modules = SIZES[name]
    checkpoint = open_checkpoint(SHAPES_FOLDER / name, "random")
    assert num_parameters(checkpoint) / 1e9 == pytest.approx(billions, abs=0.05)
    assert load_model_config(checkpoint).num_modules == num_modules
    config = engine_config(SHAPES_FOLDER / name, dtype="bfloat16", device="cuda", max_model_len=2048)
    assert plan_engine_memory(config).fixed_bytes["target_weights"] > 0
