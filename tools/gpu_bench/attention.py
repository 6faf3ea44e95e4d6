"""Attention of several rows a request against a read of the same keys by one row, by each backend."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbench.engine.cache_group import CacheGroupSpec, StreamSpec
from specbench.engine.layers.attention_backends.backend import AttentionBackend, AttentionPass, LayerAttention
from specbench.engine.layers.attention_backends.choose import BACKENDS, make_backend
from specbench.engine.layers.metadata import AttentionMetadata, RowLayout
from specbench.engine.layers.metadata_builder import AttentionMetadataBuilder

from .cases import synchronize
from .ceilings import median_seconds

#: Of Qwen3-8B and others of its size.
_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 32, 8, 128, 16
#: Layers that are timed together, each with a cache of its own, so that none finds its keys in the device's.
_NUM_LAYERS = 4


@dataclass(frozen=True, slots=True)
class AttentionTime:
    """Seconds of one layer on the device, and of a step's beginning with its first layer on the host."""

    layer_s: float
    host_s: float


def timed_backends(device: torch.device) -> list[str]:
    """Those that read pages where they lie and are installed; on a CPU the reference, for a trial."""
    if device.type != "cuda":
        return ["torch"]
    packages = {name: BACKENDS[name].package for name in ("triton", "flashinfer")}
    return [name for name, package in packages.items() if package is None or importlib.util.find_spec(package)]


@torch.inference_mode()
def attention_time(name: str, device: torch.device, batch: int, num_rows: int, context: int) -> AttentionTime:
    """Of `num_rows` rows a request at the end of `context` tokens, blocks in random order."""
    backend = make_backend(name)
    metadata = _metadata(backend, device, batch, num_rows, context)
    attention = backend.start(metadata)
    layers = [_layer(index, device, batch, num_rows, context) for index in range(_NUM_LAYERS)]

    def all_layers() -> None:
        for layer in layers:
            layer(attention)

    layer_s = median_seconds(_recorded(all_layers, device), device, 15) / _NUM_LAYERS
    return AttentionTime(layer_s, _host_seconds(lambda: layers[0](backend.start(metadata)), device))


def _metadata(
    backend: AttentionBackend, device: torch.device, batch: int, num_rows: int, context: int
) -> AttentionMetadata:
    stream = StreamSpec("kv", (2, _NUM_KV_HEADS, _HEAD_DIM))
    groups = tuple(
        CacheGroupSpec(f"kv{index}", "target", "full_attention", (f"layer{index}",), ((stream,),), 2, None)
        for index in range(_NUM_LAYERS)
    )
    extents = dict.fromkeys([group.name for group in groups], 0)
    builder = AttentionMetadataBuilder(groups, _BLOCK_SIZE, extents, device, backend.needs_segments)
    order = torch.stack([torch.randperm(batch * _num_blocks(context), device=device) for _ in groups]).int()
    tables = order.view(_NUM_LAYERS, batch, -1) + 1
    starts = tuple(range(0, batch * num_rows + 1, num_rows))
    layout = RowLayout(starts, torch.full((batch,), context - num_rows, device=device), None, (context,) * batch)
    return builder.build(torch.cat((torch.zeros_like(tables[:, :, :1]), tables), 2), layout)


def _num_blocks(context: int) -> int:
    return -(-context // _BLOCK_SIZE)


def _layer(
    index: int, device: torch.device, batch: int, num_rows: int, context: int
) -> Callable[[AttentionPass], object]:
    num_slots = (batch * _num_blocks(context) + 1) * _BLOCK_SIZE + 1
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kv_cache = torch.randn(num_slots, 2, _NUM_KV_HEADS, _HEAD_DIM, device=device, dtype=dtype)
    query = torch.randn(batch * num_rows, _NUM_HEADS, _HEAD_DIM, device=device, dtype=dtype)
    layer = LayerAttention(f"kv{index}", _NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM, _HEAD_DIM**-0.5, None)
    return lambda attention: attention.attend(layer, query, kv_cache)


def _recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """As a graph where there are any, so that short kernels do not wait for their launches."""
    if device.type != "cuda":
        return work
    work()
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def _host_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median time until the host goes on."""
    seconds = []
    for _ in range(5):
        synchronize(device)
        start_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds)


def cache_bytes(batch: int, context: int) -> int:
    """Of the keys and values that one layer reads, in bf16."""
    return batch * context * 2 * _NUM_KV_HEADS * _HEAD_DIM * 2
