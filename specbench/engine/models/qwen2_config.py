"""Qwen2's config.json (Qwen2.5's, too): queries, keys and values have biases, heads no norms. No torch."""

from __future__ import annotations

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.models.config_section import top_section
from specbench.engine.models.decoder_config import DecoderConfig, parse_decoder_config
from specbench.engine.models.qwen3_config import windowed_layers

ARCHITECTURE = "Qwen2ForCausalLM"


def parse_config(checkpoint: Checkpoint) -> DecoderConfig:
    """With use_sliding_window, some layers see a window."""
    config = top_section(checkpoint)
    num_layers = config.num_layers()
    return parse_decoder_config(
        checkpoint,
        ARCHITECTURE,
        has_head_norm=False,
        windowed_layers=windowed_layers(config, num_layers),
        experts=(None,) * num_layers,
        has_input_bias_alone=True,
    )
