"""Which architecture is which family. Configs and checks come without torch; torch is loaded when a model is built."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, Checkpoint
from specbench.engine.checkpoints.checks import ExpectedTensors, check_tensors
from specbench.engine.models import inkling_caches, inkling_config
from specbench.engine.models.inkling_config import InklingConfig
from specbench.errors import UserError, near_name

if TYPE_CHECKING:
    import torch

    from specbench.engine.models.inkling import InklingModel
    from specbench.engine.models.target import MTPModules, TargetModel

#: Bytes of one element, by EngineConfig.dtype.
_ELEMENT_SIZES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """One line of the registry."""

    parse_config: Callable[[Checkpoint], InklingConfig]
    expected_tensors: Callable[[InklingConfig, int], ExpectedTensors]
    target_cache_groups: Callable[[InklingConfig, int], tuple[CacheGroupSpec, ...]]
    module_cache_groups: Callable[[InklingConfig, int, int, Sequence[str]], tuple[CacheGroupSpec, ...]]
    #: Module with `load_model` and `load_modules`; it imports torch.
    implementation: str


FAMILIES = {
    inkling_config.ARCHITECTURE: ModelFamily(
        inkling_config.parse_config,
        inkling_config.expected_tensors,
        inkling_caches.target_cache_groups,
        inkling_caches.module_cache_groups,
        "specbench.engine.models.inkling",
    ),
}


def load_model_config(checkpoint: Checkpoint) -> InklingConfig:
    """The family's config of a checkpoint. Raises UserError for an architecture that is not in the registry."""
    architectures = checkpoint.config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise UserError(
            f"{checkpoint.path / CONFIG_FILE}: key architectures: expected a list of one name, found "
            f"{architectures!r}; fetch the file again"
        )
    if architectures[0] not in FAMILIES:
        raise UserError(
            f"{checkpoint.path / CONFIG_FILE}: key architectures: {architectures[0]!r} is not implemented, "
            f"{near_name(str(architectures[0]), FAMILIES)} Choose another checkpoint, or run it on a server"
        )
    return FAMILIES[architectures[0]].parse_config(checkpoint)


def check_checkpoint(checkpoint: Checkpoint, config: InklingConfig, num_modules: int) -> None:
    """Compare names and shapes with what the target and its first `num_modules` MTP modules read. Reads no weight."""
    if num_modules > config.num_modules:
        raise UserError(
            f"{checkpoint.path}: the checkpoint has {config.num_modules} MTP modules, {num_modules} were asked for; "
            "lower spec.num_speculative_tokens"
        )
    check_tensors(checkpoint, FAMILIES[config.architecture].expected_tensors(config, num_modules))


def build_model(
    checkpoint: Checkpoint, config: InklingConfig, dtype: torch.dtype, device: torch.device
) -> InklingModel:
    """The target, with its weights."""
    check_checkpoint(checkpoint, config, num_modules=0)
    implementation = importlib.import_module(FAMILIES[config.architecture].implementation)
    model: InklingModel = implementation.load_model(checkpoint, config, dtype, device)
    return model


def build_modules(
    checkpoint: Checkpoint, target: TargetModel, num_modules: int, faults: tuple[str, ...] = ()
) -> MTPModules:
    """The first `num_modules` MTP modules, on the device and in the dtype of a target from the same checkpoint."""
    config = load_model_config(checkpoint)
    check_checkpoint(checkpoint, config, num_modules)
    implementation = importlib.import_module(FAMILIES[config.architecture].implementation)
    modules: MTPModules = implementation.load_modules(checkpoint, target, num_modules, faults)
    return modules


def target_cache_groups(checkpoint: Checkpoint, dtype: str) -> tuple[CacheGroupSpec, ...]:
    """What `build_model` would register, before anything is loaded."""
    config = load_model_config(checkpoint)
    return FAMILIES[config.architecture].target_cache_groups(config, _ELEMENT_SIZES[dtype])


def module_cache_groups(
    checkpoint: Checkpoint, dtype: str, num_modules: int, faults: tuple[str, ...] = ()
) -> tuple[tuple[CacheGroupSpec, ...], int]:
    """What `build_modules` would register, and the hidden size, before anything is loaded."""
    config = load_model_config(checkpoint)
    groups = FAMILIES[config.architecture].module_cache_groups(config, num_modules, _ELEMENT_SIZES[dtype], faults)
    return groups, config.hidden_size
