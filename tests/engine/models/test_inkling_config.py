"""Both spellings of config.json give the same config; what cannot be run is refused by file and key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench.engine.checkpoints.checkpoint import Checkpoint, TensorEntry
from specbench.engine.content.content_tokens import ContentTokens
from specbench.engine.models.inkling_config import InklingConfig, content_tokens, expected_tensors
from specbench.engine.models.registry import load_model_config, open_checkpoint
from specbench.errors import UserError
from tests.engine.tiny_inkling import TEXT_FIELDS

RAW = {
    "architectures": ["InklingForConditionalGeneration"],
    "eos_token_id": 7,
    "text_config": TEXT_FIELDS,
    "mtp_config": {"num_nextn_predict_layers": 3, "local_layer_ids": [0, 2], "chain_hidden_post_norm": False},
}


def parse(
    config: dict[str, Any], generation_config: dict[str, Any] | None = None, folder: Path = Path()
) -> InklingConfig:
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return load_model_config(Checkpoint(folder, config, {}, ()))


def transformers_spelling() -> dict[str, Any]:
    text = dict(TEXT_FIELDS)
    for raw in ("dense_mlp_idx", "local_layer_ids", "dense_intermediate_size", "sconv_kernel_size", "model_max_length"):
        text.pop(raw)
    text |= {
        "layer_types": ["hybrid_sliding"] * 5 + ["hybrid"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 5,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "conv_kernel_size": 4,
        "max_position_embeddings": 512,
        "num_mtp_layers": 3,
        "mtp_local_layer_ids": [0, 2],
    }
    return {key: value for key, value in RAW.items() if key != "mtp_config"} | {"text_config": text}


def test_both_spellings_agree() -> None:
    config = parse(RAW)
    assert config == parse(transformers_spelling())
    assert (config.dense_width, config.expert_width) == (128, 32)
    assert (config.num_layers, config.num_modules, config.max_model_len) == (6, 3, 512)
    assert (config.vocab_size, config.padded_vocab_size, config.eos_token_ids) == (250, 256, (7,))
    assert config.local_layers == (True,) * 5 + (False,)
    assert config.sparse_layers == (False,) + (True,) * 5
    assert config.local_modules == (True, False, True)
    assert config.local_attention.window == config.local_attention.extent == 8
    assert (config.global_attention.window, config.global_attention.extent) == (None, 16)


def test_all_modules_global_is_not_a_missing_list() -> None:
    text = transformers_spelling()["text_config"] | {"mtp_local_layer_ids": []}
    assert parse(RAW | {"text_config": text}).local_modules == (False,) * 3


def test_no_modules() -> None:
    assert parse({key: value for key, value in RAW.items() if key != "mtp_config"}).num_modules == 0


def test_every_sixth_layer_is_global_where_nothing_is_said() -> None:
    text = {key: value for key, value in TEXT_FIELDS.items() if key != "local_layer_ids"} | {"num_hidden_layers": 12}
    assert [i for i, is_local in enumerate(parse(RAW | {"text_config": text}).local_layers) if not is_local] == [5, 11]


def test_eos_comes_from_the_config_before_the_generation_config(tmp_path: Path) -> None:
    without = {key: value for key, value in RAW.items() if key != "eos_token_id"}
    assert parse(without, folder=tmp_path).eos_token_ids == ()
    assert parse(without, {"eos_token_id": [3, 4]}, tmp_path).eos_token_ids == (3, 4)
    assert parse(RAW, {"eos_token_id": 2}, tmp_path).eos_token_ids == (7,)


def test_an_unknown_architecture_is_told_what_there_is() -> None:
    with pytest.raises(UserError, match="'InklingForCausalLM' is not implemented, only InklingForCond"):
        parse(RAW | {"architectures": ["InklingForCausalLM"]})
    with pytest.raises(UserError, match="key architectures: expected a list of one name"):
        parse({key: value for key, value in RAW.items() if key != "architectures"})


@pytest.mark.parametrize("key", ["hidden_size", "d_rel", "model_max_length", "swa_head_dim", "route_scale"])
def test_a_missing_field_is_named(key: str) -> None:
    text = {name: value for name, value in TEXT_FIELDS.items() if name != key}
    with pytest.raises(UserError, match=f"config.json: key text_config.{key}: missing"):
        parse(RAW | {"text_config": text})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("intermediate_size", 36),
        ("use_sconv", False),
        ("final_logit_softcapping", 30.0),
        ("mtp_hidden_states_first", False),
        ("layer_types", ["hybrid"]),
        ("mlp_layer_types", ["odd"] * 6),
    ],
)
def test_a_wrong_field_is_named(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"config.json: key text_config.{key}: "):
        parse(RAW | {"text_config": TEXT_FIELDS | {key: value}})


def test_no_text_config() -> None:
    with pytest.raises(UserError, match="key text_config: missing"):
        parse({"architectures": RAW["architectures"]})


def towers(*names: str) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, Path("x.safetensors"), "F32", (1,)) for name in names}


def parse_with(tensors: dict[str, TensorEntry], **fields: Any) -> InklingConfig:
    return load_model_config(Checkpoint(Path(), RAW | fields, tensors, ()))


AUDIO_CONFIG = {"n_mel_bins": 80, "mel_vocab_size": 16}
VISION_CONFIG = {"patch_size": 40, "temporal_patch_size": 2, "n_layers": 4}


def test_towers_are_those_whose_tensors_are_there() -> None:
    described = {"audio_config": AUDIO_CONFIG, "vision_config": VISION_CONFIG, "audio_bos_token_id": 9}
    text_only = parse_with({}, **described)
    assert text_only.audio is None and text_only.image is None and content_tokens(text_only) == {}
    hearing = parse_with(towers("model.audio.encoder.weight"), **described)
    assert hearing.image is None and content_tokens(hearing) == {"audio": ContentTokens(9, 200053)}
    seeing = parse_with(towers("model.visual.final_norm.weight"), **described)
    assert content_tokens(seeing) == {"image": ContentTokens(200005, 200054)}
    shapes = expected_tensors(seeing, 0).required
    assert shapes["model.visual.layers.linear_0.weight"] == (128, 75)
    assert shapes["model.visual.layers.norm_2.weight"] == (4800,)
    assert shapes["model.visual.layers.linear_3.weight"] == (64, 9600)
    assert expected_tensors(hearing, 0).required["model.audio.encoder.weight"] == (1280, 64)


def test_a_tower_of_other_bins_is_loaded_and_takes_no_clips() -> None:
    other = parse_with(towers("model.audio.encoder.weight"), audio_config={"n_mel_bins": 80, "mel_vocab_size": 256})
    assert other.audio is not None and content_tokens(other) == {}


def test_tensors_of_a_tower_that_the_config_does_not_describe() -> None:
    with pytest.raises(UserError, match=r"key audio_config: missing, and the checkpoint holds tensors of that tower"):
        parse_with(towers("model.audio.encoder.weight"))
    with pytest.raises(UserError, match=r"key audio_config.mel_vocab_size: missing"):
        parse_with(towers("model.audio.encoder.weight"), audio_config={"n_mel_bins": 80})
    with pytest.raises(UserError, match=r"key audio_token_id: expected a whole number"):
        parse(RAW | {"audio_token_id": 1.5})


def test_random_weights_have_the_towers_that_the_config_describes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RAW | {"audio_config": AUDIO_CONFIG}))
    checkpoint = open_checkpoint(tmp_path, "random")
    config = load_model_config(checkpoint)
    assert isinstance(config, InklingConfig) and set(content_tokens(config)) == {"audio"}
    assert "model.audio.encoder.weight" in checkpoint.tensors
