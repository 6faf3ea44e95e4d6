"""Which architecture is which family. Configs and checks come without torch; torch is loaded when a model is built.

Belongs here: one line a family, and what everyone asks of a checkpoint through it. Does not belong here: anything that
holds for one family alone.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, Checkpoint
from specbench.engine.checkpoints.checks import ExpectedTensors, check_tensors
from specbench.engine.checkpoints.quantised import imagined_fp8, imagined_nvfp4, keep_in_codes, kept_bytes
from specbench.engine.checkpoints.quantised_slices import check_kept_slices
from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.engine.content.content_tokens import ContentTokens
from specbench.engine.models import (
    decoder_config,
    inkling_caches,
    inkling_config,
    llama_config,
    mimo_config,
    qwen2_config,
    qwen3_config,
)
from specbench.engine.models.model_config import ModelConfig
from specbench.engine.shard import WHOLE, Part, Shard, tensor_parts
from specbench.errors import UserError

if TYPE_CHECKING:
    import torch

    from specbench.engine.checkpoints.weights import WeightReader
    from specbench.engine.layers.attention_backends.backend import AttentionBackend
    from specbench.engine.layers.parallel import TensorParallel
    from specbench.engine.models.target import MTPModules, TargetModel

#: name -> shape
Shapes = Mapping[str, tuple[int, ...]]
#: Bytes of one element, by EngineConfig.dtype.
_ELEMENT_SIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One line of the registry. What takes a config takes the family's own."""

    parse_config: Callable[[Checkpoint], ModelConfig]
    #: (config, number of MTP modules that are read) -> tensors
    expected_tensors: Callable[[Any, int], ExpectedTensors]
    #: (config, bytes of an element) -> groups
    target_cache_groups: Callable[[Any, int], tuple[CacheGroupSpec, ...]]
    #: (config, rank) -> the config with the rank's shares
    shard_config: Callable[[Any, Shard], Any]
    #: Tensors with a row for each token id, of which a rank reads a range.
    vocabulary_tensors: tuple[str, ...]
    #: Module with `load_model`, and with `load_modules` where there are MTP modules; it imports torch.
    implementation: str
    #: (config, number of MTP modules, bytes of an element, faults) -> groups. None: the family has no MTP modules.
    module_cache_groups: Callable[[Any, int, int, Sequence[str]], tuple[CacheGroupSpec, ...]] | None = None
    #: config -> how the kinds of content that the checkpoint has a tower for are written. None: text alone.
    content_tokens: Callable[[Any], dict[str, ContentTokens]] | None = None


def _decoder(parse_config: Callable[[Checkpoint], ModelConfig]) -> ModelFamily:
    """A family of plain decoders."""
    return ModelFamily(
        parse_config,
        decoder_config.expected_tensors,
        decoder_config.target_cache_groups,
        decoder_config.shard_config,
        (decoder_config.EMBEDDING, decoder_config.HEAD),
        "specbench.engine.models.decoder",
    )


#: architecture, as config.json names it -> family
FAMILIES = {
    inkling_config.ARCHITECTURE: ModelFamily(
        inkling_config.parse_config,
        inkling_config.expected_tensors,
        inkling_caches.target_cache_groups,
        inkling_config.shard_config,
        inkling_config.VOCABULARY_TENSORS,
        "specbench.engine.models.inkling",
        inkling_caches.module_cache_groups,
        inkling_config.content_tokens,
    ),
    llama_config.ARCHITECTURE: _decoder(llama_config.parse_config),
    mimo_config.ARCHITECTURE: ModelFamily(
        mimo_config.parse_config,
        mimo_config.expected_tensors,
        decoder_config.target_cache_groups,
        decoder_config.shard_config,
        (decoder_config.EMBEDDING, decoder_config.HEAD),
        "specbench.engine.models.mimo",
        mimo_config.module_cache_groups,
    ),
    qwen2_config.ARCHITECTURE: _decoder(qwen2_config.parse_config),
    qwen3_config.DENSE_ARCHITECTURE: _decoder(qwen3_config.parse_dense_config),
    qwen3_config.MOE_ARCHITECTURE: _decoder(qwen3_config.parse_moe_config),
}


def open_checkpoint(path: str | Path, load: str, quantised_weights: str = "dequantise") -> Checkpoint:
    """A checkpoint folder; with load "random", as if its weights were there in bf16 (FP8 or NVFP4 where config.json
    says so), and drawn when they are read. quantised_weights "keep" marks what products take in codes."""
    checkpoint = Checkpoint.open(path) if load != "random" else _imagined(Checkpoint.of_config(path))
    if quantised_weights != "keep":
        return checkpoint
    tensors = keep_in_codes(checkpoint.tensors)
    if not any(entry.is_kept for entry in tensors.values()):
        raise UserError(
            f"model.quantised_weights: {checkpoint.path} has no quantised matrices that products take; say dequantise"
        )
    return replace(checkpoint, tensors=tensors)


