"""What Inkling keeps per token: its cache groups, from the config alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specbench.engine.cache_group import CacheGroupSpec, CacheKind, Owner, StreamSpec
from specbench.engine.models.inkling_config import AttentionShape, InklingConfig, layer_prefix, module_prefix


def target_cache_groups(config: InklingConfig, element_size: int) -> tuple[CacheGroupSpec, ...]:
    """Groups of the target, one layer of keys and values and one of convolution inputs a block."""
    layers = [(layer_prefix(layer), is_local) for layer, is_local in enumerate(config.local_layers)]
    return _groups(config, "target", layers, element_size)


def module_cache_groups(
    config: InklingConfig, num_modules: int, element_size: int, faults: Sequence[str]
) -> tuple[CacheGroupSpec, ...]:
    """Groups of the first `num_modules` MTP modules. The fault `ignored_window` keeps and sees everything."""
    layers = [(module_prefix(module), config.local_modules[module]) for module in range(num_modules)]
    groups = _groups(config, "draft", layers, element_size)
    return tuple(
        replace(
            _without_window(group) if "ignored_window" in faults else group,
            num_prompt_lookahead=num_modules,
            num_provisional_rows=num_modules - 1,
        )
        for group in groups
    )


def _without_window(group: CacheGroupSpec) -> CacheGroupSpec:
    if group.kind != "sliding_window":
        return group
    return replace(group, name=f"{group.owner}.ignored_window", kind="full_attention", window=None)


def _groups(
    config: InklingConfig, owner: Owner, layers: Sequence[tuple[str, bool]], element_size: int
) -> tuple[CacheGroupSpec, ...]:
    """layers: (tensor prefix, is local). Groups without layers are left out."""

    def group(
        kind: CacheKind, window: int | None, members: Sequence[tuple[str, tuple[StreamSpec, ...]]]
    ) -> CacheGroupSpec:
        return CacheGroupSpec(
            name=f"{owner}.{kind}",
            owner=owner,
            kind=kind,
            layers=tuple(name for name, _ in members),
            streams=tuple(streams for _, streams in members),
            element_size=element_size,
            window=window,
        )

    of_global = [(name, _kv_streams(config.global_attention)) for name, is_local in layers if not is_local]
    of_local = [(name, _kv_streams(config.local_attention)) for name, is_local in layers if is_local]
    of_conv = [(name, _conv_streams(config, config.attention(is_local))) for name, is_local in layers]
    groups = (
        group("full_attention", None, of_global),
        group("sliding_window", config.local_attention.window, of_local),
        group("short_conv", config.conv_kernel_size, of_conv),
    )
    return tuple(group for group in groups if group.layers)


def _kv_streams(shape: AttentionShape) -> tuple[StreamSpec, ...]:
    return (StreamSpec("kv", (2, shape.num_kv_heads, shape.head_dim)),)


def _conv_streams(config: InklingConfig, shape: AttentionShape) -> tuple[StreamSpec, ...]:
    """Inputs of a block's convolutions: of keys and values together, of the attention's output, of the MLP's."""
    return (
        StreamSpec("kv", (2 * shape.kv_width,)),
        StreamSpec("attention", (config.conv_channels,)),
        StreamSpec("mlp", (config.conv_channels,)),
    )
