"""Attention by FlashInfer's paged prefill (its fa2 kernel), for decoding and verification as well: decoding on matrix
units is the same kernel.

The kernel runs by a plan that the host makes from lengths, and with steps that overlap the host knows no more than an
upper bound of them. So it plans for the bounds, and a variant of the kernel asks the device for the position of each
request's first row, and sees no key behind a row's own: nothing waits. What a graph holds is planned anew before each
replay, into the same buffers.

Belongs here: what FlashInfer is asked for. Does not belong here: which backend runs (choose.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specbench.engine.layers.attention_backends.backend import LayerAttention, ReplayPlans
from specbench.engine.layers.metadata import AttentionMetadata, HostRows, PagedRows
from specbench.engine.layers.to_device import copy_in
from specbench.errors import UserError

#: Keys behind a row's own are not seen, nor those before its window (0: there is none). Scores are compared before they
#: are scaled, and 5e4 is what FlashInfer takes for infinity.
_VARIANT = """
struct BoundedLengths : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  int32_t first, window;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ BoundedLengths(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    first = int32_t(params.first_position[batch_idx]);
    window = params.window == 0 ? INT32_MAX : int32_t(params.window);
    sm_scale_log2 = params.sm_scale * math::log2e;
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t distance = first + int32_t(qo_idx) - int32_t(kv_idx);
    return distance >= 0 && distance < window ? logits : -math::inf;
  })
};
"""
#: Of FlashInfer's interface: keys up to a bound; tokens before heads in a page; pieces of keys as it sees fit.
_CAUSAL, _TOKENS_FIRST, _ANY_PIECES = 1, 0, -1
#: Steps without a request of more rows are taken for decoding or verification.
_MOST_DECODE_ROWS = 16


@dataclass(frozen=True, slots=True)
class _Heads:
    """What layers must agree in to share a plan."""

    kv_group: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, layer: LayerAttention) -> _Heads:
        return cls(layer.kv_group, layer.num_heads, layer.num_kv_heads, layer.head_dim)


class FlashInferAttention:
    """The backend."""

    needs_segments = False
    heads_by_group = False
    is_capturable = True

    def __init__(self) -> None:
        self._memory = _Memory()
        self._recorded: _RecordedPasses | None = None

    def start(self, metadata: AttentionMetadata) -> FlashInferPass:
        if self._recorded is not None:
            return self._recorded.start(metadata.paged)
        assert metadata.paged.host is not None, "a step whose rows the device alone knows is recorded"
        return FlashInferPass(metadata.paged, metadata.paged.host, {}, self._memory, is_recorded=False)

    def replay_plans(self, max_seq_len: int) -> ReplayPlans:
        return _RecordedPasses(self, self._memory, max_seq_len)

    @contextmanager
    def recording(self, passes: _RecordedPasses) -> Iterator[None]:
        """Passes that start meanwhile are those of a function that is recorded."""
        self._recorded = passes
        try:
            yield
        finally:
            self._recorded = None


class FlashInferPass:
    """One forward pass: one plan for all layers that agree in what it depends on."""

    def __init__(
        self, paged: PagedRows, host: HostRows, plans: dict[_Heads, _Plan], memory: _Memory, *, is_recorded: bool
    ) -> None:
        self._paged = paged
        self._host = host
        # Those of a recorded pass are there from its first call on, and made anew before each replay.
        self._plans = plans
        self._memory = memory
        self._is_recorded = is_recorded
        # [pages] int32, request by request
        self._pages: dict[_Heads, Tensor] = {}

    def attend(
        self,
        layer: LayerAttention,
        query: Tensor,
        kv_cache: Tensor,
        relative: Tensor | None = None,
        log_scale: Tensor | None = None,
    ) -> Tensor:
        assert layer.bias is None and relative is None and log_scale is None, "choose.py refuses such models"
        heads = _Heads.of(layer)
        if heads not in self._plans:
            shape = _PlanShape(heads, self._host, self._paged.block_size, self._is_recorded)
            self._plans[heads] = _Plan(shape, query.dtype, query.device, self._memory)
        plan = self._plans[heads]
        if heads not in self._pages:
            self._pages[heads] = plan.pages(self._paged.block_tables[heads.kv_group])
        # Without the scratch row: [blocks, block_size, 2, kv_heads, d]
        cache = kv_cache[:-1].unflatten(0, (-1, self._paged.block_size))
        return plan.run(query.contiguous(), cache, self._pages[heads], self._paged.first_position, layer).flatten(1)


class _RecordedPasses:
    """The passes of one recorded function, in their order. Their plans are made before each replay."""

    def __init__(self, backend: FlashInferAttention, memory: _Memory, max_seq_len: int) -> None:
        self._backend = backend
        self._memory = memory
        self._max_seq_len = max_seq_len
        # of each pass: rows and bounds as they were recorded (None: the device alone knows who has which), and plans
        self._passes: list[tuple[HostRows | None, dict[_Heads, _Plan]]] = []
        self._num_started = 0

    def calls(self) -> AbstractContextManager[None]:
        self._num_started = 0
        return self._backend.recording(self)

    def start(self, paged: PagedRows) -> FlashInferPass:
        if self._num_started == len(self._passes):
            self._passes.append((paged.host, {}))
        plans = self._passes[self._num_started][1]
        self._num_started += 1
        # Where the device alone knows, the last request, which is padding, has all rows for now.
        unknown = HostRows((*[0] * paged.num_reqs, paged.max_rows), [self._max_seq_len] * paged.num_reqs)
        return FlashInferPass(paged, paged.host or unknown, plans, self._memory, is_recorded=True)

    def make(self, rows: HostRows) -> None:
        for recorded, plans in self._passes:
            starts = (rows if recorded is None else recorded).query_start_loc_np
            bounds = np.zeros(len(starts) - 1, np.int64)
            bounds[: len(rows.max_seq_lens_np)] = rows.max_seq_lens_np
            if recorded is not None:
                # Passes of drafting reach so far behind the target's rows.
                bounds += np.asarray(recorded.max_seq_lens_np) - self._max_seq_len
            for plan in plans.values():
                plan.make(starts, bounds)


class _Memory:
    """What plans share."""

    def __init__(self) -> None:
        self._workspace: Tensor | None = None
        # smaller ones, which graphs go on using
        self._outgrown: list[Tensor] = []
        # pinned, each with the copy that it waits for
        self._staging: list[tuple[Tensor, torch.cuda.Event]] = []

    def workspace(self, num_bytes: int, device: torch.device) -> Tensor:
        """Where results of pieces of keys wait to be merged. One for all: no two kernels run at a time."""
        if self._workspace is None or len(self._workspace) < num_bytes:
            if self._workspace is not None:
                self._outgrown.append(self._workspace)
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._workspace

    @contextmanager
    def staging(self, tables: Tensor) -> Iterator[Tensor]:
        """Host memory for tables on their way to the device, used again when its last copy is done."""
        if not tables.is_cuda:
            yield torch.empty_like(tables)
            return
        free = (
            index for index, (piece, copied) in enumerate(self._staging) if len(piece) >= len(tables) and copied.query()
        )
        found = next(free, None)
        piece, copied = (
            (torch.empty(len(tables), dtype=torch.uint8, pin_memory=True), torch.cuda.Event())
            if found is None
            else self._staging.pop(found)
        )
        yield piece
        copied.record()
        self._staging.append((piece, copied))


@dataclass(frozen=True, slots=True)
class _PlanShape:
    """What does not change from plan to plan."""

    heads: _Heads
    #: Rows and bounds of the first plan.
    host: HostRows
    block_size: int
    #: Whether a graph holds what runs by the plan: then all plans have as many requests and rows as the first.
    is_recorded: bool

    @property
    def num_reqs(self) -> int:
        return len(self.host.query_start_loc_np) - 1

    @property
    def num_rows(self) -> int:
        return self.host.query_start_loc_np[-1]

    @property
    def is_of_one_form(self) -> bool:
        """Whether the plan has room for any lengths, as a graph needs it. Decoding and verification that nobody records
        have it, too: tiles and pieces, and so the order of sums, are then those of a graph of as many requests, and the
        output check's replay rounds as the run did."""
        most_rows = int(np.diff(self.host.query_start_loc_np).max())
        return self.is_recorded or most_rows <= _MOST_DECODE_ROWS

    @property
    def group(self) -> int:
        """Heads that share a key head: their rows are rows of one tile."""
        return self.heads.num_heads // self.heads.num_kv_heads

    def _num_at_once(self, num_processors: int) -> int:
        """Tiles that run at a time, to which pieces of keys are counted out."""
        return 2 * num_processors // self.heads.num_kv_heads

    def workspace_bytes(self, num_processors: int) -> int:
        """What FlashInfer takes for a plan of this shape: a float for each number of a result, and one for its weight,
        of as many tiles as run at a time, or as a graph has room for."""
        num_tiles, head_dim = max(self._num_at_once(num_processors), 1), self.heads.head_dim
        tile_rows = 64 if head_dim >= 256 else 128
        if self.is_of_one_form:
            most_rows = (self.num_rows - self.num_reqs + 1) * self.group
            tile_rows = 16 if most_rows <= 16 else 64 if most_rows <= 64 else tile_rows
            num_tiles = max(num_tiles, -(-self.num_rows * self.group // tile_rows) + self.num_reqs - 1)
        return self.heads.num_heads * num_tiles * tile_rows * (head_dim + 1) * 4 + 64

    def table_bytes(self, num_processors: int) -> int:
        """At most: four numbers for each tile and piece, with tiles of 16 rows, one for each row and each request."""
        num_tiles = max(self._num_at_once(num_processors), self.num_rows * self.group // 16 + self.num_reqs + 1)
        return 4 * (4 * num_tiles + self.num_rows + self.num_reqs) + 1024


class _Plan:
    """The present plan of layers that share one. Everything lies where it lay for the plan before."""

    def __init__(self, shape: _PlanShape, dtype: torch.dtype, device: torch.device, memory: _Memory) -> None:
        self._shape = shape
        self._memory = memory
        self._kernel = _kernel(shape.heads.head_dim, dtype)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        self._workspace = memory.workspace(shape.workspace_bytes(processors), device)
        self._tables = torch.empty(shape.table_bytes(processors), dtype=torch.uint8, device=device)
        # [3, num_reqs + 1] int32: first row and first page of each request, and how many keys its last page has
        self._starts = torch.empty(3, shape.num_reqs + 1, dtype=torch.int32, device=device)
        self._num_pages = 0
        self._layout: Any = None
        self.make(shape.host.query_start_loc_np, np.asarray(shape.host.max_seq_lens_np))

    def make(self, query_start_loc_np: Sequence[int], max_seq_lens_np: np.ndarray) -> None:
        """For requests with these rows and at most so many keys, [num_reqs + 1] and [num_reqs]."""
        shape, heads = self._shape, self._shape.heads
        rows = np.asarray(query_start_loc_np, np.int32)
        # None without a key, and none with fewer than rows.
        num_keys = np.maximum(max_seq_lens_np, np.maximum(np.diff(rows), 1)).astype(np.int32)
        num_pages = -(-num_keys // shape.block_size)
        pages = np.concatenate([[0], np.cumsum(num_pages)]).astype(np.int32)
        self._num_pages = int(pages[-1])
        copy_in(self._starts, np.stack([rows, pages, np.append(num_keys - (num_pages - 1) * shape.block_size, 0)]))
        with self._memory.staging(self._tables) as staging:
            self._layout = self._kernel.plan(
                self._workspace,
                self._tables,
                staging,
                torch.from_numpy(rows),
                torch.from_numpy(pages),
                torch.from_numpy(num_keys),
                shape.num_rows,
                shape.num_reqs,
                heads.num_heads,
                heads.num_kv_heads,
                shape.block_size,
                shape.is_of_one_form,
                heads.head_dim,
                heads.head_dim,
                True,  # causal
                -1,  # the variant knows of windows
                _ANY_PIECES,
                False,  # pieces are allowed
                0,  # nothing else runs beside it
            )

    def pages(self, block_table: Tensor) -> Tensor:
        """[num_pages] int32: the requests' pages, from a table of [num_reqs, num_columns]. A graph, which serves all
        lengths, has room for all that there can be; behind the last one any will do."""
        num_columns = block_table.shape[1]
        count = self._shape.num_reqs * (num_columns - 1) if self._shape.is_recorded else self._num_pages
        place = torch.arange(count, dtype=torch.int32, device=block_table.device)
        starts = self._starts[1]
        request = torch.searchsorted(starts[1:], place, right=True).clamp_max_(self._shape.num_reqs - 1)
        # Bounds may reach behind the table; nobody sees those keys.
        column = (place - starts[request] + 1).clamp_max_(num_columns - 1)
        return block_table[request, column]

    def run(self, query: Tensor, cache: Tensor, pages: Tensor, first_position: Tensor, layer: LayerAttention) -> Tensor:
        """query [T, heads, d], cache [blocks, block_size, 2, kv_heads, d] -> [T, heads, d]"""
        output = torch.empty_like(query)
        row_starts, page_starts, last_page = self._starts
        self._kernel.paged_run(
            self._workspace,
            self._tables,
            self._layout,
            query,
            cache[:, :, 0],
            cache[:, :, 1],
            row_starts,
            page_starts,
            pages,
            last_page[:-1],
            output,
            None,  # sums of weights are not wanted
            _CAUSAL,
            _TOKENS_FIRST,
            -1,
            True,  # starts while the kernel before it ends, and waits before it reads what that one writes
            first_position,
            layer.scale,
            layer.window or 0,
        )
        return output


@cache
def _kernel(head_dim: int, dtype: torch.dtype) -> Any:
    """Compiled on first use, which takes half a minute. UserError where that fails."""
    from flashinfer.jit.attention import gen_customize_batch_prefill_module

    module = gen_customize_batch_prefill_module(
        # Left to itself it takes fa3 on Hopper, which is two to four times as slow for rows of verification.
        "fa2",
        f"specbench_bounded_{head_dim}_{str(dtype).removeprefix('torch.')}",
        dtype,
        dtype,
        dtype,
        torch.int32,
        head_dim,
        head_dim,
        ["first_position"],
        ["int64_t"],
        ["sm_scale", "window"],
        ["double", "int64_t"],
        "BoundedLengths",
        _VARIANT,
    )
    try:
        return module.build_and_load()
    except (RuntimeError, OSError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UserError(
            f"engine.attention_backend: flashinfer cannot compile its kernels ({reason}): it takes nvcc and ninja; "
            "say triton, which takes neither"
        ) from error
