"""The plain decoder over paged caches: Llama, Qwen3 and their like.

Belongs here: wiring of layers, which tensor goes where. Does not belong here: fields and shapes (decoder_config.py),
arithmetic of a layer (layers/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.layers.attention import RotaryAttention, by_group
from specbench.engine.layers.attention_backends.backend import AttentionBackend, AttentionPass, LayerAttention
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.embedding import Embedding, LogitsHead
from specbench.engine.layers.huge_pages import use_huge_pages
from specbench.engine.layers.linear import Fp8Matrix, Fp8Stack, Matrix, can_pack, make_linear
from specbench.engine.layers.metadata import AttentionMetadata, TargetOutput
from specbench.engine.layers.mlp import GatedMLP
from specbench.engine.layers.moe import CodedExpertStack, ExpertStack, MixtureOfExperts, SoftmaxRouter
from specbench.engine.layers.norm import RMSNorm
from specbench.engine.layers.parallel import Vocabulary
from specbench.engine.layers.rotary import RotaryEmbedding, Rotation
from specbench.engine.models.decoder_config import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    DecoderConfig,
    ExpertShape,
    layer_prefix,
    target_cache_groups,
)
from specbench.engine.models.head_owner import HeadOwner
from specbench.engine.models.target import TargetModel

# group name -> pool
Caches = Mapping[str, CachePool]


class DecoderLayer:
    """x += attention(norm(x)); x += mlp(norm(x)). A layer hands on the next one's norm of x beside x: the addition and
    the norm are one operation."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: WeightReader,
        prefix: str,
        experts: ExpertShape | None,
        group: CacheGroupSpec,
        cache_index: int,
        *,
        heads_by_group: bool,
    ) -> None:
        self._group = group.name
        self._cache_index = cache_index
        self._parallel = weights.parallel
        self.attention_norm = RMSNorm(weights.read(prefix + "input_layernorm.weight"), config.rms_norm_eps)
        self._mlp_norm = RMSNorm(weights.read(prefix + "post_attention_layernorm.weight"), config.rms_norm_eps)
        self._attention = _read_attention(config, weights, prefix + "self_attn.", group, heads_by_group)
        self._mlp: GatedMLP | MixtureOfExperts
        if experts is None:
            self._mlp = GatedMLP(
                make_linear(
                    *_read_projections(weights, prefix + "mlp.", ("gate_proj", "up_proj"), config.has_mlp_bias)
                ),
                make_linear(
                    *_read_reduced(weights, prefix + "mlp.down_proj", config.has_mlp_bias),
                    may_split=weights.parallel.takes_partial_sums,
                ),
            )
        else:
            self._mlp = _read_experts(experts, weights, prefix + "mlp.")
        #: [T, hidden] -> the same, or its partial sums
        self._mlp_sums = self._mlp.partial_sums
        self.linears = (*self._attention.linears, *(self._mlp.linears if isinstance(self._mlp, GatedMLP) else ()))

    def __call__(
        self,
        x: Tensor,
        normed: Tensor,
        metadata: AttentionMetadata,
        attention: AttentionPass,
        rotation: Rotation,
        caches: Caches,
        next_norm: RMSNorm,
    ) -> tuple[Tensor, Tensor]:
        # x, normed: [T, hidden]: the input, and it after attention_norm -> the output, and it after next_norm
        (kv_cache,) = caches[self._group].layers[self._cache_index]
        attended = self._attention(normed, metadata, attention, rotation, kv_cache)
        x, normed = self._parallel.add_norm(self._mlp_norm, x, attended)
        return self._parallel.add_norm(next_norm, x, self._mlp_sums(normed))


def _read_projections(
    weights: WeightReader, prefix: str, names: Sequence[str], has_bias: bool
) -> tuple[Matrix, Tensor | None]:
    """Projections of the same input as one: weight and bias."""
    weight = weights.read_matrix([f"{prefix}{name}.weight" for name in names])
    return weight, weights.read_rows([f"{prefix}{name}.bias" for name in names]) if has_bias else None


def _read_reduced(weights: WeightReader, name: str, has_bias: bool) -> tuple[Matrix, Tensor | None]:
    """A projection whose products the ranks add up: weight, and the bias, which one rank adds."""
    weight = weights.read_matrix([name + ".weight"])
    return weight, weights.read(name + ".bias").mul_(weights.parallel.rank == 0) if has_bias else None


def _read_attention(
    config: DecoderConfig, weights: WeightReader, prefix: str, group: CacheGroupSpec, heads_by_group: bool
) -> RotaryAttention:
    head_norm = None
    if config.has_head_norm:
        norms = (
            weights.read(prefix + "q_norm.weight").expand(config.num_heads, -1),
            weights.read(prefix + "k_norm.weight").expand(config.num_kv_heads, -1),
        )
        head_norm = RMSNorm(torch.cat(norms), config.rms_norm_eps)
    inputs, input_bias = _read_projections(weights, prefix, ("q_proj", "k_proj", "v_proj"), config.has_attention_bias)
    outputs, output_bias = _read_reduced(weights, prefix + "o_proj", config.has_output_bias)
    of_heads: list[Tensor] = []
    if heads_by_group:
        assert isinstance(inputs, Tensor) and isinstance(outputs, Tensor), "codes stay where heads stay in order"
        of_heads = [inputs, outputs.T, *([] if input_bias is None else [input_bias])]
    for of_queries in of_heads:
        queries = of_queries[: config.query_width]
        queries.copy_(by_group(queries, config.num_kv_heads, config.head_dim))
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    return RotaryAttention(
        LayerAttention(group.name, heads, kv_heads, head_dim, scale=head_dim**-0.5, window=group.window),
        input_projection=make_linear(inputs, input_bias),
        output_projection=make_linear(outputs, output_bias, may_split=weights.parallel.takes_partial_sums),
        head_norm=head_norm,
    )


