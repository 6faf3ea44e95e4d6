"""Mixture of experts on a GPU: choosing experts, and the products of the rows that chose each.

Nothing is sorted and the host learns nothing: a row's chosen experts are its entries; entries of one expert are given
consecutive places, each expert's beginning at a new tile; a product's program finds its expert by its tile. The grid
covers the most tiles that any choice can need, and programs without a tile end at once. Where other ranks have experts,
entries of theirs get no place, no product and no part in the sum.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.overlap import launch_options

#: Rows that are taken. Places are found by comparing entries with one another, which many rows would make slow.
MAX_ROWS = 1024
_ENTRY_BLOCK = 128
#: Rows up to which `router_logits` beats a library's fp32 product, which first wants the rows in fp32.
MAX_ROUTER_ROWS = 64
_ROUTER_EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """What a router made of each row."""

    # [T, chosen] int32
    experts: Tensor
    # [T, chosen] fp32
    weights: Tensor


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Places of entries."""

    # [places] int32: place -> entry; places behind an expert's last entry are not written
    entries: Tensor
    # [experts] int32: entries of each
    counts: Tensor
    tile_rows: int
    #: The most tiles that any choice can need.
    num_tiles: int


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, hidden], weight [experts, hidden] fp32 -> [T, experts] fp32, in fp32 throughout."""
    num_rows, hidden = x.shape
    num_experts = len(weight)
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=x.device)
    assert x.is_contiguous() and weight.is_contiguous()
    block_rows = 1 if num_rows <= 8 else 4
    _router_tile[(triton.cdiv(num_rows, block_rows), triton.cdiv(num_experts, _ROUTER_EXPERTS))](
        x,
        weight,
        logits,
        num_rows,
        EXPERTS=num_experts,
        HIDDEN=hidden,
        BLOCK_ROWS=block_rows,
        BLOCK_EXPERTS=_ROUTER_EXPERTS,
        BLOCK_K=512 // block_rows,
        **launch_options(x.device),
        num_warps=4,
    )
    return logits


def choose_by_softmax(logits: Tensor, num_chosen: int, *, is_renormalised: bool) -> Choice:
    """logits [T, experts] fp32: the largest, weighed by softmax over all, or over the chosen."""
    return _choose(logits, logits, None, num_chosen, is_softmax=True, is_renormalised=is_renormalised)


def choose_by_sigmoid(logits: Tensor, bias: Tensor, scale: Tensor, num_chosen: int) -> Choice:
    """logits [T, experts] fp32, bias [experts] fp32, scale [1] fp32: the largest of sigmoid + bias, weighed by their
    share of the chosen sigmoids, times the scale."""
    return _choose(logits, bias, scale, num_chosen, is_softmax=False, is_renormalised=True)


def choose_by_softmax_reference(logits: Tensor, num_chosen: int, *, is_renormalised: bool) -> Choice:
    """The same in plain torch."""
    weights, experts = logits.softmax(-1).topk(num_chosen, dim=-1)
    return Choice(experts, weights / weights.sum(-1, keepdim=True) if is_renormalised else weights)


def choose_by_sigmoid_reference(logits: Tensor, bias: Tensor, scale: Tensor, num_chosen: int) -> Choice:
    """The same in plain torch. Through logarithms: sigmoids of strongly negative logits would all be zero."""
    experts = (torch.sigmoid(logits) + bias).topk(num_chosen, dim=-1).indices
    return Choice(experts, F.logsigmoid(logits.gather(1, experts)).softmax(-1) * scale)


def run_experts(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor, first_expert: int = 0) -> Tensor:
    """x [T, hidden], gate_up [experts, 2 * width, hidden] (gates first), down [experts, width, hidden] -> [T, hidden]:
    the sum over a row's experts of weight * down(silu(gate(x)) * up(x)), of those from `first_expert` on that are here.
    """
    num_rows, hidden = x.shape
    num_experts, width, _ = down.shape
    num_chosen = choice.experts.shape[1]
    num_entries = num_rows * num_chosen
    tiles = _place_entries(choice.experts, first_expert, num_experts)
    activated = x.new_empty(num_entries, width)
    outputs = x.new_empty(num_entries, hidden)
    summed = torch.empty_like(x)
    own = {"FIRST_EXPERT": first_expert, "EXPERTS": num_experts}
    options = {
        **own,
        "BLOCK_EXPERTS": triton.next_power_of_2(num_experts),
        "WIDTH": width,
        "HIDDEN": hidden,
        "CHOSEN": num_chosen,
        "IS_ONE_ROW": num_rows == 1,
        "BLOCK_M": tiles.tile_rows,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        **launch_options(x.device),
    }
    assert x.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    block_inner = 32 if tiles.tile_rows < 64 else 64
    _gate_up_tile[(triton.cdiv(width, block_inner), tiles.num_tiles)](
        x, gate_up, choice.experts, choice.weights, tiles.entries, tiles.counts, activated,
        **options, BLOCK_N=block_inner, BLOCK_K=128 if x.dtype != torch.float32 else 32, num_warps=4, num_stages=3,
    )  # fmt: skip
    _down_tile[(triton.cdiv(hidden, 64), tiles.num_tiles)](
        activated, down, choice.experts, tiles.entries, tiles.counts, outputs,
        **options, BLOCK_N=64, BLOCK_K=64 if x.dtype != torch.float32 else 32, num_warps=4, num_stages=4,
    )  # fmt: skip
    _sum_chosen[(num_rows, triton.cdiv(hidden, 1024))](
        outputs, choice.experts, summed,
        **own, HIDDEN=hidden, CHOSEN=num_chosen, BLOCK=1024, **launch_options(x.device), num_warps=4,
    )  # fmt: skip
    return summed


def run_experts_reference(x: Tensor, choice: Choice, gate_up: Tensor, down: Tensor, first_expert: int = 0) -> Tensor:
    """The same in the arithmetic of its inputs, row by row."""
    rows = []
    for row, experts, weights in zip(x, choice.experts.long(), choice.weights.to(x.dtype), strict=True):
        is_here = (experts >= first_expert) & (experts < first_expert + len(down))
        here = experts[is_here] - first_expert
        gate, up = (gate_up[here] @ row).chunk(2, -1)
        rows.append(torch.einsum("cw,cwh,c->h", F.silu(gate) * up, down[here], weights[is_here]))
    return torch.stack(rows)


def _choose(
    logits: Tensor, bias: Tensor, scale: Tensor | None, num_chosen: int, *, is_softmax: bool, is_renormalised: bool
) -> Choice:
    num_rows, num_experts = logits.shape
    experts = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=logits.device)
    _choose_row[(num_rows,)](
        logits,
        bias,
        logits if scale is None else scale,
        experts,
        weights,
        EXPERTS=num_experts,
        CHOSEN=num_chosen,
        BLOCK=triton.next_power_of_2(num_experts),
        BLOCK_CHOSEN=triton.next_power_of_2(num_chosen),
        IS_SOFTMAX=is_softmax,
        IS_RENORMALISED=is_renormalised,
        **launch_options(logits.device),
        num_warps=1,
    )
    return Choice(experts, weights)


def _place_entries(experts: Tensor, first_expert: int, num_experts: int) -> _Tiles:
    num_rows, num_chosen = experts.shape
    num_entries = num_rows * num_chosen
    # A row's experts differ, so no expert has more entries than there are rows.
    tile_rows = min(max(16, triton.next_power_of_2(triton.cdiv(num_entries, num_experts))), 64)
    num_tiles = min(num_entries, num_experts + num_entries // tile_rows)
    entries = torch.empty(num_tiles * tile_rows, dtype=torch.int32, device=experts.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=experts.device)
    if num_rows > 1:
        _place_entries_of_block[(triton.cdiv(num_entries, _ENTRY_BLOCK),)](
            experts,
            entries,
            counts,
            num_entries,
            FIRST_EXPERT=first_expert,
            EXPERTS=num_experts,
            # One bin more is for what is no entry, or another rank's.
            BINS=triton.next_power_of_2(num_experts + 1),
            TILE_ROWS=tile_rows,
            BLOCK=_ENTRY_BLOCK,
            **launch_options(experts.device),
            num_warps=4,
        )
    return _Tiles(entries, counts, tile_rows, num_tiles)


@triton.jit(do_not_specialize=("num_rows",))
def _router_tile(
    x,
    weight,
    logits,
    num_rows,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """A few rows, a few experts. Every lane adds up its own share; shares are added once, at the end."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    expert = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    k = tl.arange(0, BLOCK_K)
    shares = tl.zeros([BLOCK_ROWS, BLOCK_EXPERTS, BLOCK_K], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        is_k = k < HIDDEN - start
        is_input = (row < num_rows)[:, None] & is_k[None, :]
        is_weight = (expert < EXPERTS)[:, None] & is_k[None, :]
        v = tl.load(x + row.to(tl.int64)[:, None] * HIDDEN + start + k[None, :], mask=is_input, other=0.0)
        w = tl.load(weight + expert[:, None] * HIDDEN + start + k[None, :], mask=is_weight, other=0.0)
        shares += v.to(tl.float32)[:, None, :] * w[None, :, :]
    place = logits + row[:, None] * EXPERTS + expert[None, :]
    tl.store(place, tl.sum(shares, 2), mask=(row < num_rows)[:, None] & (expert < EXPERTS)[None, :])


@triton.jit
def _choose_row(
    logits,
    bias,
    scale,
    experts,
    weights,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < EXPERTS
    logit = tl.load(logits + row * EXPERTS + expert, mask=is_expert, other=float("-inf"))
    if IS_SOFTMAX:
        score = logit
        of_expert = logit
    else:
        score = 1.0 / (1.0 + tl.exp(-logit)) + tl.load(bias + expert, mask=is_expert, other=0.0)
        # log sigmoid
        of_expert = tl.minimum(logit, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(logit)))
    score = tl.where(is_expert, score, float("-inf"))
    place = tl.arange(0, BLOCK_CHOSEN)
    chosen = tl.zeros([BLOCK_CHOSEN], tl.int32)
    values = tl.full([BLOCK_CHOSEN], float("-inf"), tl.float32)
    for index in tl.static_range(CHOSEN):
        # Logits that are no numbers have no largest: any expert that exists will do.
        best = tl.minimum(tl.argmax(score, 0, tie_break_left=True), EXPERTS - 1)
        value = tl.max(tl.where(expert == best, of_expert, float("-inf")), 0)
        chosen = tl.where(place == index, best, chosen)
        values = tl.where(place == index, value, values)
        score = tl.where(expert == best, float("-inf"), score)
    largest = tl.max(values, 0)
    share = tl.exp(values - largest)
    total = tl.sum(share, 0)
    if not IS_RENORMALISED:
        total = tl.sum(tl.where(is_expert, tl.exp(of_expert - largest), 0.0), 0)
    weight = share / total
    if not IS_SOFTMAX:
        weight = weight * tl.load(scale)
    is_place = place < CHOSEN
    tl.store(experts + row * CHOSEN + place, chosen, mask=is_place)
    tl.store(weights + row * CHOSEN + place, weight, mask=is_place)


@triton.jit(do_not_specialize=("num_entries",))
def _place_entries_of_block(
    experts,
    entries,
    counts,
    num_entries,
    FIRST_EXPERT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """Places of one block of entries: behind the tiles of all lower experts, and behind the expert's own entries before
    it."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    entry = block * BLOCK + lane
    own = _own_expert(experts + entry, entry < num_entries, FIRST_EXPERT, EXPERTS)
    histogram = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_entries, BLOCK):
        other = _own_expert(experts + start + lane, start + lane < num_entries, FIRST_EXPERT, EXPERTS)
        histogram += tl.histogram(other, BINS)
        if start <= block * BLOCK:
            is_before = (own[:, None] == other[None, :]) & ((start + lane)[None, :] < entry[:, None])
            before += tl.sum(is_before.to(tl.int32), 1)
    bins = tl.arange(0, BINS)
    padded = tl.where(bins < EXPERTS, (histogram + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS, 0)
    first = tl.cumsum(padded, 0) - padded
    place = tl.gather(first, own, 0) + before
    tl.store(entries + place, entry, mask=own < EXPERTS)
    if block == 0:
        tl.store(counts + bins, histogram, mask=bins < EXPERTS)


@triton.jit
def _own_expert(places, is_entry, FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr):
    """Experts as they are counted here: EXPERTS is none of them."""
    own = tl.load(places, mask=is_entry, other=FIRST_EXPERT + EXPERTS) - FIRST_EXPERT
    return tl.where((own >= 0) & (own < EXPERTS), own, EXPERTS)


@triton.jit
def _tile_entries(
    experts, entries, counts, FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr,
    IS_ONE_ROW: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """This program's expert, entries and how many they are; none of the latter where there is no such tile."""
    tile = tl.program_id(1)
    lane = tl.arange(0, BLOCK_M)
    if IS_ONE_ROW:
        # Each entry is a tile.
        expert = _own_expert(experts + tile, True, FIRST_EXPERT, EXPERTS)
        num = (expert < EXPERTS).to(tl.int32)
        entry = tile + lane * 0
    else:
        index = tl.arange(0, BLOCK_EXPERTS)
        count = tl.load(counts + index, mask=index < EXPERTS, other=0)
        num_tiles = (count + BLOCK_M - 1) // BLOCK_M
        end = tl.cumsum(num_tiles, 0)
        expert = tl.sum((end <= tile).to(tl.int32), 0)
        is_mine = index == expert
        first_tile = tl.sum(tl.where(is_mine, end - num_tiles, 0), 0)
        num = tl.minimum(tl.sum(tl.where(is_mine, count, 0), 0) - (tile - first_tile) * BLOCK_M, BLOCK_M)
        entry = tl.load(entries + tile * BLOCK_M + lane, mask=lane < num, other=0)
    return expert, entry, num


@triton.jit
def _gate_up_tile(
    x,
    gate_up,
    experts,
    weights,
    entries,
    counts,
    activated,
    FIRST_EXPERT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """weight * silu(gate) * up of one tile of entries, some columns."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, entry, num = _tile_entries(
        experts, entries, counts, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inputs = x + (entry // CHOSEN).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    gates = gate_up + expert.to(tl.int64) * (2 * WIDTH * HIDDEN) + n[:, None] * HIDDEN + k[None, :]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K):
        is_k = k < HIDDEN - start
        is_weight = (n < WIDTH)[:, None] & is_k[None, :]
        v = tl.load(inputs + start, mask=is_entry[:, None] & is_k[None, :], other=0.0)
        g = tl.load(gates + start, mask=is_weight, other=0.0)
        u = tl.load(gates + (WIDTH * HIDDEN) + start, mask=is_weight, other=0.0)
        gate = tl.dot(v, tl.trans(g), gate, input_precision=PRECISION)
        up = tl.dot(v, tl.trans(u), up, input_precision=PRECISION)
    weight = tl.load(weights + entry, mask=is_entry, other=0.0)
    values = gate / (1.0 + tl.exp(-gate)) * up * weight[:, None]
    place = activated + entry.to(tl.int64)[:, None] * WIDTH + n[None, :]
    tl.store(place, values.to(activated.dtype.element_ty), mask=is_entry[:, None] & (n < WIDTH)[None, :])


@triton.jit
def _down_tile(
    activated,
    down,
    experts,
    entries,
    counts,
    outputs,
    FIRST_EXPERT: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The way back of one tile of entries, some columns."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert, entry, num = _tile_entries(
        experts, entries, counts, FIRST_EXPERT, EXPERTS, BLOCK_EXPERTS, IS_ONE_ROW, BLOCK_M
    )
    if num <= 0:
        return
    is_entry = tl.arange(0, BLOCK_M) < num
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inputs = activated + entry.to(tl.int64)[:, None] * WIDTH + k[None, :]
    downs = down + expert.to(tl.int64) * (WIDTH * HIDDEN) + k[:, None] * HIDDEN + n[None, :]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K):
        is_k = k < WIDTH - start
        v = tl.load(inputs + start, mask=is_entry[:, None] & is_k[None, :], other=0.0)
        w = tl.load(downs + start * HIDDEN, mask=is_k[:, None] & (n < HIDDEN)[None, :], other=0.0)
        sums = tl.dot(v, w, sums, input_precision=PRECISION)
    place = outputs + entry.to(tl.int64)[:, None] * HIDDEN + n[None, :]
    tl.store(place, sums.to(outputs.dtype.element_ty), mask=is_entry[:, None] & (n < HIDDEN)[None, :])


@triton.jit
def _sum_chosen(
    outputs, experts, summed, FIRST_EXPERT: tl.constexpr, EXPERTS: tl.constexpr, HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr, BLOCK: tl.constexpr, MAY_OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row's entries added up."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(CHOSEN):
        entry = row * CHOSEN + index
        is_here = _own_expert(experts + entry, True, FIRST_EXPERT, EXPERTS) < EXPERTS
        values = tl.load(outputs + entry * HIDDEN + column, mask=is_column & is_here, other=0.0)
        total += values.to(tl.float32)
    tl.store(summed + row * HIDDEN + column, total.to(summed.dtype.element_ty), mask=is_column)
