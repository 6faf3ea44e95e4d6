"""The memory budget: how many blocks each cache group gets, and what weights, caches and buffers take together.

Belongs here: bytes. Does not belong here: who uses a block (scheduling/kv_cache.py), tensors' layout (layers/cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.config import EngineConfig
from specbench.engine.scheduling.kv_cache import num_blocks_for, window_blocks
from specbench.errors import UserError


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Blocks per cache group, and predicted bytes."""

    specs: tuple[CacheGroupSpec, ...]
    #: Blocks of each group, the null block included.
    num_blocks: tuple[int, ...]
    block_size: int
    fixed_bytes: int

    def cache_bytes(self, owner: str) -> int:
        """Bytes of an owner's caches, the scratch slot of every tensor included."""
        return sum(
            spec.bytes_per_token * (count * self.block_size + 1)
            for spec, count in zip(self.specs, self.num_blocks, strict=True)
            if spec.owner == owner
        )


def plan_memory(config: EngineConfig, specs: tuple[CacheGroupSpec, ...], fixed_bytes: int) -> MemoryPlan:
    """Full-attention groups get config.num_blocks, or what max_num_seqs requests of max_model_len tokens need, as far
    as config.cache_bytes_limit allows; windowed groups always get what max_num_seqs requests can hold.

    Raises UserError when not even one request of max_model_len fits.
    """
    num_steps = config.pipeline_depth + 1
    num_rows = num_steps * (config.num_speculative_tokens + 1)
    longest = num_blocks_for(
        config.max_model_len + max((s.num_draft_slots for s in specs), default=0), config.block_size
    )
    windowed_blocks = {
        spec.name: 1
        + config.max_num_seqs * (window_blocks(spec, config.block_size, num_rows) + 1)
        + num_blocks_for(num_steps * config.max_num_batched_tokens, config.block_size)
        for spec in specs
        if spec.window is not None
    }
    num_full = config.num_blocks or _affordable_blocks(config, specs, windowed_blocks, fixed_bytes, longest)
    if num_full - 1 < longest:
        raise UserError(
            f"cache.num_blocks: {num_full} blocks of {config.block_size} tokens hold less than one request of "
            f"model.max_model_len={config.max_model_len} tokens ({longest + 1} blocks): raise cache.num_blocks or "
            "cache.memory_fraction, or lower model.max_model_len"
        )
    return MemoryPlan(
        specs=specs,
        num_blocks=tuple(windowed_blocks.get(spec.name, num_full) for spec in specs),
        block_size=config.block_size,
        fixed_bytes=fixed_bytes,
    )


def _affordable_blocks(
    config: EngineConfig,
    specs: tuple[CacheGroupSpec, ...],
    windowed_blocks: dict[str, int],
    fixed_bytes: int,
    longest: int,
) -> int:
    wanted = 1 + config.max_num_seqs * longest
    block_bytes = sum(spec.bytes_per_token for spec in specs if spec.window is None) * config.block_size
    if block_bytes == 0 or config.cache_bytes_limit is None:
        return wanted
    windowed = [spec for spec in specs if spec.window is not None]
    windowed_bytes = sum(spec.bytes_per_token * windowed_blocks[spec.name] for spec in windowed) * config.block_size
    left = config.cache_bytes_limit - windowed_bytes - fixed_bytes
    return min(wanted, max(left, 0) // block_bytes)
