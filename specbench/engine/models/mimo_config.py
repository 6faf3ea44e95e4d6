"""MiMo-7B's config.json: a Qwen2 decoder and MTP modules, and the tensors it implies. No torch.

A module is a decoder layer of full attention between a projection of (hidden, embedding) and a norm; table and head are
the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.engine.cache_group import CacheGroupSpec, StreamSpec
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.checks import ExpectedTensors
from specbench.engine.models import decoder_config, qwen2_config
from specbench.engine.models.config_section import top_section
from specbench.engine.models.decoder_config import DecoderConfig, Shapes, attention_shapes, dense_shapes

ARCHITECTURE = "MiMoForCausalLM"


def parse_config(checkpoint: Checkpoint) -> DecoderConfig:
    """Qwen2's fields, and num_nextn_predict_layers."""
    num_modules = top_section(checkpoint).num_layers("num_nextn_predict_layers", 0)
    return replace(qwen2_config.parse_config(checkpoint), architecture=ARCHITECTURE, num_modules=num_modules)


def module_prefix(module: int) -> str:
    """Name of an MTP module in the checkpoint."""
    return f"model.mtp_layers.{module}."


def expected_tensors(config: DecoderConfig, num_modules: int) -> ExpectedTensors:
    """What a target with its first `num_modules` MTP modules reads."""
    target = decoder_config.expected_tensors(config, 0)
    required, unread = dict(target.required), dict(target.unread)
    for module in range(config.num_modules):
        (required if module < num_modules else unread).update(_module_shapes(config, module))
    return replace(target, required=required, unread=unread)


def _module_shapes(config: DecoderConfig, module: int) -> Shapes:
    prefix, hidden = module_prefix(module), config.hidden_size
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    return {
        **{f"{prefix}{name}.weight": (hidden,) for name in norms},
        prefix + "input_proj.weight": (hidden, 2 * hidden),
        **attention_shapes(config, prefix),
        **dense_shapes(config, prefix),
    }


def module_cache_groups(
    config: DecoderConfig, num_modules: int, element_size: int, faults: Sequence[str]
) -> tuple[CacheGroupSpec, ...]:
    """Keys and values of the first `num_modules` modules; `faults` are of windows, and there are none."""
    streams = (StreamSpec("kv", (2, config.num_kv_heads, config.head_dim)),)
    return (
        CacheGroupSpec(
            name="draft.full_attention",
            owner="draft",
            kind="full_attention",
            layers=tuple(module_prefix(module) for module in range(num_modules)),
            streams=(streams,) * num_modules,
            element_size=element_size,
            window=None,
            num_prompt_lookahead=num_modules,
            num_provisional_rows=num_modules - 1,
        ),
    )
