"""The memory of an engine: what its model, its drafter and its steps take, and what that leaves for caches.

Belongs here: one budget of one configuration, before and after weights are loaded. Does not belong here: how blocks
follow from it (memory.py), measuring a step (step_memory.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.config import EngineConfig
from specbench.engine.execution.memory import MemoryPlan, plan_memory
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.step_memory import StepMemory
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.parallel import TensorParallel
from specbench.engine.models.model_config import ModelConfig
from specbench.engine.models.registry import (
    load_model_config,
    open_checkpoint,
    target_cache_groups,
    target_weight_bytes,
)
from specbench.engine.proposers.proposer import ProposerRequirements
from specbench.engine.proposers.registry import make_proposer
from specbench.engine.sampling.drafting import draft_probability_bytes

#: Of plain decoding.
NO_PROPOSER = ProposerRequirements(num_speculative_tokens=0, cache_groups=(), num_prompt_lookahead=0, fixed_bytes=0)


def plan_engine_memory(config: EngineConfig) -> MemoryPlan:
    """The budget of an engine that is not started: nothing is read but the checkpoint's headers."""
    checkpoint = open_checkpoint(config.checkpoint, config.load, config.quantised_weights)
    proposer = make_proposer(config, checkpoint)
    requirements = NO_PROPOSER if proposer is None else proposer.requirements()
    specs = target_cache_groups(checkpoint, config.dtype, config.shard) + requirements.cache_groups
    return budget_memory(config, checkpoint, load_model_config(checkpoint), specs, requirements)


def budget_memory(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    specs: tuple[CacheGroupSpec, ...],
    requirements: ProposerRequirements,
    step_memory: StepMemory | None = None,
) -> MemoryPlan:
    """The k + 1 rows of logits of a full batch exist once a step: they are counted as if they stayed. step_memory: None
    where it was not measured."""
    num_logits = min(config.max_num_seqs * (config.num_speculative_tokens + 1), config.max_num_batched_tokens)
    fixed_bytes = {
        "target_weights": target_weight_bytes(checkpoint, config.dtype, config.device, config.shard),
        "draft_weights": requirements.weight_bytes,
        "logits": num_logits * model_config.vocab_size * torch.float32.itemsize,
        "draft_probabilities": draft_probability_bytes(config, model_config.vocab_size),
        "request_rows": RequestState.of(config, len(specs), model_config.vocab_size, torch.device("meta")).num_bytes,
        "proposer_buffers": requirements.fixed_bytes,
    }
    if step_memory is not None:
        fixed_bytes["activations"] = max(0, step_memory.activations - fixed_bytes["logits"])
        fixed_bytes["graphs"] = step_memory.graphs
    return plan_memory(config, specs, fixed_bytes)


def with_equal_blocks(config: EngineConfig, memory: MemoryPlan, parallel: TensorParallel) -> MemoryPlan:
    """As many blocks as the rank with the fewest can have, where memory decides: block ids mean the same on all."""
    if memory.num_full_blocks is None or config.memory_limit is None or parallel.size == 1:
        return memory
    own = torch.tensor([memory.num_full_blocks], device=config.device)
    fewest = replace(config, num_blocks=int(parallel.all_gather(own).min()), memory_limit=None)
    return plan_memory(fewest, memory.specs, memory.fixed_bytes)


def allocate_caches(memory: MemoryPlan, dtype: torch.dtype, device: torch.device) -> dict[str, CachePool]:
    return {
        spec.name: CachePool(spec, num_blocks, memory.block_size, dtype, device)
        for spec, num_blocks in zip(memory.specs, memory.num_blocks, strict=True)
    }
