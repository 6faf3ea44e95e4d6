"""Qwen3's config.json, dense and mixture of experts. No torch."""

from __future__ import annotations

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.models.config_section import ConfigSection, top_section
from specbench.engine.models.decoder_config import DecoderConfig, ExpertShape, parse_decoder_config

DENSE_ARCHITECTURE = "Qwen3ForCausalLM"
MOE_ARCHITECTURE = "Qwen3MoeForCausalLM"


def parse_dense_config(checkpoint: Checkpoint) -> DecoderConfig:
    """With use_sliding_window, some layers see a window."""
    config = top_section(checkpoint)
    num_layers = config.num_layers()
    return parse_decoder_config(
        checkpoint,
        DENSE_ARCHITECTURE,
        has_head_norm=True,
        windowed_layers=windowed_layers(config, num_layers),
        experts=(None,) * num_layers,
    )


def parse_moe_config(checkpoint: Checkpoint) -> DecoderConfig:
    """With use_sliding_window, all layers see a window."""
    config = top_section(checkpoint)
    num_layers = config.num_layers()
    return parse_decoder_config(
        checkpoint,
        MOE_ARCHITECTURE,
        has_head_norm=True,
        windowed_layers=(config.flag("use_sliding_window"),) * num_layers,
        experts=_experts(config, num_layers),
    )


def windowed_layers(config: ConfigSection, num_layers: int) -> tuple[bool, ...]:
    """By `layer_types`, else every layer from max_window_layers on; none where use_sliding_window is false."""
    layer_types = config.kinds("layer_types", ("full_attention", "sliding_attention"), num_layers)
    if not config.flag("use_sliding_window"):
        return (False,) * num_layers
    if layer_types is not None:
        return tuple(layer_type == "sliding_attention" for layer_type in layer_types)
    if config.optional("max_window_layers") is None:
        config.fail("max_window_layers", "missing, and use_sliding_window is true; add it")
    first = config.whole("max_window_layers", 0)
    return tuple(layer >= first for layer in range(num_layers))


def _experts(config: ConfigSection, num_layers: int) -> tuple[ExpertShape | None, ...]:
    """Experts in every decoder_sparse_step-th layer, those of mlp_only_layers left out."""
    num_experts = config.experts("num_experts", "num_local_experts")
    shape = ExpertShape(
        num_experts=num_experts,
        own=range(num_experts),
        num_experts_per_token=config.count("num_experts_per_tok"),
        width=config.count("moe_intermediate_size"),
        is_renormalised=config.flag("norm_topk_prob"),
    )
    if shape.num_experts_per_token > shape.num_experts:
        config.fail("num_experts_per_tok", f"is more than the {shape.num_experts} experts; correct it")
    for key, width in (("hidden_size", config.count("hidden_size")), ("moe_intermediate_size", shape.width)):
        if width % 8:
            config.fail(
                key, f"{width} is not a multiple of 8, which products over sorted experts need; use another model"
            )
    step, dense_layers = config.count("decoder_sparse_step", default=1), config.indices("mlp_only_layers") or []
    return tuple(None if layer in dense_layers or (layer + 1) % step else shape for layer in range(num_layers))
