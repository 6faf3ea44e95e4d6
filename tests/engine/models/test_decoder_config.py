"""Llama's and Qwen3's config.json: defaults, spellings, and what is said of fields that cannot work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.layers.rotary_config import Llama3Scaling, YarnScaling
from specbench.engine.models.decoder_config import DecoderConfig
from specbench.engine.models.registry import (
    check_checkpoint,
    load_model_config,
    num_parameters,
    target_cache_groups,
    target_weight_bytes,
)
from specbench.errors import UserError
from tests.engine.paged_sequences import load_target
from tests.engine.tiny_decoders import build_tiny_decoder

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 16}
MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def parse(config: dict[str, Any], folder: Path = Path()) -> DecoderConfig:
    parsed = load_model_config(Checkpoint(folder, config, {}, ()))
    assert isinstance(parsed, DecoderConfig)
    return parsed


def test_what_a_short_llama_config_means() -> None:
    config = parse(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.rotary.theta, config.rotary.scaling) == (4, 16, 10_000.0, None)
    assert not (config.is_tied or config.has_attention_bias or config.has_mlp_bias or config.has_head_norm)
    assert (config.num_modules, config.max_model_len, config.eos_token_ids) == (0, 512, ())


@pytest.mark.parametrize(
    ("fields", "windowed"),
    [
        ({}, (False, False)),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, (False, False)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (False, True)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (True, False),
        ),
    ],
)
def test_windows_of_qwen3(fields: dict[str, Any], windowed: tuple[bool, ...]) -> None:
    assert parse(QWEN3 | fields).windowed_layers == windowed
    groups = target_cache_groups(Checkpoint(Path(), QWEN3 | fields, {}, ()), "bfloat16")
    assert {(group.window, len(group.layers)) for group in groups} == (
        {(None, 2)} if windowed == (False, False) else {(None, 1), (8, 1)}
    )


def test_layers_with_experts() -> None:
    config = parse(MOE | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert [experts is not None for experts in config.experts] == [False, True, False, False, False]


def test_scaled_rotary_fields_and_the_context_that_they_make() -> None:
    config = parse(QWEN3 | {"rope_theta": 1e6, "rope_scaling": YARN})
    assert config.rotary.theta == 1e6
    assert isinstance(config.rotary.scaling, YarnScaling)
    assert config.max_model_len == 2048
    llama3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = parse(LLAMA | {"rope_scaling": llama3})
    assert config.rotary.scaling == Llama3Scaling(8.0, 1.0, 4.0, 512)
    assert config.max_model_len == 512


def test_where_the_ids_that_end_a_text_come_from(tmp_path: Path) -> None:
    assert parse(LLAMA | {"eos_token_id": 2}, tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text("{}")
    assert parse(LLAMA | {"eos_token_id": 2}, tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert parse(LLAMA | {"eos_token_id": 2}, tmp_path).eos_token_ids == (5, 7)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError, match=r"generation_config\.json: key eos_token_id: expected an id or a list"):
        parse(LLAMA, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not implemented, only InklingFor"),
        (LLAMA | {"vocab_size": None}, "key vocab_size: missing (spellings known: vocab_size); add it"),
        (LLAMA | {"hidden_size": "64"}, "key hidden_size: expected a positive number, found '64'"),
        (LLAMA | {"num_hidden_layers": 1.5}, "key num_hidden_layers: expected a whole number, found 1.5"),
        (LLAMA | {"hidden_act": "gelu"}, "key hidden_act: 'gelu' is not implemented, only 'silu'"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, "weights quantised by gptq are not implemented"),
        (LLAMA | {"num_key_value_heads": 3}, "key num_key_value_heads: 3 does not divide 4 heads"),
        (LLAMA | {"head_dim": 15}, "key head_dim: 15 is odd"),
        (LLAMA | {"attention_bias": "yes"}, "key attention_bias: expected true or false, found 'yes'"),
        (LLAMA | {"rope_theta": "1e4"}, "key rope_theta: expected a positive number, found '1e4'"),
        (LLAMA | {"rope_scaling": YARN | {"beta_fast": "x"}}, "key rope_scaling.beta_fast: expected a positive number"),
        (LLAMA | {"rope_scaling": [1]}, "key rope_scaling: expected an object, found [1]"),
        (LLAMA | {"rope_scaling": {"type": "longrope"}}, "key rope_scaling.rope_type: 'longrope' is not implemented"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "key rope_scaling.factor: missing"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "key partial_rotary_factor: 0.5 is not implemented"),
        (QWEN3 | {"layer_types": ["full_attention"]}, "key layer_types: expected 2 of"),
        (QWEN3 | {"use_sliding_window": True}, "key max_window_layers: missing"),
        (QWEN3 | {"use_sliding_window": True, "max_window_layers": 0}, "key sliding_window: missing"),
        (MOE | {"num_experts_per_tok": 9}, "key num_experts_per_tok: is more than the 8 experts"),
        (MOE | {"moe_intermediate_size": 30}, "key moe_intermediate_size: 30 is not a multiple of 8"),
    ],
)
def test_fields_that_cannot_work(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        parse(config)
    assert "config.json" in str(raised.value) and "\n" not in str(raised.value)


def checked(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    check_checkpoint(checkpoint, load_model_config(checkpoint), 0)


def test_tensors_that_may_be_there_and_tensors_that_may_not(tmp_path: Path) -> None:
    """A tied head and rotary frequencies may be stored; a bias that config.json does not declare is a mistake."""
    folder = build_tiny_decoder(tmp_path, "llama tied")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    extra = {"lm_head.weight": torch.zeros(256, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    whole = num_parameters(Checkpoint.open(folder))
    assert whole == sum(tensor.numel() for tensor in tensors.values())
    save_file(tensors | extra, file)
    checked(folder)
    assert num_parameters(Checkpoint.open(folder)) == whole
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, file)
    with pytest.raises(UserError, match=r"tensor model\.layers\.0\.self_attn\.q_proj\.bias \[64\] is unknown"):
        checked(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"tensor lm_head\.weight \[256, 64\] is missing"):
        checked(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama tied", "llama biases", "moe among dense layers"])
def test_predicted_bytes_are_those_that_are_held(name: str, dtype: str, tmp_path: Path) -> None:
    folder = build_tiny_decoder(tmp_path, name)
    target = load_target(folder, getattr(torch, dtype))
    assert target_weight_bytes(Checkpoint.open(folder), dtype, "cpu") == target.num_bytes
