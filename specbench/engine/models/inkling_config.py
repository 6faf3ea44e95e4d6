"""Inkling's config.json, in the checkpoint's own spelling and in that of transformers, and the tensors it implies.

Belongs here: fields, their two spellings, names and shapes of tensors. Does not belong here: torch, reading weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, GENERATION_CONFIG_FILE, Checkpoint
from specbench.engine.checkpoints.checks import ExpectedTensors
from specbench.engine.content.content_tokens import AUDIO, IMAGE, NUM_BANDS, NUM_BINS, ContentTokens
from specbench.engine.layers.attention_backends.choose import AttentionFeature
from specbench.engine.models.config_section import ConfigSection, eos_token_ids, top_section
from specbench.engine.models.inkling_image_stages import ImageStage, image_stages
from specbench.engine.shard import Shard, SplitCount, check_split

ARCHITECTURE = "InklingForConditionalGeneration"
CHAIN_NORM = "model.mtp.chain_norm.weight"
AUDIO_PREFIX = "model.audio."
IMAGE_PREFIX = "model.visual."
VOCABULARY_TENSORS = ("model.llm.embed.weight", "model.llm.unembed.weight")

#: Flags of the text config, and the only value that is implemented.
_FIXED_FLAGS: dict[str, Any] = {
    "use_embed_norm": True,
    "use_sconv": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "norm_after_topk": True,
    "shared_expert_sink": True,
    "gate_activation": "sigmoid",
    "hidden_act": "silu",
    "q_bias": False,
    "o_bias": False,
    "final_logit_softcapping": None,
    "inference_moe_w13_interleaved": True,
    "mtp_hidden_states_first": True,
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes of one kind of attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Distances that have a relative bias: 0 .. extent - 1.
    extent: int
    #: Keys that a row sees, itself included; None: all.
    window: int | None

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AudioShape:
    """Sizes of the audio tower."""

    num_bands: int
    num_bins: int


@dataclass(frozen=True, slots=True)
class InklingConfig:
    """Everything the model needs from config.json."""

    architecture: str
    #: Token ids that exist; the embedding and the head may hold more rows.
    vocab_size: int
    padded_vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    rms_norm_eps: float
    global_attention: AttentionShape
    local_attention: AttentionShape
    d_rel: int
    #: Positions up to this one are not scaled; None: none ever is.
    log_scaling_floor: int | None
    log_scaling_alpha: float
    conv_kernel_size: int
    #: Of the convolutions behind attention and MLP: hidden_size, or a rank's share.
    conv_channels: int
    #: Per layer: whether its attention is windowed.
    local_layers: tuple[bool, ...]
    #: Per layer: whether its MLP is a mixture of experts.
    sparse_layers: tuple[bool, ...]
    dense_width: int
    expert_width: int
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int
    #: Of the routed experts those that are read: all, or a rank's. Shared experts are split by width in any case.
    own_experts: range
    shared_expert_width: int
    route_scale: float
    #: Hidden states are divided by it before the head (muP).
    logits_divisor: float
    #: Per MTP module in the checkpoint: whether its attention is windowed.
    local_modules: tuple[bool, ...]
    chain_hidden_post_norm: bool
    #: Towers; None where the checkpoint holds none.
    audio: AudioShape | None
    image: tuple[ImageStage, ...] | None
    audio_tokens: ContentTokens
    image_tokens: ContentTokens

    @property
    def is_tied(self) -> bool:
        """Whether the head is the token table."""
        return False

    @property
    def has_experts(self) -> bool:
        return any(self.sparse_layers)

    @property
    def num_layers(self) -> int:
        return len(self.local_layers)

    @property
    def num_modules(self) -> int:
        return len(self.local_modules)

    @property
    def attention_features(self) -> frozenset[AttentionFeature]:
        return frozenset({"window", "relative_bias"})

    def attention(self, is_local: bool) -> AttentionShape:
        return self.local_attention if is_local else self.global_attention


def _check_flags(text: ConfigSection) -> None:
    for key, value in _FIXED_FLAGS.items():
        text.check_fixed(key, value)


def parse_config(checkpoint: Checkpoint) -> InklingConfig:
    """InklingConfig from either spelling."""
    file, top = checkpoint.path / CONFIG_FILE, top_section(checkpoint)
    text, mtp = top.subsection("text_config"), top.subsection("mtp_config")
    if text is None:
        top.fail("text_config", "missing; fetch the file again")
    _check_flags(text)
    padded_vocab_size = text.count("vocab_size")
    vocab_size = text.count("unpadded_vocab_size", default=padded_vocab_size)
    if vocab_size > padded_vocab_size:
        text.fail("unpadded_vocab_size", f"{vocab_size} is more than vocab_size={padded_vocab_size}; correct it")
    num_layers = text.num_layers()
    dense_width, expert_width = _widths(text)
    for key, width in (("hidden_size", text.count("hidden_size")), ("intermediate_size", expert_width)):
        if width % 8:
            text.fail(
                key, f"{width} is not a multiple of 8, which products over sorted experts need; use another model"
            )
    num_experts, num_chosen = text.experts("n_routed_experts"), text.count("num_experts_per_tok")
    if num_chosen > num_experts:
        text.fail("num_experts_per_tok", f"is more than the {num_experts} experts; correct it")
    local_modules, chain_hidden_post_norm = _modules(text, mtp or ConfigSection(file, "mtp_config.", {}))
    return InklingConfig(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        max_model_len=text.count("model_max_length", "max_position_embeddings"),
        # generation_config.json comes second: transformers fills it with defaults that mean nothing for this model.
        eos_token_ids=eos_token_ids(checkpoint, (CONFIG_FILE, GENERATION_CONFIG_FILE)),
        hidden_size=text.count("hidden_size"),
        rms_norm_eps=text.number("rms_norm_eps"),
        global_attention=_attention_shape(text, "", text.count("rel_extent"), None),
        local_attention=_attention_shape(
            text, "swa_", text.count("sliding_window_size"), text.count("sliding_window_size")
        ),
        d_rel=text.count("d_rel"),
        log_scaling_floor=None if text.optional("log_scaling_n_floor") is None else text.number("log_scaling_n_floor"),
        log_scaling_alpha=text.number("log_scaling_alpha") if text.optional("log_scaling_alpha") else 0.0,
        conv_kernel_size=text.count("sconv_kernel_size", "conv_kernel_size"),
        conv_channels=text.count("hidden_size"),
        local_layers=_local_layers(text, num_layers),
        sparse_layers=_sparse_layers(text, num_layers),
        dense_width=dense_width,
        expert_width=expert_width,
        num_experts=num_experts,
        num_experts_per_token=num_chosen,
        num_shared_experts=text.count("n_shared_experts"),
        own_experts=range(num_experts),
        shared_expert_width=expert_width,
        route_scale=text.number("route_scale"),
        logits_divisor=text.number("logits_mup_width_multiplier"),
        local_modules=local_modules,
        chain_hidden_post_norm=chain_hidden_post_norm,
        audio=_audio_shape(checkpoint),
        image=_image_stages(checkpoint),
        audio_tokens=_content_tokens(checkpoint, "audio", ContentTokens(200020, 200053)),
        image_tokens=_content_tokens(checkpoint, "image", ContentTokens(200005, 200054)),
    )


def _audio_shape(checkpoint: Checkpoint) -> AudioShape | None:
    section = _tower_section(checkpoint, "audio_config", AUDIO_PREFIX)
    if section is None:
        return None
    return AudioShape(section.count("n_mel_bins", default=80), section.count("mel_vocab_size"))


def _image_stages(checkpoint: Checkpoint) -> tuple[ImageStage, ...] | None:
    section = _tower_section(checkpoint, "vision_config", IMAGE_PREFIX)
    if section is None:
        return None
    size, temporal = section.count("patch_size"), section.count("temporal_patch_size")
    channels = section.count("num_channels", default=3)
    return image_stages(size, temporal, channels, section.count("n_layers", "num_hidden_layers"))


def _tower_section(checkpoint: Checkpoint, key: str, prefix: str) -> ConfigSection | None:
    """What config.json says of a tower; None where the checkpoint holds none of its tensors, as a text-only copy does
    whatever its config describes."""
    top = top_section(checkpoint)
    section = top.subsection(key)
    if checkpoint.is_random:
        return section
    if not any(name.startswith(prefix) for name in checkpoint.tensors):
        return None
    if section is None:
        top.fail(key, "missing, and the checkpoint holds tensors of that tower; add it, or remove the tensors")
    return section


def _content_tokens(checkpoint: Checkpoint, kind: str, default: ContentTokens) -> ContentTokens:
    top = top_section(checkpoint)
    marker = top.whole(f"{kind}_bos_token_id", default=default.marker_id)
    return ContentTokens(marker, top.whole(f"{kind}_token_id", default=default.placeholder_id))


def content_tokens(config: InklingConfig) -> dict[str, ContentTokens]:
    """How the kinds of content that the checkpoint has towers for are written."""
    found = {AUDIO: config.audio_tokens} if config.audio == AudioShape(NUM_BANDS, NUM_BINS) else {}
    return found | ({IMAGE: config.image_tokens} if config.image else {})


def _attention_shape(text: ConfigSection, prefix: str, extent: int, window: int | None) -> AttentionShape:
    return AttentionShape(
        num_heads=text.count(prefix + "num_attention_heads"),
        num_kv_heads=text.count(prefix + "num_key_value_heads"),
        head_dim=text.count(prefix + "head_dim"),
        extent=extent,
        window=window,
    )


def _widths(text: ConfigSection) -> tuple[int, int]:
    """(dense, expert). `intermediate_size` is the expert width in one spelling and the dense width in the other."""
    if text.optional("dense_intermediate_size") is not None:
        return text.count("dense_intermediate_size"), text.count("intermediate_size")
    return text.count("intermediate_size"), text.count("moe_intermediate_size")


def _local_layers(text: ConfigSection, num_layers: int) -> tuple[bool, ...]:
    layer_types = text.kinds("layer_types", ("hybrid_sliding", "hybrid"), num_layers)
    if layer_types is not None:
        return tuple(layer_type == "hybrid_sliding" for layer_type in layer_types)
    local_ids = text.indices("local_layer_ids")
    if local_ids is None:
        return tuple((layer + 1) % 6 != 0 for layer in range(num_layers))
    return tuple(layer in local_ids for layer in range(num_layers))


def _sparse_layers(text: ConfigSection, num_layers: int) -> tuple[bool, ...]:
    layer_types = text.kinds("mlp_layer_types", ("sparse", "dense"), num_layers)
    if layer_types is not None:
        return tuple(layer_type == "sparse" for layer_type in layer_types)
    num_dense = text.whole("dense_mlp_idx", 0)
    return tuple(layer >= num_dense for layer in range(num_layers))


def _modules(text: ConfigSection, mtp: ConfigSection) -> tuple[tuple[bool, ...], bool]:
    """(per module: is it local, whether the chained hidden is normed). mtp_config is the checkpoint's own spelling."""
    num_modules = text.num_layers("num_mtp_layers", 0) or mtp.num_layers("num_nextn_predict_layers", 0)
    local_ids = text.indices("mtp_local_layer_ids")
    if local_ids is None:
        local_ids = mtp.indices("local_layer_ids") or []
    chain_hidden_post_norm = text.flag("chain_hidden_post_norm") or mtp.flag("chain_hidden_post_norm")
    return tuple(module in local_ids for module in range(num_modules)), chain_hidden_post_norm


