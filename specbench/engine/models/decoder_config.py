"""The plain decoder: pre-norm layers of rotary grouped-query attention and a gated MLP, over paged keys and values.

Belongs here: its config, the tensors that it implies in the public layout (`model.layers.N...`), its cache groups. Does
not belong here: which architecture writes which fields (llama_config.py, qwen3_config.py), torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specbench.engine.cache_group import CacheGroupSpec, StreamSpec
from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, GENERATION_CONFIG_FILE, Checkpoint
from specbench.engine.checkpoints.checks import ExpectedTensors
from specbench.engine.checkpoints.quantised import METHODS
from specbench.engine.layers.attention_backends.choose import COMMON_HEAD_SIZES, AttentionFeature
from specbench.engine.layers.rotary_config import RotaryConfig
from specbench.engine.models.config_section import eos_token_ids, top_section
from specbench.engine.models.rotary_fields import max_model_len, parse_rotary
from specbench.engine.shard import Shard, SplitCount, check_split

#: Where `transformers` takes the ids from that end a text: the instruct models' further ids are in the first.
_EOS_FILES = (GENERATION_CONFIG_FILE, CONFIG_FILE)
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Sizes and routing of a mixture of experts."""

    num_experts: int
    num_experts_per_token: int
    #: Those that are read: all, or a rank's.
    own: range
    width: int
    #: Whether the weights of the chosen experts are made to sum to 1.
    is_renormalised: bool


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything the model needs from config.json."""

    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    rms_norm_eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: RotaryConfig
    #: Whether queries and keys are normed per head.
    has_head_norm: bool
    #: Biases of queries, keys and values, of the projection behind attention, and of those of the dense MLP.
    has_attention_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    #: Keys that a row of a windowed layer sees, itself included.
    window: int | None
    #: Per layer: whether its attention is windowed.
    windowed_layers: tuple[bool, ...]
    #: Width of the MLP of layers without experts.
    dense_width: int
    #: Per layer: its experts, or None for a dense MLP.
    experts: tuple[ExpertShape | None, ...]
    #: Whether the head is the token table.
    is_tied: bool
    #: Rows of the token table that are read: vocab_size, or a rank's share.
    num_table_rows: int
    #: MTP modules in the checkpoint.
    num_modules: int = 0

    @property
    def has_experts(self) -> bool:
        return any(self.experts)

    @property
    def num_layers(self) -> int:
        return len(self.windowed_layers)

    @property
    def attention_features(self) -> frozenset[AttentionFeature]:
        features: set[AttentionFeature] = {"window"} if any(self.windowed_layers) else set()
        return frozenset(features | ({"head_size"} if self.head_dim not in COMMON_HEAD_SIZES else set()))

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


def parse_decoder_config(
    checkpoint: Checkpoint,
    architecture: str,
    *,
    has_head_norm: bool,
    windowed_layers: tuple[bool, ...],
    experts: tuple[ExpertShape | None, ...],
    has_input_bias_alone: bool = False,
    num_modules: int = 0,
) -> DecoderConfig:
    """What every plain decoder writes alike, around what its family has found out.

    `has_input_bias_alone`: queries, keys and values have biases, whatever `attention_bias` says, and nothing else has.
    """
    config = top_section(checkpoint)
    config.check_fixed("hidden_act", "silu")
    quantisation = config.subsection("quantization_config")
    method = None if quantisation is None else quantisation.optional("quant_method")
    if quantisation is not None and method not in METHODS:
        config.fail("quantization_config", f"weights quantised by {method} are not implemented; use the original's")
    hidden_size, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default=num_heads)
    head_dim = config.count("head_dim", default=hidden_size // num_heads)
    if num_heads % num_kv_heads:
        config.fail("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} heads; correct it")
    if head_dim % 2:
        config.fail("head_dim", f"{head_dim} is odd, and a rotary embedding turns pairs; correct it")
    rotary = parse_rotary(config, head_dim)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=config.count("vocab_size"),
        max_model_len=max_model_len(config, rotary),
        eos_token_ids=eos_token_ids(checkpoint, _EOS_FILES),
        hidden_size=hidden_size,
        rms_norm_eps=config.number("rms_norm_eps"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary=rotary,
        has_head_norm=has_head_norm,
        has_attention_bias=has_input_bias_alone or config.flag("attention_bias"),
        has_output_bias=not has_input_bias_alone and config.flag("attention_bias"),
        has_mlp_bias=config.flag("mlp_bias"),
        window=config.count("sliding_window") if any(windowed_layers) else None,
        windowed_layers=windowed_layers,
        dense_width=config.count("intermediate_size"),
        experts=experts,
        is_tied=config.flag("tie_word_embeddings"),
        num_table_rows=config.count("vocab_size"),
        num_modules=num_modules,
    )


def shard_config(config: DecoderConfig, shard: Shard) -> DecoderConfig:
    """The same with one rank's shares: heads, widths, rows of the token table. UserError where they cannot be split."""
    if shard.size == 1:
        return config
    heads = SplitCount(config.num_heads, "attention heads")
    kv_heads = SplitCount(config.num_kv_heads, "key-value heads", is_replicable=True)
    dense = SplitCount(config.dense_width, "columns of the MLP")
    shapes = dict.fromkeys(each for each in config.experts if each is not None)
    experts = [
        SplitCount(each.num_experts, "experts")
        if shard.whole_experts
        else SplitCount(each.width, "columns of an expert", unit=8)
        for each in shapes
    ]
    has_dense = config.num_modules > 0 or any(each is None for each in config.experts)
    check_split([heads, kv_heads, *([dense] if has_dense else []), *experts], shard.size)
    start, stop = shard.range_of(config.vocab_size)
    return replace(
        config,
        num_heads=heads.share(shard.size),
        num_kv_heads=kv_heads.share(shard.size),
        dense_width=dense.share(shard.size),
        experts=tuple(each and _own_experts(each, shard) for each in config.experts),
        num_table_rows=stop - start,
    )


