"""Tiny decoders whose projections are stored in codes, in shapes that two ranks can share."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from specbench.engine.checkpoints.random_weights import fill_at_random
from specbench.engine.models.registry import open_checkpoint
from tests.engine.checkpoints.test_quantised import TINY_QWEN3, quantise_nvfp4

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}


def build_quantised_qwen3(folder: Path, quantisation: str) -> Path:
    """Every projection in FP8 with scales of blocks, or in NVFP4 as ModelOpt names it."""
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3 | SIZES))
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in open_checkpoint(folder, "random").tensors.items():
        weight = fill_at_random(torch.empty(entry.shape), name)
        if not name.endswith("_proj.weight"):
            tensors[name] = weight
        elif quantisation == "fp8":
            blocks = weight.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
            scale = blocks.abs().amax((1, 3)) / 448
            codes = (blocks / scale[:, None, :, None]).flatten(0, 1).flatten(1, 2)
            tensors |= {name: codes.to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
        else:
            parts = (part[0].contiguous() for part in quantise_nvfp4(weight[None]))
            tensors |= dict(zip((name, f"{name}_scale", f"{name}_scale_2"), parts, strict=True))
    save_file(tensors, folder / "model.safetensors")
    method = {"fp8": "fp8", "nvfp4": "modelopt"}[quantisation]
    config = TINY_QWEN3 | SIZES | {"quantization_config": {"quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
