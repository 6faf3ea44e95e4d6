"""Attention of several rows a request against a read of the same keys by one row."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .ceilings import median_seconds

#: Of Qwen3-8B and others of its size.
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 16
#: Launches that are timed together, each with a cache of its own, so that none finds its keys in the device's.
_NUM_LAYERS = 4


def attention_seconds(device: torch.device, batch: int, num_rows: int, context: int) -> float:
    """Of one layer: `num_rows` rows a request at the end of `context` tokens, blocks in random order."""
    calls = [_layer(device, batch, num_rows, context) for _ in range(_NUM_LAYERS)]

    def all_layers() -> None:
        for call in calls:
            call()

    return median_seconds(all_layers, device, 15) / _NUM_LAYERS


def _layer(device: torch.device, batch: int, num_rows: int, context: int) -> Callable[[], object]:
    from specbench.engine.kernels.paged_attention import PagedBatch, paged_attention, paged_attention_reference

    num_blocks = -(-context // _BLOCK_SIZE)
    order = torch.randperm(batch * num_blocks, device=device).int().view(batch, num_blocks) + 1
    rows = PagedBatch(
        query_start_loc=torch.arange(0, batch * num_rows + 1, num_rows, dtype=torch.int32, device=device),
        first_position=torch.full((batch,), context - num_rows, device=device),
        num_live=None,
        block_table=torch.cat((torch.zeros_like(order[:, :1]), order), 1),
        block_size=_BLOCK_SIZE,
        max_rows=num_rows,
    )
    num_slots = (batch * num_blocks + 1) * _BLOCK_SIZE + 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kv_cache = torch.randn(num_slots, 2, _NUM_KV_HEADS, _HEAD_DIM, device=device, dtype=dtype)
    query = torch.randn(batch * num_rows, _NUM_HEADS, _HEAD_DIM, device=device, dtype=dtype)
    attend = paged_attention if device.type == "cuda" else paged_attention_reference
    return lambda: attend(query, kv_cache, rows, _HEAD_DIM**-0.5)


def cache_bytes(batch: int, context: int) -> int:
    """Of the keys and values that one layer reads, in bf16."""
    return batch * context * 2 * _NUM_KV_HEADS * _HEAD_DIM * 2