def _own_experts(experts: ExpertShape, shard: Shard) -> ExpertShape:
    if shard.whole_experts:
        return replace(experts, own=shard.experts_of(experts.num_experts))
    return replace(experts, width=experts.width // shard.size)


Shapes = dict[str, tuple[int, ...]]


def layer_prefix(layer: int) -> str:
    """Name of a layer in the checkpoint."""
    return f"model.layers.{layer}."


def expected_tensors(config: DecoderConfig, num_modules: int) -> ExpectedTensors:
    """What the target reads: plain decoders have no modules."""
    assert num_modules == 0
    hidden = config.hidden_size
    table = (config.num_table_rows, hidden)
    required: Shapes = {EMBEDDING: table, FINAL_NORM: (hidden,)}
    # Some tied checkpoints store the head all the same, and old ones the rotary frequencies.
    redundant: Shapes = {HEAD: table} if config.is_tied else {}
    if not config.is_tied:
        required[HEAD] = table
    for layer, experts in enumerate(config.experts):
        prefix = layer_prefix(layer)
        required |= attention_shapes(config, prefix)
        required |= dense_shapes(config, prefix) if experts is None else _expert_shapes(hidden, experts, prefix)
        redundant[prefix + "self_attn.rotary_emb.inv_freq"] = (config.head_dim // 2,)
    return ExpectedTensors(
        required,
        unread={},
        strict_prefixes=("model.", "lm_head."),
        forbidden={},
        float32_suffixes=(".mlp.gate.weight",),
        redundant=redundant,
    )


def attention_shapes(config: DecoderConfig, prefix: str) -> Shapes:
    """Attention and both norms of a layer."""
    hidden = config.hidden_size
    shapes: Shapes = {
        prefix + "input_layernorm.weight": (hidden,),
        prefix + "post_attention_layernorm.weight": (hidden,),
    }
    prefix += "self_attn."
    widths = {"q_proj": config.query_width, "k_proj": config.kv_width, "v_proj": config.kv_width}
    shapes |= {f"{prefix}{name}.weight": (width, hidden) for name, width in widths.items()}
    shapes[prefix + "o_proj.weight"] = (hidden, config.query_width)
    if config.has_attention_bias:
        shapes |= {f"{prefix}{name}.bias": (width,) for name, width in widths.items()}
    if config.has_output_bias:
        shapes[prefix + "o_proj.bias"] = (hidden,)
    if config.has_head_norm:
        shapes |= {f"{prefix}{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return shapes


def dense_shapes(config: DecoderConfig, prefix: str) -> Shapes:
    """The dense MLP of a layer."""
    shapes = _mlp_shapes(config.hidden_size, config.dense_width, prefix + "mlp.")
    if config.has_mlp_bias:
        shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    return shapes


def _expert_shapes(hidden: int, experts: ExpertShape, prefix: str) -> Shapes:
    shapes: Shapes = {prefix + "mlp.gate.weight": (experts.num_experts, hidden)}
    for expert in experts.own:
        shapes |= _mlp_shapes(hidden, experts.width, f"{prefix}mlp.experts.{expert}.")
    return shapes


def _mlp_shapes(hidden: int, width: int, prefix: str) -> Shapes:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }


def target_cache_groups(config: DecoderConfig, element_size: int) -> tuple[CacheGroupSpec, ...]:
    """Keys and values of the layers that see everything, and of those that see a window."""
    streams = (StreamSpec("kv", (2, config.num_kv_heads, config.head_dim)),)

    def group(kind: str, window: int | None, layers: Sequence[str]) -> CacheGroupSpec:
        return CacheGroupSpec(
            name=f"target.{kind}",
            owner="target",
            kind="full_attention" if window is None else "sliding_window",
            layers=tuple(layers),
            streams=(streams,) * len(layers),
            element_size=element_size,
            window=window,
        )

    names = [(layer_prefix(layer), is_windowed) for layer, is_windowed in enumerate(config.windowed_layers)]
    groups = (
        group("full_attention", None, [name for name, is_windowed in names if not is_windowed]),
        group("sliding_window", config.window, [name for name, is_windowed in names if is_windowed]),
    )
    return tuple(group for group in groups if group.layers)