def _imagined(checkpoint: Checkpoint) -> Checkpoint:
    """config.json alone, with the tensors that it implies."""
    config = load_model_config(checkpoint)
    expected = FAMILIES[config.architecture].expected_tensors(config, config.num_modules)
    quantisation = checkpoint.config.get("quantization_config") or {}
    imagine = _IMAGINED.get((quantisation.get("quant_method"), quantisation.get("quant_algo")), _imagined_bf16)
    return replace(checkpoint, tensors=imagine(checkpoint.path / CONFIG_FILE, expected.required))


def _imagined_bf16(file: Path, shapes: Shapes) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, file, "BF16", shape) for name, shape in shapes.items()}


def _imagined_fp8(file: Path, shapes: Shapes) -> dict[str, TensorEntry]:
    """Every projection."""
    quantised = {name: shape for name, shape in shapes.items() if name.endswith("_proj.weight")}
    return _imagined_bf16(file, shapes) | {name: imagined_fp8(name, file, shape) for name, shape in quantised.items()}


def _imagined_nvfp4(file: Path, shapes: Shapes) -> dict[str, TensorEntry]:
    """Routed experts in stacks, those of the first layer that has any left out, as Inkling's are published."""
    stacks = [name for name in shapes if name.endswith((".experts.w13_weight", ".experts.w2_weight"))][2:]
    return _imagined_bf16(file, shapes) | {name: imagined_nvfp4(name, file, shapes[name]) for name in stacks}


#: (quant_method, quant_algo) of config.json -> the tensors of these names and shapes.
_IMAGINED: dict[Any, Callable[[Path, Shapes], dict[str, TensorEntry]]] = {
    ("fp8", None): _imagined_fp8,
    ("modelopt", "NVFP4"): _imagined_nvfp4,
}


def load_model_config(checkpoint: Checkpoint) -> ModelConfig:
    """The family's config of a checkpoint. Raises UserError for an architecture that is not in the registry."""
    architectures = checkpoint.config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UserError(
            f"{checkpoint.path / CONFIG_FILE}: key architectures: expected a list of one name, found "
            f"{architectures!r}; fetch the file again"
        )
    if architectures[0] not in FAMILIES:
        raise UserError(
            f"{checkpoint.path / CONFIG_FILE}: key architectures: {architectures[0]!r} is not implemented, only "
            f"{', '.join(FAMILIES)}; choose another checkpoint, or run it on a server"
        )
    return FAMILIES[architectures[0]].parse_config(checkpoint)


def check_checkpoint(checkpoint: Checkpoint, config: ModelConfig, num_modules: int) -> None:
    """Compare names and shapes with what the target and its first `num_modules` MTP modules read. Reads no weight."""
    if num_modules > config.num_modules:
        raise UserError(
            f"{checkpoint.path}: the checkpoint has {config.num_modules} MTP modules, {num_modules} were asked for; "
            "lower spec.num_speculative_tokens"
        )
    check_tensors(checkpoint, FAMILIES[config.architecture].expected_tensors(config, num_modules))


def build_model(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    attention: AttentionBackend,
    parallel: TensorParallel | None = None,
) -> TargetModel:
    """The target, with its weights; with `parallel`, this rank's share of them."""
    check_checkpoint(checkpoint, config, num_modules=0)
    weights = _reader(checkpoint, config, 0, dtype, device, parallel)
    family = FAMILIES[config.architecture]
    implementation = importlib.import_module(family.implementation)
    own_config = family.shard_config(config, weights.parallel.shard)
    model: TargetModel = implementation.load_model(weights, own_config, attention)
    return model


def _reader(
    checkpoint: Checkpoint,
    config: ModelConfig,
    num_modules: int,
    dtype: torch.dtype,
    device: torch.device,
    parallel: TensorParallel | None,
) -> WeightReader:
    from specbench.engine.checkpoints.weights import WeightReader
    from specbench.engine.layers.parallel import ALONE

    parallel = parallel or ALONE
    return WeightReader(checkpoint, dtype, device, parallel, weight_parts(config, num_modules, parallel.shard))


def weight_parts(config: ModelConfig, num_modules: int, shard: Shard) -> dict[str, Part]:
    """Tensor name -> the slice of it that a rank reads, where that is not all of it."""
    if shard.size == 1:
        return {}
    family = FAMILIES[config.architecture]
    own = family.expected_tensors(family.shard_config(config, shard), num_modules).required
    parts = tensor_parts(family.expected_tensors(config, num_modules).required, own, shard)
    ids = Part(0, *shard.range_of(config.vocab_size))
    return parts | {name: ids for name in family.vocabulary_tensors if name in own}


