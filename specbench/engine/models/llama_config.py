"""Llama's config.json (SmolLM2 and many others are written as Llama, too). No torch."""

from __future__ import annotations

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.models.config_section import top_section
from specbench.engine.models.decoder_config import DecoderConfig, parse_decoder_config

ARCHITECTURE = "LlamaForCausalLM"


def parse_config(checkpoint: Checkpoint) -> DecoderConfig:
    """Every layer sees everything, and has a dense MLP."""
    num_layers = top_section(checkpoint).num_layers()
    return parse_decoder_config(
        checkpoint,
        ARCHITECTURE,
        has_head_norm=False,
        windowed_layers=(False,) * num_layers,
        experts=(None,) * num_layers,
    )
