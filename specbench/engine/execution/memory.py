"""The memory budget: how many blocks each cache group gets, and what everything that is held throughout a run takes.

Belongs here: bytes. Does not belong here: who uses a block (scheduling/kv_cache.py), tensors' layout (layers/cache.py).
What steps take beside it is in it on a GPU, where it is measured before the caches are sized (step_memory.py); on a CPU
it is what the share of memory that `cache.memory_fraction` leaves is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    #: What is held beside the caches: weights, logits, request rows, a proposer's buffers; on a GPU, once an engine has
    #: started, the activations of the largest step and the graphs. Line -> bytes
    fixed_bytes: Mapping[str, int]

    @property
    def num_full_blocks(self) -> int | None:
        """Blocks of each group without a window; None where every group has one."""
        counts = zip(self.specs, self.num_blocks, strict=True)
        return next((count for spec, count in counts if spec.window is None), None)

    def cache_bytes(self, owner: str, *, is_conv: bool | None = None) -> int:
        """Bytes of an owner's caches, the scratch slot of every tensor included; of its convolution windows alone, or
        of all but these."""
        return sum(
            spec.bytes_per_token * (count * self.block_size + 1)
            for spec, count in zip(self.specs, self.num_blocks, strict=True)
            if spec.owner == owner and is_conv in (None, spec.kind == "short_conv")
        )

    def kv_bytes_per_token(self, owner: str) -> int:
        """Bytes that one token takes in all attention groups of an owner; a window's are given back behind it."""
        return sum(spec.bytes_per_token for spec in self.specs if spec.owner == owner and spec.kind != "short_conv")

    @property
    def lines(self) -> dict[str, int]:
        """Every line of the budget, in bytes."""
        return {
            **self.fixed_bytes,
            "target_kv": self.cache_bytes("target", is_conv=False),
            "target_conv": self.cache_bytes("target", is_conv=True),
            "draft_kv": self.cache_bytes("draft", is_conv=False),
            "draft_conv": self.cache_bytes("draft", is_conv=True),
        }

    @property
    def total_bytes(self) -> int:
        return sum(self.lines.values())

    def to_dict(self) -> dict[str, Any]:
        """As it stands in run.json."""
        blocks = zip(self.specs, self.num_blocks, strict=True)
        return {
            "bytes": self.lines,
            "total_bytes": self.total_bytes,
            "kv_bytes_per_token": {owner: self.kv_bytes_per_token(owner) for owner in ("target", "draft")},
            "block_size": self.block_size,
            "num_blocks": {spec.name: count for spec, count in blocks},
        }


def memory_text(plan: MemoryPlan) -> str:
    """The budget on one line."""
    lines = ", ".join(f"{name.replace('_', ' ')} {count / 2**20:,.1f}" for name, count in plan.lines.items() if count)
    target, draft = plan.kv_bytes_per_token("target"), plan.kv_bytes_per_token("draft")
    return f"{plan.total_bytes / 2**20:,.1f} MiB: {lines}; KV bytes a token: target {target:,}, draft {draft:,}"