def build_modules(
    checkpoint: Checkpoint, target: TargetModel, num_modules: int, faults: tuple[str, ...] = ()
) -> MTPModules:
    """The first `num_modules` MTP modules, on the device and in the dtype of a target from the same checkpoint."""
    config = load_model_config(checkpoint)
    check_checkpoint(checkpoint, config, num_modules)
    implementation = importlib.import_module(FAMILIES[config.architecture].implementation)
    weights = _reader(checkpoint, config, num_modules, target.dtype, target.device, target.parallel)
    modules: MTPModules = implementation.load_modules(weights, target, num_modules, faults)
    return modules


def num_parameters(checkpoint: Checkpoint) -> int:
    """Numbers in all tensors of the checkpoint, those left out that repeat others or are constants."""
    config = load_model_config(checkpoint)
    redundant = FAMILIES[config.architecture].expected_tensors(config, 0).redundant
    return sum(math.prod(entry.shape) for name, entry in checkpoint.tensors.items() if name not in redundant)


def _sharded_config(checkpoint: Checkpoint, shard: Shard) -> Any:
    """A rank's share. UserError where there is none."""
    config = load_model_config(checkpoint)
    check_kept_slices(checkpoint.tensors, weight_parts(config, config.num_modules, shard), shard)
    return FAMILIES[config.architecture].shard_config(config, shard)


def target_weight_bytes(checkpoint: Checkpoint, dtype: str, device: str, shard: Shard = WHOLE) -> int:
    """Bytes of what `build_model` would hold, before anything is loaded."""
    import torch

    from specbench.engine.layers.linear import can_pack

    config, size = _sharded_config(checkpoint, shard), _ELEMENT_SIZES[dtype]
    start, stop = shard.range_of(config.vocab_size)
    num_elements = (stop - start) * config.hidden_size
    is_head_copied = config.is_tied and can_pack(num_elements, getattr(torch, dtype), torch.device(device))
    head_copy = num_elements * size if is_head_copied else 0
    expected = FAMILIES[config.architecture].expected_tensors(config, 0)
    return expected.num_bytes(size) - _saved_bytes(checkpoint, expected, size) + head_copy


def module_weight_bytes(checkpoint: Checkpoint, dtype: str, num_modules: int, shard: Shard = WHOLE) -> int:
    """Bytes of what `build_modules` would hold, before anything is loaded."""
    config = _sharded_config(checkpoint, shard)
    size = _ELEMENT_SIZES[dtype]
    with_modules, without = (FAMILIES[config.architecture].expected_tensors(config, n) for n in (num_modules, 0))
    held = [expected.num_bytes(size) - _saved_bytes(checkpoint, expected, size) for expected in (with_modules, without)]
    return held[0] - held[1]


def _saved_bytes(checkpoint: Checkpoint, expected: ExpectedTensors, size: int) -> int:
    """What keeping matrices in codes saves of the bytes of these tensors."""
    held = [(checkpoint.tensors[name], shape) for name, shape in expected.required.items()]
    return sum(math.prod(shape) * size - kept_bytes(entry.dtype, shape) for entry, shape in held if entry.is_kept)


def target_cache_groups(checkpoint: Checkpoint, dtype: str, shard: Shard = WHOLE) -> tuple[CacheGroupSpec, ...]:
    """What `build_model` would register, before anything is loaded."""
    config = _sharded_config(checkpoint, shard)
    return FAMILIES[config.architecture].target_cache_groups(config, _ELEMENT_SIZES[dtype])


def content_tokens(config: ModelConfig) -> dict[str, ContentTokens]:
    """Kinds of content that the model has a tower for, and how they are written in its vocabulary."""
    tokens_of = FAMILIES[config.architecture].content_tokens
    return {} if tokens_of is None else tokens_of(config)


def module_cache_groups(
    checkpoint: Checkpoint, dtype: str, num_modules: int, faults: tuple[str, ...] = (), shard: Shard = WHOLE
) -> tuple[tuple[CacheGroupSpec, ...], int]:
    """What `build_modules` would register, and the hidden size, before anything is loaded."""
    config = _sharded_config(checkpoint, shard)
    groups_of = FAMILIES[config.architecture].module_cache_groups
    assert groups_of is not None, "run_config refuses MTP where the checkpoint has no modules"
    return groups_of(config, num_modules, _ELEMENT_SIZES[dtype], faults), config.hidden_size
