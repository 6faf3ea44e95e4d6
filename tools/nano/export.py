"""Writes a trained model as a checkpoint folder in Inkling's raw layout, and reads it back.

Every value is rounded once, to bf16, except the router's bias and scale, which the layout keeps in fp32.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from tools.nano import tokenizer as special
from tools.nano.model import NanoConfig, NanoModel

FP32_LEAVES = ("gate.bias", "gate.global_scale")


def raw_config(config: NanoConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """config.json with the raw checkpoint's field names."""
    text = {
        "model_type": "inkling_text",
        "vocab_size": config.vocab_size,
        "unpadded_vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "swa_num_attention_heads": config.num_heads,
        "swa_num_key_value_heads": config.local_num_kv_heads,
        "swa_head_dim": config.head_dim,
        "sliding_window_size": config.window,
        "local_layer_ids": list(config.local_layers),
        "d_rel": config.d_rel,
        "rel_extent": config.rel_extent,
        "log_scaling_n_floor": 128000,
        "log_scaling_alpha": 0.1,
        "rms_norm_eps": config.norm_eps,
        "sconv_kernel_size": config.conv_kernel,
        "dense_mlp_idx": config.num_dense_layers,
        "dense_intermediate_size": config.dense_width,
        "intermediate_size": config.expert_width,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.num_active_experts,
        "n_shared_experts": config.num_shared_experts,
        "route_scale": config.route_scale,
        "logits_mup_width_multiplier": config.logits_divisor,
        "model_max_length": special.MODEL_MAX_LENGTH,
        "use_embed_norm": True,
        "use_sconv": True,
        "use_gate_bias": True,
        "use_global_scale": True,
        "norm_after_topk": True,
        "shared_expert_sink": True,
        "gate_activation": "sigmoid",
        "hidden_act": "silu",
        "q_bias": False,
        "o_bias": False,
        "final_logit_softcapping": None,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id(special.END_SAMPLING),
        "pad_token_id": tokenizer.token_to_id(special.END_OF_TEXT),
    }
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "dtype": "bfloat16",
        "inference_moe_w13_interleaved": True,
        "eos_token_id": tokenizer.token_to_id(special.END_SAMPLING),
        "pad_token_id": tokenizer.token_to_id(special.END_OF_TEXT),
        "image_token_id": tokenizer.token_to_id(special.IMAGE_PLACEHOLDER),
        "audio_token_id": tokenizer.token_to_id(special.AUDIO_PLACEHOLDER),
        "image_bos_token_id": tokenizer.token_to_id(special.IMAGE_MARK),
        "audio_bos_token_id": tokenizer.token_to_id(special.AUDIO_MARK),
        "text_config": text,
        # There is no vision tower in the checkpoint; loaders that build one all the same should build a small one.
        "vision_config": {"patch_size": 8, "temporal_patch_size": 2, "num_channels": 3, "n_layers": 4},
        "audio_config": {"n_mel_bins": config.audio_bands, "mel_vocab_size": config.audio_levels},
        "mtp_config": {
            "num_nextn_predict_layers": config.num_mtp_layers,
            "chain_hidden_post_norm": False,
            "local_layer_ids": list(config.mtp_local_layers),
        },
    }


def rounded_state(model: NanoModel) -> dict[str, Tensor]:
    """The checkpoint's tensors by raw name, on the CPU, in their stored dtypes."""
    return {
        name: tensor.detach().float().cpu().contiguous().to(
            torch.float32 if name.endswith(FP32_LEAVES) else torch.bfloat16
        )
        for name, tensor in model.state_dict().items()
    }  # fmt: skip


def export_checkpoint(model: NanoModel, tokenizer: Tokenizer, folder: Path) -> int:
    """Writes the folder (without its model card) and returns its size in bytes."""
    special.write_tokenizer(tokenizer, folder)
    state = rounded_state(model)
    shards = {
        "model.safetensors": {name: t for name, t in state.items() if not name.startswith("model.mtp.")},
        "mtp.safetensors": {name: t for name, t in state.items() if name.startswith("model.mtp.")},
    }
    for file_name, tensors in shards.items():
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
    weight_map = {name: file_name for file_name, tensors in shards.items() for name in tensors}
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    config = raw_config(model.config, tokenizer)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": config["pad_token_id"], "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    # What `specbench doctor` compares an installed copy with.
    (folder / "sha256.txt").write_text(Checkpoint.open(folder).sha256() + "\n", encoding="utf-8")
    return sum(path.stat().st_size for path in folder.iterdir())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's rounded values in fp32, on the CPU."""
    state = {**load_file(folder / "model.safetensors"), **load_file(folder / "mtp.safetensors")}
    return {name: tensor.float() for name, tensor in state.items()}


def load_checkpoint(folder: Path) -> NanoModel:
    """The exported model with its rounded values in fp32, on the CPU."""
    model = NanoModel(NanoConfig())
    model.load_state_dict(read_tensors(folder))
    return model.requires_grad_(False)
