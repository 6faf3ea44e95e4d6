"""MiMo: the plain decoder with MTP modules, over paged caches.

Belongs here: the modules' wiring. Does not belong here: fields and shapes (mimo_config.py), the target (decoder.py),
the order of drafting (proposers/).
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.kernels.step_rows import PoolTokens
from specbench.engine.layers.linear import make_linear
from specbench.engine.layers.metadata import AttentionMetadata
from specbench.engine.layers.norm import RMSNorm
from specbench.engine.models.decoder import Caches, DecoderLayer, DecoderModel, load_model
from specbench.engine.models.decoder_config import DecoderConfig
from specbench.engine.models.head_owner import HeadOwner
from specbench.engine.models.mimo_config import module_cache_groups, module_prefix

__all__ = ["load_model", "load_modules"]


class MiMoModule:
    """One MTP module: the previous hidden and a token's embedding to the next hidden, normed."""

    def __init__(
        self, config: DecoderConfig, weights: WeightReader, target: DecoderModel, group: CacheGroupSpec, module: int
    ) -> None:
        prefix = module_prefix(module)
        norms = torch.stack([weights.read(f"{prefix}{name}_layernorm.weight") for name in ("hidden", "token")])
        #: weight [2, hidden]: the previous hidden, then the embedding
        self._input_norm = RMSNorm(norms, config.rms_norm_eps)
        self._input_projection = make_linear(weights.read(prefix + "input_proj.weight"))
        self._attention = target.attention
        self._rotary = target.rotary
        self._layer = DecoderLayer(
            config, weights, prefix, None, group, module, heads_by_group=target.attention.heads_by_group
        )
        self._final_norm = RMSNorm(weights.read(prefix + "final_layernorm.weight"), config.rms_norm_eps)

    def inputs(self, token_embeds: Tensor, hidden: Tensor) -> Tensor:
        """[T, hidden] each -> [T, 2 * hidden]."""
        return self._input_norm(torch.stack((hidden, token_embeds), 1)).flatten(1)

    def inputs_of_tokens(self, target: DecoderModel, tokens: PoolTokens, hidden: Tensor) -> Tensor:
        """The same in one launch, from the token pool."""
        from specbench.engine.kernels.draft_inputs import InputNorms, module_inputs

        norm, table = self._input_norm, target.token_table
        own_ids = target.vocabulary.own_ids(len(hidden), table)
        return module_inputs(tokens, hidden, InputNorms(table, None, 0.0, norm.weight, norm.eps, own_ids))

    def __call__(self, inputs: Tensor, metadata: AttentionMetadata, caches: Caches) -> Tensor:
        # inputs: [T, 2 * hidden]
        product = self._input_projection.partial_sums(inputs)
        x, normed = self._layer.attention_norm.of_product(product, inputs.dtype)
        attention, rotation = self._attention.start(metadata), self._rotary(metadata.positions)
        return self._layer(x, normed, metadata, attention, rotation, caches, self._final_norm)[1]


class MiMoModules(HeadOwner):
    """The first N modules. Table and head are the target's."""

    def __init__(self, config: DecoderConfig, weights: WeightReader, target: DecoderModel, num_modules: int) -> None:
        super().__init__(target.head)
        self.num_modules = num_modules
        self.attention = target.attention
        self._target = target
        self._cache_groups = module_cache_groups(config, num_modules, weights.dtype.itemsize, ())
        (group,) = self._cache_groups
        self._modules = [MiMoModule(config, weights, target, group, module) for module in range(num_modules)]
        #: Nothing has a window.
        self.relative_extents = {group.name: 0}
        self.num_bytes = weights.num_bytes

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        """What the modules keep per token, one layer a module."""
        return self._cache_groups

    def forward_module(
        self, module: int, token_embeds: Tensor, hidden: Tensor, metadata: AttentionMetadata, caches: Caches
    ) -> Tensor:
        """One module over the rows of a drafting pass: [T, hidden] -> [T, hidden], which feeds the head and the next
        pass alike."""
        return self._modules[module](self._modules[module].inputs(token_embeds, hidden), metadata, caches)

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
        inputs = self._modules[module].inputs_of_tokens(self._target, tokens, hidden)
        output = self._modules[module](inputs, metadata, caches)
        return output, output if last_rows is None else output[last_rows]


def load_modules(weights: WeightReader, target: DecoderModel, num_modules: int, faults: tuple[str, ...]) -> MiMoModules:
    """The first `num_modules` modules of a checked checkpoint. Faults act in the proposer."""
    return MiMoModules(target.config, weights, target, num_modules)
