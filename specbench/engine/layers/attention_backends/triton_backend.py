"""Attention by the Triton kernel: paged, any rows a request, windows, relative bias; its launches can be captured."""

from __future__ import annotations

from torch import Tensor

from specbench.engine.kernels.attention_bias import RelativeTerm
from specbench.engine.kernels.paged_attention import new_arrivals, paged_attention
from specbench.engine.kernels.step_rows import PagedBatch
from specbench.engine.layers.attention_backends.backend import LayerAttention
from specbench.engine.layers.metadata import AttentionMetadata


class TritonAttention:
    """The backend."""

    needs_segments = False
    heads_by_group = False
    is_capturable = True

    def __init__(self) -> None:
        #: Of the device that it runs on: passes follow one another there.
        self._arrivals: Tensor | None = None

    def replay_plans(self, max_seq_len: int) -> None:
        return None

    def start(self, metadata: AttentionMetadata) -> TritonPass:
        if self._arrivals is None:
            self._arrivals = new_arrivals(metadata.paged.query_start_loc.device)
        return TritonPass(metadata, self._arrivals)


class TritonPass:
    """One forward pass."""

    def __init__(self, metadata: AttentionMetadata, arrivals: Tensor) -> None:
        paged = metadata.paged
        self._batches = {
            group: PagedBatch(
                query_start_loc=paged.query_start_loc,
                first_position=paged.first_position,
                num_live=paged.num_live,
                block_table=table,
                block_size=paged.block_size,
                max_rows=paged.max_rows,
                arrivals=arrivals,
            )
            for group, table in paged.block_tables.items()
        }

    def attend(
        self,
        layer: LayerAttention,
        query: Tensor,
        kv_cache: Tensor,
        relative: Tensor | None = None,
        log_scale: Tensor | None = None,
    ) -> Tensor:
        term = None
        if layer.bias is not None:
            assert relative is not None
            term = RelativeTerm(relative, layer.bias.profiles)
        batch = self._batches[layer.kv_group]
        factor = None if log_scale is None else log_scale.view(-1)
        return paged_attention(query, kv_cache, batch, layer.scale, layer.window, term, factor).flatten(1)
