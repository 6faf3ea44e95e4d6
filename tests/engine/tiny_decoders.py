"""Builds tiny random plain decoders by transformers: no weight near its neutral value, every variation of config."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8}


def rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 100.0, **fields}}


@dataclass(frozen=True)
class Variation:
    """A config of one family, and what must be true of it for the test to see anything."""

    family: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
VARIATIONS = {
    "llama": Variation("Llama"),
    "llama tied": Variation("Llama", {"tie_word_embeddings": True}),
    "llama biases": Variation("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama narrow heads": Variation("Llama", {"head_dim": 24}),
    "llama one key head": Variation("Llama", {"num_key_value_heads": 1}),
    "llama key heads as heads": Variation("Llama", {"num_key_value_heads": 4}),
    "llama linear": Variation("Llama", rope("linear", factor=2.0)),
    "llama dynamic": Variation("Llama", rope("dynamic", factor=2.0)),
    "llama llama3": Variation("Llama", rope("llama3", **LLAMA3)),
    "llama yarn": Variation("Llama", rope("yarn", **YARN)),
    "llama yarn in full": Variation(
        "Llama", rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0, attention_factor=1.2, truncate=False)
    ),
    "qwen2": Variation("Qwen2"),
    "qwen2 upper windows": Variation("Qwen2", {**WINDOW, "max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": Variation("Qwen3"),
    "qwen3 tied and biased": Variation("Qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 wide heads": Variation("Qwen3", {"head_dim": 32, **rope("yarn", **YARN)}),
    "qwen3 windows": Variation(
        "Qwen3",
        {
            "num_hidden_layers": 3,
            **WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 1 + ["sliding_attention"],
        },
    ),
    "qwen3 upper windows": Variation("Qwen3", {**WINDOW, "max_window_layers": 1}),
    "moe": Variation("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "moe not renormalised": Variation("Qwen3Moe", {**EXPERTS, "norm_topk_prob": False}),
    "moe among dense layers": Variation(
        "Qwen3Moe", {**EXPERTS, "num_hidden_layers": 4, "mlp_only_layers": [3], "decoder_sparse_step": 2}
    ),
    "moe windows": Variation("Qwen3Moe", {**EXPERTS, **WINDOW, "norm_topk_prob": True}),
}


def build_tiny_decoder(folder: Path, name: str, dtype: torch.dtype = torch.float32, **save: Any) -> Path:
    """Save the variation as transformers does and return the folder. Same name, same weights."""
    variation = VARIATIONS[name]
    torch.manual_seed(0)
    config = getattr(transformers, variation.family + "Config")(**(SIZES | variation.fields))
    model = getattr(transformers, variation.family + "ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    model.to(dtype).save_pretrained(folder, **save)
    return folder


def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits of every row, [T, vocab], in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]