def plan_memory(config: EngineConfig, specs: tuple[CacheGroupSpec, ...], fixed_bytes: Mapping[str, int]) -> MemoryPlan:
    """Full-attention groups get config.num_blocks, or what max_num_seqs requests of max_model_len tokens need, as far
    as config.memory_limit allows. Windowed groups get what max_num_seqs requests can hold, and with prefix caching as
    much again: of a prefix that is found they need only the window at its end.

    Raises UserError when not even one request of max_model_len fits.
    """
    _check_block_size(config.block_size, specs)
    # Drafts of the last step may lie behind the context's end.
    num_draft_slots = max((spec.num_draft_slots for spec in specs), default=0)
    needs = {spec.name: _windowed_need(config, spec, num_draft_slots) for spec in specs if spec.window is not None}
    longest = num_blocks_for(config.max_model_len + num_draft_slots, config.block_size)
    num_full = config.num_blocks or _affordable_blocks(config, specs, needs, sum(fixed_bytes.values()), longest)
    if num_full - 1 < longest:
        key = "memory_fraction" if config.num_blocks is None else "num_blocks"
        # Windows, rows and logits are those of all requests.
        others = f" or engine.max_num_seqs={config.max_num_seqs}" if config.num_blocks is None else ""
        spent = _where_it_went(config, specs, needs, fixed_bytes)
        if num_full == 0 and config.memory_limit is not None and sum(fixed_bytes.values()) > config.memory_limit:
            raise UserError(
                f"cache.memory_fraction: no cache fits{spent}: what is not cache takes more than there is; take a "
                "smaller model.dtype or model, more ranks (parallel.tensor_parallel_size) or a larger device"
            )
        raise UserError(
            f"cache.{key}: {num_full} blocks of {config.block_size} tokens hold less than one request of "
            f"model.max_model_len={config.max_model_len} tokens ({longest + 1} blocks){spent}: raise it, or lower "
            "model.max_model_len" + others
        )
    plan = MemoryPlan(specs, _blocks_of_groups(config, specs, needs, num_full), config.block_size, fixed_bytes)
    if config.memory_limit is not None and plan.total_bytes > config.memory_limit:
        raise UserError(
            f"cache.num_blocks: with {config.num_blocks} blocks the run takes {memory_text(plan)}; "
            f"cache.memory_fraction allows {config.memory_limit / 2**20:,.1f} MiB: lower the one or raise the other"
        )
    return plan


def _check_block_size(block_size: int, specs: tuple[CacheGroupSpec, ...]) -> None:
    """UserError where the taps of a convolution would lie in more than two blocks."""
    for spec in specs:
        if spec.kind == "short_conv" and spec.window is not None and block_size < spec.window - 1:
            raise UserError(
                f"cache.block_size: {block_size} is below {spec.window - 1}, the tokens that a convolution of "
                f"{spec.window} looks back; raise it"
            )


def _windowed_need(config: EngineConfig, spec: CacheGroupSpec, num_draft_slots: int) -> int:
    """Blocks that max_num_seqs requests can hold in a windowed group, chunks of prompts included."""
    num_steps = config.pipeline_depth + 1
    num_rows = num_steps * (config.num_speculative_tokens + 1) + num_draft_slots
    return (
        1
        + config.max_num_seqs * (window_blocks(spec, config.block_size, num_rows) + 1)
        + num_blocks_for(num_steps * config.max_num_batched_tokens, config.block_size)
    )


def _blocks_of_groups(
    config: EngineConfig, specs: tuple[CacheGroupSpec, ...], needs: Mapping[str, int], num_full: int
) -> tuple[int, ...]:
    def of_window(need: int) -> int:
        return max(need, min(2 * need, num_full)) if config.prefix_caching else need

    return tuple(num_full if spec.window is None else of_window(needs[spec.name]) for spec in specs)


def _cache_bytes(config: EngineConfig, specs: tuple[CacheGroupSpec, ...], num_blocks: tuple[int, ...]) -> int:
    pairs = zip(specs, num_blocks, strict=True)
    return sum(spec.bytes_per_token * (count * config.block_size + 1) for spec, count in pairs)


def _affordable_blocks(
    config: EngineConfig,
    specs: tuple[CacheGroupSpec, ...],
    needs: Mapping[str, int],
    fixed_bytes: int,
    longest: int,
) -> int:
    """The most blocks, up to what is wanted, whose caches fit beside everything else."""
    wanted = 1 + config.max_num_seqs * longest
    if config.memory_limit is None:
        return wanted
    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        num_bytes = _cache_bytes(config, specs, _blocks_of_groups(config, specs, needs, middle))
        low, high = (middle, high) if fixed_bytes + num_bytes <= config.memory_limit else (low, middle - 1)
    return low


def _where_it_went(
    config: EngineConfig, specs: tuple[CacheGroupSpec, ...], needs: Mapping[str, int], fixed_bytes: Mapping[str, int]
) -> str:
    """What else is in the limit; nothing where the number of blocks was given."""
    if config.num_blocks or config.memory_limit is None:
        return ""
    windows = _cache_bytes(config, specs, _blocks_of_groups(config, specs, needs, 0))
    lines = {**fixed_bytes, "windows": windows}
    spent = ", ".join(f"{name.replace('_', ' ')} {count / 2**20:,.1f}" for name, count in lines.items() if count)
    return f" in {config.memory_limit / 2**20:,.1f} MiB beside {spent}"
