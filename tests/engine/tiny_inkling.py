"""Builds a tiny random Inkling in the checkpoint's own layout: every feature on, no weight near its neutral value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TEXT_FIELDS: dict[str, Any] = {
    "vocab_size": 256,
    "unpadded_vocab_size": 250,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "local_layer_ids": [0, 1, 2, 3, 4],
    "d_rel": 4,
    "rel_extent": 16,
    "log_scaling_n_floor": 12,
    "log_scaling_alpha": 0.1,
    "model_max_length": 512,
    "rms_norm_eps": 1e-6,
    "sconv_kernel_size": 4,
    "dense_mlp_idx": 1,
    "dense_intermediate_size": 128,
    "intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 2.0,
}


def build_tiny_inkling(
    folder: Path,
    *,
    num_modules: int = 3,
    local_module_ids: tuple[int, ...] = (0, 2),
    chain_hidden_post_norm: bool = False,
    has_towers: bool = False,
    seed: int = 0,
    **text_fields: Any,
) -> Path:
    """Write config.json, model.safetensors and mtp.safetensors to `folder` and return it.

    `text_fields` override TEXT_FIELDS. Same arguments, same weights.
    """
    unknown = set(text_fields) - set(TEXT_FIELDS)
    assert not unknown, f"not a text field: {unknown}"
    text = TEXT_FIELDS | text_fields
    config = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "eos_token_id": 1,
        "image_token_id": text["unpadded_vocab_size"] - 1,
        "audio_token_id": text["unpadded_vocab_size"] - 2,
        "image_bos_token_id": text["unpadded_vocab_size"] - 3,
        "audio_bos_token_id": text["unpadded_vocab_size"] - 4,
        "text_config": text,
        "audio_config": {"n_mel_bins": 80, "mel_vocab_size": 16},
        "vision_config": {"patch_size": 8, "temporal_patch_size": 2, "num_channels": 3, "num_hidden_layers": 4},
        "mtp_config": {
            "num_nextn_predict_layers": num_modules,
            "local_layer_ids": list(local_module_ids),
            "chain_hidden_post_norm": chain_hidden_post_norm,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    maker = _TensorMaker(text, seed)
    files = {"model.safetensors": maker.target()}
    if num_modules:
        files["mtp.safetensors"] = maker.modules(num_modules, local_module_ids)
        if chain_hidden_post_norm:
            files["mtp.safetensors"]["model.mtp.chain_norm.weight"] = maker.norm(text["hidden_size"])
    if has_towers:
        files["model.safetensors"] |= maker.towers()
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    return folder


Tensors = dict[str, torch.Tensor]


class _TensorMaker:
    """Draws tensors in a fixed order from one generator."""

    def __init__(self, text: dict[str, Any], seed: int) -> None:
        self.text = text
        self.hidden = text["hidden_size"]
        self.generator = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, scale: float = 0.1) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=self.generator)

    def norm(self, size: int) -> torch.Tensor:
        return 1 + self.randn(size)

    def target(self) -> Tensors:
        vocab = self.text["vocab_size"]
        tensors = {
            "model.llm.embed.weight": self.randn(vocab, self.hidden),
            "model.llm.embed_norm.weight": self.norm(self.hidden),
            "model.llm.norm.weight": self.norm(self.hidden),
            "model.llm.unembed.weight": self.randn(vocab, self.hidden),
        }
        for layer in range(self.text["num_hidden_layers"]):
            prefix = f"model.llm.layers.{layer}."
            tensors |= self.block(prefix, layer in self.text["local_layer_ids"])
            tensors |= self.dense(prefix) if layer < self.text["dense_mlp_idx"] else self.sparse(prefix)
        return tensors

    def modules(self, num_modules: int, local_ids: tuple[int, ...]) -> Tensors:
        tensors: Tensors = {}
        for module in range(num_modules):
            prefix = f"model.mtp.layers.{module}."
            tensors[prefix + "embed_norm.weight"] = self.norm(self.hidden)
            tensors[prefix + "hidden_norm.weight"] = self.norm(self.hidden)
            tensors[prefix + "input_proj.weight"] = self.randn(self.hidden, 2 * self.hidden)
            tensors |= self.block(prefix + "transformer_block.", module in local_ids)
            tensors |= self.dense(prefix + "transformer_block.")
        return tensors

    def towers(self) -> Tensors:
        """Of patches of 8 x 8 x 2: 2 x 2 pixels, then 2 x 2 places twice, then both moments are folded."""
        tensors = {
            "model.audio.encoder.weight": self.randn(80 * 16, self.hidden),
            "model.audio.final_norm.weight": self.norm(self.hidden),
            "model.visual.final_norm.weight": self.norm(self.hidden),
        }
        sizes = [(64, 3 * 4), (64, 64 * 4), (192, 64 * 4), (self.hidden, 192 * 2)]
        for stage, (channels_out, channels_in) in enumerate(sizes):
            tensors[f"model.visual.layers.linear_{stage}.weight"] = self.randn(channels_out, channels_in)
            if stage < len(sizes) - 1:
                tensors[f"model.visual.layers.norm_{stage}.weight"] = self.norm(channels_out)
        return tensors

    def block(self, prefix: str, is_local: bool) -> Tensors:
        text, hidden, kernel = self.text, self.hidden, self.text["sconv_kernel_size"]
        swa = "swa_" if is_local else ""
        heads, kv_heads, head_dim = (
            text[swa + name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        extent = text["sliding_window_size"] if is_local else text["rel_extent"]
        return {
            prefix + "attn_norm.weight": self.norm(hidden),
            prefix + "mlp_norm.weight": self.norm(hidden),
            prefix + "attn.wq_du.weight": self.randn(heads * head_dim, hidden),
            prefix + "attn.wk_dv.weight": self.randn(kv_heads * head_dim, hidden),
            prefix + "attn.wv_dv.weight": self.randn(kv_heads * head_dim, hidden),
            prefix + "attn.wr_du.weight": self.randn(heads * text["d_rel"], hidden),
            prefix + "attn.wo_ud.weight": self.randn(hidden, heads * head_dim),
            prefix + "attn.q_norm.weight": 3 * self.norm(head_dim),
            prefix + "attn.k_norm.weight": 3 * self.norm(head_dim),
            prefix + "attn.k_sconv.weight": self.randn(kv_heads * head_dim, 1, kernel, scale=0.3),
            prefix + "attn.v_sconv.weight": self.randn(kv_heads * head_dim, 1, kernel, scale=0.3),
            prefix + "attn.rel_logits_proj.proj": self.randn(text["d_rel"], extent, scale=1.0),
            prefix + "attn_sconv.weight": self.randn(hidden, 1, kernel, scale=0.3),
            prefix + "mlp_sconv.weight": self.randn(hidden, 1, kernel, scale=0.3),
        }

    def dense(self, prefix: str) -> Tensors:
        width = self.text["dense_intermediate_size"]
        return {
            prefix + "mlp.w13_dn.weight": self.randn(2 * width, self.hidden),
            prefix + "mlp.w2_md.weight": self.randn(self.hidden, width),
            prefix + "mlp.global_scale": 1.3 + self.randn(1),
        }

    def sparse(self, prefix: str) -> Tensors:
        width = self.text["intermediate_size"]
        routed, shared = self.text["n_routed_experts"], self.text["n_shared_experts"]
        return {
            prefix + "mlp.gate.weight": self.randn(routed + shared, self.hidden),
            prefix + "mlp.gate.bias": self.randn(routed),
            prefix + "mlp.gate.global_scale": 0.8 + self.randn(1),
            prefix + "mlp.experts.w13_weight": self.randn(routed, 2 * width, self.hidden),
            prefix + "mlp.experts.w2_weight": self.randn(routed, self.hidden, width),
            prefix + "mlp.shared_experts.shared_w13_weight": self.randn(shared, 2 * width, self.hidden),
            prefix + "mlp.shared_experts.shared_w2_weight": self.randn(shared, self.hidden, width),
        }
