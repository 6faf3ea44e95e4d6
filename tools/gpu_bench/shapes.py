"""Shapes that are measured, and tiny ones of the same families for a trial on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, Checkpoint, read_json
from specbench.engine.models.registry import open_checkpoint
from specbench.model_choice import SHAPES_FOLDER

#: What a tiny shape has in place of the real one, wherever the real one has the field.
_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
    "rel_extent": 32,
    "local_layer_ids": [0],
    "dense_mlp_idx": 1,
    "d_rel": 4,
    "intermediate_size": 96,
    "dense_intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "unpadded_vocab_size": 500,
}


def shape_folder(name: str, tiny_in: Path | None) -> Path:
    """Folder with the config.json of a shape; of its tiny one, written under `tiny_in`, where that is given."""
    folder = SHAPES_FOLDER / name
    if tiny_in is None:
        return folder
    config = read_json(folder / CONFIG_FILE)
    tiny = tiny_in / name
    tiny.mkdir(parents=True, exist_ok=True)
    (tiny / CONFIG_FILE).write_text(json.dumps(shrink(config)), encoding="utf-8")
    return tiny


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The same fields with tiny sizes; how many MTP modules there are, and which are windowed, stays."""
    return {key: shrink(value) if key == "text_config" else _TINY.get(key, value) for key, value in config.items()}


def open_shape(folder: Path, quantised_weights: str = "dequantise") -> Checkpoint:
    return open_checkpoint(folder, "random", quantised_weights)


def expert_counts(checkpoint: Checkpoint) -> tuple[int, int]:
    """(routed experts, of these chosen for a token); zeros where there are none."""
    config = checkpoint.config.get("text_config", checkpoint.config)
    num_experts = config.get("n_routed_experts") or config.get("num_experts") or 0
    return num_experts, config.get("num_experts_per_tok") or 0