def _read_experts(experts: ExpertShape, weights: WeightReader, prefix: str) -> MixtureOfExperts:
    router = SoftmaxRouter(
        weights.read(prefix + "gate.weight", torch.float32), experts.num_experts_per_token, experts.is_renormalised
    )
    names = [f"{prefix}experts.{expert}." for expert in experts.own]
    gate_up = weights.read_matrix([f"{name}{half}_proj.weight" for name in names for half in ("gate", "up")])
    down = weights.read_matrix([f"{name}down_proj.weight" for name in names])
    if isinstance(gate_up, Fp8Matrix) and isinstance(down, Fp8Matrix):
        stacks = [_stacked(matrix, len(names)) for matrix in (gate_up, down)]
        return MixtureOfExperts(router, CodedExpertStack(stacks[0], stacks[1], experts.own.start))
    assert isinstance(gate_up, Tensor) and isinstance(down, Tensor)
    stack = ExpertStack(
        gate_up.unflatten(0, (len(names), -1)),
        down.unflatten(0, (len(names), -1)).transpose(1, 2).contiguous(),
        experts.num_experts_per_token * len(names) / experts.num_experts,
        experts.own.start,
        are_all=len(names) == experts.num_experts,
    )
    return MixtureOfExperts(router, stack)


def _stacked(matrix: Fp8Matrix, num_experts: int) -> Fp8Stack:
    return Fp8Stack(matrix.codes.unflatten(0, (num_experts, -1)), matrix.scale.unflatten(0, (num_experts, -1)))


class DecoderModel(HeadOwner):
    """The target: token ids to hidden states to logits."""

    def __init__(self, config: DecoderConfig, weights: WeightReader, attention: AttentionBackend) -> None:
        self.config = config
        self.attention = attention
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.dtype = weights.dtype
        self.device = weights.device
        self.parallel = weights.parallel
        vocabulary = Vocabulary(config.vocab_size, weights.parallel)
        table = weights.read(EMBEDDING)
        self._embedding = Embedding(table, vocabulary)
        head = make_linear(table if config.is_tied else weights.read(HEAD))
        super().__init__(LogitsHead(head, 1.0, vocabulary))
        self._final_norm = RMSNorm(weights.read(FINAL_NORM), config.rms_norm_eps)
        self._cache_groups = target_cache_groups(config, weights.dtype.itemsize)
        places = {name: (group, index) for group in self._cache_groups for index, name in enumerate(group.layers)}
        self._layers = [
            DecoderLayer(
                config,
                weights,
                layer_prefix(layer),
                experts,
                *places[layer_prefix(layer)],
                heads_by_group=attention.heads_by_group,
            )
            for layer, experts in enumerate(config.experts)
        ]
        #: What follows each layer.
        self._next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._final_norm]
        if weights.device.type == "cpu":
            linears = [head, *(linear for layer in self._layers for linear in layer.linears)]
            use_huge_pages(linear.address_range for linear in linears)
        self.rotary = RotaryEmbedding(config.rotary, weights.dtype, weights.device)
        #: attention group name -> distances that are told apart: those within the window, none where all are seen
        self.relative_extents = {group.name: group.window or 0 for group in self._cache_groups}
        #: A packed head holds the tied token table anew.
        is_head_copied = config.is_tied and can_pack(table.numel(), table.dtype, table.device)
        self.num_bytes = weights.num_bytes + (table.nbytes if is_head_copied else 0)

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """What the target keeps per token."""
        return self._cache_groups

    @property
    def token_table(self) -> Tensor:
        """[vocab, hidden], or this rank's rows of it."""
        return self._embedding.weight

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]: what `forward` takes."""
        return self._embedding(token_ids)

    def embed_raw(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]: the same, for these families norm no embedding."""
        return self._embedding(token_ids)

    def final_norm(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._final_norm(x)

    def forward(self, embeds: Tensor, metadata: AttentionMetadata, caches: Caches) -> TargetOutput:
        """All layers over the rows of one step. Writes the caches of the rows that are live."""
        # embeds: [T, hidden]
        rotation = self.rotary(metadata.positions)
        attention = self.attention.start(metadata)
        x, normed = embeds, self._layers[0].attention_norm(embeds)
        for layer, next_norm in zip(self._layers, self._next_norms, strict=True):
            x, normed = layer(x, normed, metadata, attention, rotation, caches, next_norm)
        return TargetOutput(hidden_states=normed, residual=x)


def load_model(weights: WeightReader, config: DecoderConfig, attention: AttentionBackend) -> TargetModel:
    """The target of a checked checkpoint; `config` holds the rank's shares."""
    return DecoderModel(config, weights, attention)
