"""What config.json says of rotary embeddings, in its spellings, and the context that follows. No torch."""

from __future__ import annotations

from specbench.engine.layers.rotary_config import LinearScaling, Llama3Scaling, RotaryConfig, YarnScaling
from specbench.engine.models.config_section import ConfigSection


def parse_rotary(config: ConfigSection, head_dim: int) -> RotaryConfig:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling`, the older spelling."""
    rope = config.subsection("rope_parameters") or config.subsection("rope_scaling") or config
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=10_000.0))
    if theta <= 1:
        rope.fail("rope_theta", f"expected a number above 1, found {theta!r}; correct it")
    partial = rope.optional("partial_rotary_factor") or config.optional("partial_rotary_factor")
    if partial not in (None, 1):
        rope.fail("partial_rotary_factor", f"{partial!r} is not implemented here, only 1; use another checkpoint")
    kind = "default" if rope is config else rope.optional("rope_type", "type") or "default"
    if not isinstance(kind, str) or kind not in _SCALINGS:
        rope.fail("rope_type", f"{kind!r} is not implemented, only {', '.join(_SCALINGS)}; use another checkpoint")
    return RotaryConfig(theta, head_dim, _SCALINGS[kind](rope, config))


def _linear(rope: ConfigSection, config: ConfigSection) -> LinearScaling:
    return LinearScaling(rope.number("factor"))


def _llama3(rope: ConfigSection, config: ConfigSection) -> Llama3Scaling:
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if not low < high:
        rope.fail("low_freq_factor", f"{low} is not below high_freq_factor, {high}; correct it")
    return Llama3Scaling(rope.number("factor"), low, high, _original_max_positions(rope, config))


def _yarn(rope: ConfigSection, config: ConfigSection) -> YarnScaling:
    for key in ("mscale", "mscale_all_dim"):
        if rope.optional(key):
            rope.fail(key, "is not implemented here; use another checkpoint")
    return YarnScaling(
        rope.number("factor"),
        _original_max_positions(rope, config),
        beta_fast=rope.number("beta_fast", default=32),
        beta_slow=rope.number("beta_slow", default=1),
        is_truncated=rope.flag("truncate", default=True),
        attention_factor=None if rope.optional("attention_factor") is None else rope.number("attention_factor"),
    )


def _original_max_positions(rope: ConfigSection, config: ConfigSection) -> int:
    if rope.optional("original_max_position_embeddings") is not None:
        return rope.count("original_max_position_embeddings")
    return config.count("max_position_embeddings")


#: rope_type -> its scaling. "dynamic" changes frequencies past max_position_embeddings only, where no request goes.
_SCALINGS = {
    "default": lambda rope, config: None,
    "dynamic": lambda rope, config: None,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def max_model_len(config: ConfigSection, rotary: RotaryConfig) -> int:
    """Tokens of a sequence. YaRN is switched on by its own fields, with max_position_embeddings left as it was."""
    stated = config.count("max_position_embeddings")
    if isinstance(rotary.scaling, YarnScaling):
        return max(stated, int(rotary.scaling.factor * rotary.scaling.original_max_positions))
    return stated