def shard_config(config: InklingConfig, shard: Shard) -> InklingConfig:
    """The same with one rank's shares: heads, widths, channels of convolutions, rows of token table and head. UserError
    where they cannot be split."""
    if shard.size == 1:
        return config
    kinds = {"global": config.global_attention, "local": config.local_attention}
    heads = {kind: SplitCount(shape.num_heads, f"heads of {kind} attention") for kind, shape in kinds.items()}
    kv_heads = {
        kind: SplitCount(shape.num_kv_heads, f"key-value heads of {kind} attention", is_replicable=True)
        for kind, shape in kinds.items()
    }
    dense = SplitCount(config.dense_width, "columns of a dense MLP")
    expert = SplitCount(config.expert_width, "columns of an expert", unit=8)
    experts = [SplitCount(config.num_experts, "experts")] if shard.whole_experts else []
    channels = SplitCount(config.hidden_size, "channels of a convolution")
    check_split([*heads.values(), *kv_heads.values(), dense, expert, *experts, channels], shard.size)

    def share_of(kind: str) -> AttentionShape:
        own_heads, own_kv_heads = heads[kind].share(shard.size), kv_heads[kind].share(shard.size)
        return replace(kinds[kind], num_heads=own_heads, num_kv_heads=own_kv_heads)

    start, stop = shard.range_of(config.vocab_size)
    return replace(
        config,
        padded_vocab_size=stop - start,
        global_attention=share_of("global"),
        local_attention=share_of("local"),
        conv_channels=channels.share(shard.size),
        dense_width=dense.share(shard.size),
        expert_width=config.expert_width if shard.whole_experts else expert.share(shard.size),
        own_experts=shard.experts_of(config.num_experts),
        shared_expert_width=expert.share(shard.size),
    )


Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: InklingConfig, num_modules: int) -> ExpectedTensors:
    """What a target with its first `num_modules` MTP modules reads."""
    required = _target_shapes(config) | _tower_shapes(config)
    for module in range(num_modules):
        required |= _module_shapes(config, module)
    unread: Shapes = {}
    for module in range(num_modules, config.num_modules):
        unread |= _module_shapes(config, module)
    forbidden = {}
    if config.chain_hidden_post_norm:
        (required if num_modules else unread)[CHAIN_NORM] = (config.hidden_size,)
    else:
        forbidden[CHAIN_NORM] = "chain_hidden_post_norm is false in config.json; set it to true or remove the tensor"
    float32_suffixes = ("_sconv.weight", ".global_scale", ".gate.weight", ".gate.bias")
    prefixes = ("model.llm.", "model.mtp.", AUDIO_PREFIX, IMAGE_PREFIX)
    return ExpectedTensors(required, unread, prefixes, forbidden, float32_suffixes)


