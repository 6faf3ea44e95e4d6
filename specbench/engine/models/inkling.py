"""Inkling: the target and its multi-module MTP head, over paged caches.

Belongs here: wiring of layers, which tensor goes where. Does not belong here: fields and shapes (inkling_config.py),
cache groups (inkling_caches.py), arithmetic of a layer (layers/), the order of drafting (proposers/).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.content.content_tokens import AUDIO
from specbench.engine.kernels.attention import RelativeBias
from specbench.engine.kernels.step_rows import PoolTokens
from specbench.engine.layers.attention import RelativeAttention
from specbench.engine.layers.attention_backends.backend import AttentionBackend, AttentionPass, LayerAttention
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.embedding import Embedding, LogitsHead, num_head_rows
from specbench.engine.layers.linear import Linear, Nvfp4Stack
from specbench.engine.layers.metadata import AttentionMetadata, TargetOutput
from specbench.engine.layers.mlp import GatedMLP, deinterleave
from specbench.engine.layers.moe import CodedExpertStack, ExpertStack, MixtureOfExperts, SharedExpertRouter
from specbench.engine.layers.norm import RMSNorm
from specbench.engine.layers.parallel import Vocabulary
from specbench.engine.layers.short_conv import ShortConv
from specbench.engine.layers.towers import AudioTower, ImageTower
from specbench.engine.models.head_owner import HeadOwner
from specbench.engine.models.inkling_caches import module_cache_groups, target_cache_groups
from specbench.engine.models.inkling_config import (
    AUDIO_PREFIX,
    CHAIN_NORM,
    IMAGE_PREFIX,
    AttentionShape,
    AudioShape,
    InklingConfig,
    image_layer,
    layer_prefix,
    module_prefix,
)
from specbench.engine.models.inkling_image_stages import ImageStage

if TYPE_CHECKING:
    from specbench.engine.kernels.draft_inputs import InputNorms
    from specbench.engine.kernels.short_conv import PickedRows

#: Splits of a product that a convolution adds up: it reads several rows for one.
_MAX_CONVOLVED_SUMS = 2
# group name -> pool
Caches = Mapping[str, CachePool]


class CacheIndex:
    """Where the caches of each block lie."""

    def __init__(self, groups: Sequence[CacheGroupSpec]) -> None:
        # block's tensor prefix -> (group, index of the layer in it), for keys and values, and for convolution inputs
        self.kv: dict[str, tuple[CacheGroupSpec, int]] = {}
        self.conv: dict[str, tuple[CacheGroupSpec, int]] = {}
        for group in groups:
            places = self.conv if group.kind == "short_conv" else self.kv
            places |= {layer: (group, index) for index, layer in enumerate(group.layers)}


class InklingBlock:
    """x += conv(attention(norm(x))); x += conv(mlp(norm(x))). A block hands on the next one's norm of x beside x: the
    convolution, the addition and the norm are one operation."""

    def __init__(
        self,
        config: InklingConfig,
        weights: WeightReader,
        prefix: str,
        shape: AttentionShape,
        kv_place: tuple[CacheGroupSpec, int],
        conv_place: tuple[CacheGroupSpec, int],
        is_sparse: bool,
    ) -> None:
        kv_group, self._kv_index = kv_place
        conv_group, self._conv_index = conv_place
        self.kv_group = kv_group.name
        self.extent = shape.extent
        self._conv_group = conv_group.name
        self._parallel = weights.parallel
        norm_eps = config.rms_norm_eps
        self.attention_norm = RMSNorm(weights.read(prefix + "attn_norm.weight"), norm_eps)
        self._mlp_norm = RMSNorm(weights.read(prefix + "mlp_norm.weight"), norm_eps)
        self._attention = self._read_attention(config, weights, prefix, shape, kv_group.window)
        self._attention_conv = ShortConv(weights.read(prefix + "attn_sconv.weight", torch.float32))
        self._mlp: GatedMLP | MixtureOfExperts
        # A dense MLP's global scale is folded into the fp32 convolution after it, which is linear.
        scale = None
        if is_sparse:
            self._mlp = _read_experts(config, weights, prefix + "mlp.")
        else:
            gate_up = deinterleave(weights.read(prefix + "mlp.w13_dn.weight"))
            self._mlp = GatedMLP(Linear(gate_up), Linear(weights.read(prefix + "mlp.w2_md.weight")))
            scale = weights.read(prefix + "mlp.global_scale", torch.float32)
        self._mlp_conv = ShortConv(weights.read(prefix + "mlp_sconv.weight", torch.float32), scale)

    def _read_attention(
        self, config: InklingConfig, weights: WeightReader, prefix: str, shape: AttentionShape, window: int | None
    ) -> RelativeAttention:
        prefix += "attn."
        head_norm = torch.cat(
            (
                weights.read(prefix + "q_norm.weight").expand(shape.num_heads, -1),
                weights.read(prefix + "k_norm.weight").expand(shape.num_kv_heads, -1),
            )
        )
        kv_conv = torch.cat([weights.read(prefix + f"{name}_sconv.weight", torch.float32) for name in ("k", "v")])
        layer = LayerAttention(
            self.kv_group,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            # Queries and keys are normed per head, hence 1/d and not 1/sqrt(d).
            scale=1.0 / shape.head_dim,
            window=window,
            bias=RelativeBias(weights.read(prefix + "rel_logits_proj.proj"), is_masked_beyond=window is not None),
        )
        return RelativeAttention(
            layer,
            input_projection=Linear(
                weights.read_rows([prefix + f"{name}.weight" for name in ("wq_du", "wr_du", "wk_dv", "wv_dv")])
            ),
            output_projection=Linear(weights.read(prefix + "wo_ud.weight")),
            kv_conv=ShortConv(kv_conv),
            head_norm=RMSNorm(head_norm, config.rms_norm_eps),
            conv_group=self._conv_group,
        )

    def __call__(
        self,
        x: Tensor,
        normed: Tensor,
        metadata: AttentionMetadata,
        attention: AttentionPass,
        caches: Caches,
        log_scale: Tensor | None,
        next_norm: RMSNorm | None,
        picked: PickedRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        # x, normed: [T, hidden]: the input, and it after attention_norm -> the output, and it after next_norm, of which
        # rows are picked where one rank has all of the model, on a GPU
        (kv_cache,) = caches[self.kv_group].layers[self._kv_index]
        kv_inputs, attention_outputs, mlp_outputs = caches[self._conv_group].layers[self._conv_index]
        attended = self._attention(normed, metadata, attention, kv_cache, kv_inputs, log_scale)
        x, normed = self._add_convolved(self._attention_conv, x, attended, attention_outputs, metadata, self._mlp_norm)
        return self._add_convolved(
            self._mlp_conv, x, self._mlp_output(normed), mlp_outputs, metadata, next_norm, picked
        )

    def _mlp_output(self, x: Tensor) -> Tensor:
        """[T, hidden], or its partial sums, where the convolution takes them."""
        if self._parallel.size == 1 and isinstance(self._mlp, GatedMLP):
            return self._mlp.partial_sums(x, most=_MAX_CONVOLVED_SUMS)
        return self._mlp(x)

    def _add_convolved(
        self,
        conv: ShortConv,
        residual: Tensor,
        x: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        norm: RMSNorm | None,
        picked: PickedRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """residual + the convolution of x, of which a rank has a part of every channel, and the norm of that."""
        if self._parallel.size == 1:
            return conv.add_to(residual, x, cache, metadata, self._conv_group, norm, picked)
        assert picked is None
        inboxes = self._parallel.row_inboxes(len(x), x)
        if inboxes is not None:
            return conv.add_to_shared(residual, x.contiguous(), cache, metadata, self._conv_group, norm, inboxes)
        slots, taps = metadata.slot_mapping[self._conv_group], metadata.tap_slots[self._conv_group]
        own = conv(self._parallel.reduce_scatter_channels(x), cache, slots, taps)
        summed = residual + self._parallel.all_gather_channels(own)
        return summed, summed if norm is None else norm(summed)


def _read_experts(config: InklingConfig, weights: WeightReader, prefix: str) -> MixtureOfExperts:
    router = SharedExpertRouter(
        weights.read(prefix + "gate.weight", torch.float32),
        weights.read(prefix + "gate.bias", torch.float32),
        config.num_experts_per_token,
        config.num_shared_experts,
        config.route_scale * weights.read(prefix + "gate.global_scale", torch.float32),
    )
    names = [
        (prefix + "experts.w13_weight", prefix + "experts.w2_weight"),
        (prefix + "shared_experts.shared_w13_weight", prefix + "shared_experts.shared_w2_weight"),
    ]
    own = config.own_experts
    is_coded = weights.is_kept(names[0][0])
    if len(own) == config.num_experts and not is_coded:  # all have one width, and lie in one stack
        return MixtureOfExperts(router, ExpertStack(*_read_stack(weights, names), router.num_chosen))
    routed: ExpertStack | CodedExpertStack
    if is_coded:
        routed = CodedExpertStack(*_read_coded_stack(weights, *names[0]), own.start)
    else:
        num_chosen = config.num_experts_per_token * len(own) / config.num_experts
        routed = ExpertStack(*_read_stack(weights, names[:1]), num_chosen, own.start, are_all=False)
    shared = ExpertStack(*_read_stack(weights, names[1:]), config.num_shared_experts, config.num_experts, are_all=False)
    return MixtureOfExperts(router, routed, shared)


def _read_stack(weights: WeightReader, names: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """gate_up [experts, 2 * width, hidden], gates first, and down [experts, width, hidden] of experts in several
    tensors."""
    gate_up = torch.cat([deinterleave(weights.read(name)) for name, _ in names])
    return gate_up, torch.cat([weights.read(name).transpose(1, 2) for _, name in names]).contiguous()


def _fold_divisor(unembedding: Tensor, divisor: float) -> float:
    """On a GPU, where a division of hiddens is a launch, the head is divided by a power of two, which changes exponents
    alone. Returns what is left to divide by."""
    if not unembedding.is_cuda or math.frexp(divisor)[0] != 0.5:
        return divisor
    unembedding.div_(divisor)
    return 1.0


def _read_coded_stack(weights: WeightReader, gate_up: str, down: str) -> tuple[Nvfp4Stack, Nvfp4Stack]:
    interleaved = weights.read_stack(gate_up)
    rows = deinterleave(interleaved.codes), deinterleave(interleaved.block_scale)
    return Nvfp4Stack(*rows, interleaved.scale), weights.read_stack(down)


def _relative_extents(blocks: Sequence[InklingBlock]) -> dict[str, int]:
    return {block.kv_group: block.extent for block in blocks}


class InklingModel(HeadOwner):
    """The target: token ids to hidden states to logits."""

    def __init__(self, config: InklingConfig, weights: WeightReader, attention: AttentionBackend) -> None:
        self.config = config
        self.attention = attention
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.dtype = weights.dtype
        self.device = weights.device
        self.parallel = weights.parallel
        vocabulary = Vocabulary(config.vocab_size, weights.parallel)
        self._embedding = Embedding(weights.read("model.llm.embed.weight"), vocabulary)
        self._embed_norm = RMSNorm(weights.read("model.llm.embed_norm.weight"), config.rms_norm_eps)
        self._final_norm = RMSNorm(weights.read("model.llm.norm.weight"), config.rms_norm_eps)
        unembedding = weights.read("model.llm.unembed.weight")
        num_own = vocabulary.stop - vocabulary.start
        unembedding = unembedding[: num_head_rows(num_own, len(unembedding), weights.device)]
        divisor = _fold_divisor(unembedding, config.logits_divisor)
        super().__init__(LogitsHead(Linear(unembedding), divisor, vocabulary))
        self._cache_groups = target_cache_groups(config, weights.dtype.itemsize)
        index = CacheIndex(self._cache_groups)
        self._is_local = config.local_layers
        self._blocks = []
        for layer, is_local in enumerate(config.local_layers):
            prefix = layer_prefix(layer)
            self._blocks.append(
                InklingBlock(
                    config,
                    weights,
                    prefix,
                    config.attention(is_local),
                    index.kv[prefix],
                    index.conv[prefix],
                    is_sparse=config.sparse_layers[layer],
                )
            )
        #: What follows each block.
        self._next_norms = [*(block.attention_norm for block in self._blocks[1:]), self._final_norm]
        #: attention group name -> distances that have a bias
        self.relative_extents = _relative_extents(self._blocks)
        self._audio_tower = None if config.audio is None else _read_audio_tower(config.audio, weights)
        self._image_tower = None if config.image is None else _read_image_tower(config.image, weights)
        self.num_bytes = weights.num_bytes

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """What the target keeps per token."""
        return self._cache_groups

    def embed_raw(self, token_ids: Tensor) -> Tensor:
        """Rows of the token table, [T] -> [T, hidden], before the norm that every consumer wants."""
        return self._embedding(token_ids)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]: what `forward` and the MTP modules take."""
        return self._embed_norm(self._embedding(token_ids))

    def encode_content(self, kind: str, rows: Tensor) -> Tensor:
        """Raw content, one token a row -> [num_rows, hidden]: bins [num_rows, bands] of audio, normalised pixels
        [num_rows, moments, size, size, channels] of an image's patches. The norm of the token table does not apply."""
        if kind == AUDIO:
            assert self._audio_tower is not None
            return self._audio_tower(rows)
        assert self._image_tower is not None
        return self._image_tower(rows.to(self.dtype))

    def input_norms(self, module_norm: RMSNorm, num_rows: int) -> InputNorms:
        """How a module with such norms of the previous hidden and the embedding takes tokens of so many rows."""
        from specbench.engine.kernels.draft_inputs import InputNorms

        of_embed, table = self._embed_norm, self._embedding.weight
        own_ids = self.vocabulary.own_ids(num_rows, table)
        return InputNorms(table, of_embed.weight, of_embed.eps, module_norm.weight, module_norm.eps, own_ids)

    def final_norm(self, residual: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._final_norm(residual)

    def forward(self, embeds: Tensor, metadata: AttentionMetadata, caches: Caches) -> TargetOutput:
        """All layers over the rows of one step. Writes the caches of the rows that are live."""
        # embeds: [T, hidden]
        log_scale = self._log_scale(metadata)
        attention = self.attention.start(metadata)
        residual, normed = embeds, self._blocks[0].attention_norm(embeds)
        for block, is_local, next_norm in zip(self._blocks, self._is_local, self._next_norms, strict=True):
            scale = None if is_local else log_scale
            residual, normed = block(residual, normed, metadata, attention, caches, scale, next_norm)
        return TargetOutput(hidden_states=normed, residual=residual)

    def _log_scale(self, metadata: AttentionMetadata) -> Tensor | None:
        # [T, 1, 1]; None where no row of the step can be past the floor
        floor = self.config.log_scaling_floor
        if floor is None or metadata.max_seq_len <= floor:
            return None
        excess = ((metadata.positions + 1) / floor).clamp_(min=1.0).log_()
        return (1.0 + self.config.log_scaling_alpha * excess).view(-1, 1, 1)


#: Towers have an eps of their own, which no field of the config changes.
_TOWER_NORM_EPS = 1e-6


def _read_audio_tower(shape: AudioShape, weights: WeightReader) -> AudioTower:
    final_norm = RMSNorm(weights.read(AUDIO_PREFIX + "final_norm.weight"), _TOWER_NORM_EPS)
    return AudioTower(weights.read(AUDIO_PREFIX + "encoder.weight"), final_norm, shape.num_bands)


def _read_image_tower(stages: Sequence[ImageStage], weights: WeightReader) -> ImageTower:
    return ImageTower(
        [weights.read(image_layer("linear", stage)) for stage in range(len(stages))],
        [RMSNorm(weights.read(image_layer("norm", stage)), _TOWER_NORM_EPS) for stage in range(len(stages) - 1)],
        RMSNorm(weights.read(IMAGE_PREFIX + "final_norm.weight"), _TOWER_NORM_EPS),
        [(stage.t, stage.hw) for stage in stages],
    )


class InklingModule:
    """One MTP module: token embedding and previous hidden to the next hidden."""

    def __init__(self, config: InklingConfig, weights: WeightReader, index: CacheIndex, module: int) -> None:
        prefix = module_prefix(module)
        norms = torch.stack([weights.read(prefix + f"{name}.weight") for name in ("hidden_norm", "embed_norm")])
        #: weight [2, hidden]: the previous hidden, then the embedding
        self._input_norm = RMSNorm(norms, config.rms_norm_eps)
        #: [hidden, 2 * hidden]
        self._input_projection = Linear(weights.read(prefix + "input_proj.weight"))
        shape = config.attention(config.local_modules[module])
        self.block = InklingBlock(
            config,
            weights,
            prefix + "transformer_block.",
            shape,
            index.kv[prefix],
            index.conv[prefix],
            is_sparse=False,
        )

    def inputs(self, token_embeds: Tensor, hidden: Tensor) -> Tensor:
        """[T, hidden] each -> [T, 2 * hidden]."""
        return self._input_norm(torch.stack((hidden, token_embeds), 1)).flatten(1)

    def inputs_of_tokens(self, target: InklingModel, tokens: PoolTokens, hidden: Tensor) -> Tensor:
        """The same in one launch, from the token pool."""
        from specbench.engine.kernels.draft_inputs import module_inputs

        return module_inputs(tokens, hidden, target.input_norms(self._input_norm, len(hidden)))

    def __call__(
        self,
        inputs: Tensor,
        metadata: AttentionMetadata,
        attention: AttentionPass,
        caches: Caches,
        next_norm: RMSNorm | None,
        picked: PickedRows | None = None,
    ) -> Tensor:
        # inputs: [T, 2 * hidden]. The scaling of scores by position is the target's alone.
        x, normed = self.block.attention_norm.of_product(self._input_projection.partial_sums(inputs), inputs.dtype)
        return self.block(x, normed, metadata, attention, caches, None, next_norm, picked)[1]


class InklingMTPModules(HeadOwner):
    """The first N modules of the MTP head. Table, norm of the embedding, and head are the target's."""

    def __init__(
        self,
        config: InklingConfig,
        weights: WeightReader,
        target: InklingModel,
        num_modules: int,
        faults: tuple[str, ...],
    ) -> None:
        super().__init__(target.head)
        self.num_modules = num_modules
        self.attention = target.attention
        self._target = target
        self._cache_groups = module_cache_groups(config, num_modules, weights.dtype.itemsize, faults)
        index = CacheIndex(self._cache_groups)
        self._modules = [InklingModule(config, weights, index, module) for module in range(num_modules)]
        #: attention group name -> distances that have a bias
        self.relative_extents = _relative_extents([module.block for module in self._modules])
        self._chain_norm: RMSNorm | None = None
        if config.chain_hidden_post_norm:
            self._chain_norm = RMSNorm(weights.read(CHAIN_NORM), config.rms_norm_eps)
        self.num_bytes = weights.num_bytes

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """What the modules keep per token, one layer a module."""
        return self._cache_groups

    def forward_module(
        self, module: int, token_embeds: Tensor, hidden: Tensor, metadata: AttentionMetadata, caches: Caches
    ) -> Tensor:
        """One module over the rows of a drafting pass: [T, hidden] -> [T, hidden], which feeds the head and the next
        module alike."""
        inputs = self._modules[module].inputs(token_embeds, hidden)
        return self._modules[module](inputs, metadata, self.attention.start(metadata), caches, self._chain_norm)

    def forward_module_on_tokens(
        self,
        module: int,
        tokens: PoolTokens,
        hidden: Tensor,
        metadata: AttentionMetadata,
        caches: Caches,
        last_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The same from the token pool, in fewer launches, and the hiddens at one row of each request."""
        from specbench.engine.kernels.short_conv import PickedRows

        inputs = self._modules[module].inputs_of_tokens(self._target, tokens, hidden)
        picked = None
        if last_rows is not None and self._target.parallel.size == 1:
            picked = PickedRows(last_rows, hidden.new_empty(len(last_rows), hidden.shape[1]))
        output = self._modules[module](
            inputs, metadata, self.attention.start(metadata), caches, self._chain_norm, picked
        )
        if picked is not None:
            return output, picked.output
        return output, output if last_rows is None else output[last_rows]


def load_model(weights: WeightReader, config: InklingConfig, attention: AttentionBackend) -> InklingModel:
    """The target of a checked checkpoint; `config` holds the rank's shares."""
    return InklingModel(config, weights, attention)


def load_modules(
    weights: WeightReader, target: InklingModel, num_modules: int, faults: tuple[str, ...]
) -> InklingMTPModules:
    """The first `num_modules` modules of a checked checkpoint."""
    return InklingMTPModules(target.config, weights, target, num_modules, faults)