def module_prefix(module: int) -> str:
    """Name of an MTP module in the checkpoint."""
    return f"model.mtp.layers.{module}."


def layer_prefix(layer: int) -> str:
    """Name of a target layer in the checkpoint."""
    return f"model.llm.layers.{layer}."


def _target_shapes(config: InklingConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {
        "model.llm.embed.weight": (config.padded_vocab_size, hidden),
        "model.llm.embed_norm.weight": (hidden,),
        "model.llm.norm.weight": (hidden,),
        "model.llm.unembed.weight": (config.padded_vocab_size, hidden),
    }
    for layer, (is_local, is_sparse) in enumerate(zip(config.local_layers, config.sparse_layers, strict=True)):
        prefix = layer_prefix(layer)
        shapes |= _block_shapes(config, prefix, is_local)
        shapes |= _sparse_shapes(config, prefix) if is_sparse else _dense_shapes(config, prefix)
    return shapes


def _tower_shapes(config: InklingConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {}
    if config.audio is not None:
        shapes[AUDIO_PREFIX + "encoder.weight"] = (config.audio.num_bands * config.audio.num_bins, hidden)
        shapes[AUDIO_PREFIX + "final_norm.weight"] = (hidden,)
    if config.image is not None:
        *inner, last = config.image
        for index, stage in enumerate(inner):
            shapes[image_layer("linear", index)] = (stage.channels_out, stage.channels_in)
            shapes[image_layer("norm", index)] = (stage.channels_out,)
        shapes[image_layer("linear", len(inner))] = (hidden, last.channels_in)
        shapes[IMAGE_PREFIX + "final_norm.weight"] = (hidden,)
    return shapes


def image_layer(kind: str, stage: int) -> str:
    """Name of a stage's projection (linear) or norm in the checkpoint."""
    return f"{IMAGE_PREFIX}layers.{kind}_{stage}.weight"


def _module_shapes(config: InklingConfig, module: int) -> Shapes:
    prefix = module_prefix(module)
    hidden = config.hidden_size
    block = prefix + "transformer_block."
    return {
        prefix + "embed_norm.weight": (hidden,),
        prefix + "hidden_norm.weight": (hidden,),
        prefix + "input_proj.weight": (hidden, 2 * hidden),
        **_block_shapes(config, block, config.local_modules[module]),
        **_dense_shapes(config, block),
    }


def _block_shapes(config: InklingConfig, prefix: str, is_local: bool) -> Shapes:
    hidden, kernel = config.hidden_size, config.conv_kernel_size
    attention = config.attention(is_local)
    return {
        prefix + "attn_norm.weight": (hidden,),
        prefix + "mlp_norm.weight": (hidden,),
        prefix + "attn.wq_du.weight": (attention.query_width, hidden),
        prefix + "attn.wk_dv.weight": (attention.kv_width, hidden),
        prefix + "attn.wv_dv.weight": (attention.kv_width, hidden),
        prefix + "attn.wr_du.weight": (attention.num_heads * config.d_rel, hidden),
        prefix + "attn.wo_ud.weight": (hidden, attention.query_width),
        prefix + "attn.q_norm.weight": (attention.head_dim,),
        prefix + "attn.k_norm.weight": (attention.head_dim,),
        prefix + "attn.k_sconv.weight": (attention.kv_width, 1, kernel),
        prefix + "attn.v_sconv.weight": (attention.kv_width, 1, kernel),
        prefix + "attn.rel_logits_proj.proj": (config.d_rel, attention.extent),
        prefix + "attn_sconv.weight": (config.conv_channels, 1, kernel),
        prefix + "mlp_sconv.weight": (config.conv_channels, 1, kernel),
    }


def _dense_shapes(config: InklingConfig, prefix: str) -> Shapes:
    hidden, width = config.hidden_size, config.dense_width
    return {
        prefix + "mlp.w13_dn.weight": (2 * width, hidden),
        prefix + "mlp.w2_md.weight": (hidden, width),
        prefix + "mlp.global_scale": (1,),
    }


def _sparse_shapes(config: InklingConfig, prefix: str) -> Shapes:
    hidden, width, shared_width = config.hidden_size, config.expert_width, config.shared_expert_width
    routed, shared, own = config.num_experts, config.num_shared_experts, len(config.own_experts)
    return {
        prefix + "mlp.gate.weight": (routed + shared, hidden),
        prefix + "mlp.gate.bias": (routed,),
        prefix + "mlp.gate.global_scale": (1,),
        prefix + "mlp.experts.w13_weight": (own, 2 * width, hidden),
        prefix + "mlp.experts.w2_weight": (own, hidden, width),
        prefix + "mlp.shared_experts.shared_w13_weight": (shared, 2 * shared_width, hidden),
        prefix + "mlp.shared_experts.shared_w2_weight": (shared, hidden, shared_width),
    }
