"""Router of a mixture of experts on a GPU: scores in fp32, which experts each row chooses, and which rows chose each.

Nothing is sorted and the host learns nothing: a row's chosen experts are its entries, and every entry takes the next
place in its expert's line. In which order they come to be there changes no result, since a product computes each entry
by itself.

Belongs here: the choice. Does not belong here: products (experts.py).
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from specbench.engine.kernels.few_rows import load_sum
from specbench.engine.kernels.overlap import launch_options

#: Rows up to which scores are summed up lane by lane; matrix instructions take 16 at a time.
_MAX_LANE_ROWS = 8
_LANE_EXPERTS = 8
_DOT_EXPERTS = 16
#: Parts of the inputs: what a program waits for most is its weight.
_DOT_SPLITS = 4


@dataclass(frozen=True, slots=True)
class RouterWeight:
    """The matrix, as the kernels want it."""

    # [experts, hidden] fp32
    weight: Tensor
    # [3, experts, hidden] bf16, which add up to it: a product with rows in bf16 is exact in each
    parts: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> RouterWeight:
        """weight: [experts, hidden] fp32."""
        rest, parts = weight, []
        for _ in range(3):
            parts.append(rest.bfloat16())
            rest = rest - parts[-1].float()
        return cls(weight.contiguous(), torch.stack(parts))


@dataclass(frozen=True, slots=True)
class RouterScores:
    """What a router makes of each row, before anything is chosen."""

    # [splits, T, experts] fp32, whose sum over splits of the inputs they are
    logits: Tensor
    # [experts] int32, zeros
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """What a router made of each row."""

    # [T, chosen] int32
    experts: Tensor
    # [T, chosen] fp32
    weights: Tensor
    # [experts] int32: rows that chose each. Not filled for one row, like the next
    counts: Tensor
    # [experts, T] int32: the entries of each expert, in any order; what lies behind its count is not written
    entries: Tensor


def router_scores(x: Tensor, router: RouterWeight) -> RouterScores:
    """x [T, hidden] -> logits [T, experts] in parts, as exact as sums in fp32 are."""
    num_rows, hidden = x.shape
    num_experts = len(router.weight)
    num_splits = 1 if num_rows <= _MAX_LANE_ROWS else _DOT_SPLITS
    logits = torch.empty(num_splits, num_rows, num_experts, dtype=torch.float32, device=x.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=x.device)
    assert x.is_contiguous()
    options = {"EXPERTS": num_experts, "HIDDEN": hidden, **launch_options(x.device)}
    if num_rows <= _MAX_LANE_ROWS:
        _scores_by_lanes[(num_rows, triton.cdiv(num_experts, _LANE_EXPERTS))](
            x, router.weight, logits, counts, **options, BLOCK_EXPERTS=_LANE_EXPERTS, BLOCK_K=512, num_warps=4
        )
        return RouterScores(logits, counts)
    is_wide = x.dtype == torch.float32
    block_rows = 16 if num_rows <= 256 else 64
    _scores_by_dots[(triton.cdiv(num_rows, block_rows), triton.cdiv(num_experts, _DOT_EXPERTS), num_splits)](
        x, router.weight if is_wide else router.parts, logits, counts, num_rows, **options,
        BLOCK_ROWS=block_rows, BLOCK_EXPERTS=_DOT_EXPERTS, BLOCK_K=32 if is_wide else 256, IS_WIDE=is_wide,
        SPLITS=num_splits,
        num_warps=2 if block_rows == 16 else 4, num_stages=3,
    )  # fmt: skip
    return RouterScores(logits, counts)


def choose_by_softmax(scores: RouterScores, num_chosen: int, *, is_renormalised: bool) -> Choice:
    """The largest, weighed by softmax over all, or over the chosen."""
    return _choose(scores, None, None, num_chosen, is_renormalised=is_renormalised)


def choose_by_sigmoid(scores: RouterScores, bias: Tensor, scale: Tensor, num_chosen: int) -> Choice:
    """bias [experts] fp32, scale [1] fp32: the largest of sigmoid + bias, weighed by their share of the chosen
    sigmoids, times the scale."""
    return _choose(scores, bias, scale, num_chosen, is_renormalised=True)


def choose_by_softmax_reference(logits: Tensor, num_chosen: int, *, is_renormalised: bool) -> tuple[Tensor, Tensor]:
    """Experts and weights by plain torch."""
    weights, experts = logits.softmax(-1).topk(num_chosen, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True) if is_renormalised else weights


def choose_by_sigmoid_reference(logits: Tensor, bias: Tensor, scale: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The same. Through logarithms: sigmoids of strongly negative logits would all be zero."""
    experts = (torch.sigmoid(logits) + bias).topk(num_chosen, dim=-1).indices
    return experts, F.logsigmoid(logits.gather(1, experts)).softmax(-1) * scale


def _choose(
    scores: RouterScores, bias: Tensor | None, scale: Tensor | None, num_chosen: int, *, is_renormalised: bool
) -> Choice:
    """By sigmoid where there is a bias, else by softmax."""
    logits, counts = scores.logits, scores.counts
    num_splits, num_rows, num_experts = logits.shape
    experts = torch.empty(num_rows, num_chosen, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_rows, num_chosen, dtype=torch.float32, device=logits.device)
    entries = torch.empty(num_experts, num_rows, dtype=torch.int32, device=logits.device)
    _choose_row[(num_rows,)](
        logits,
        logits if bias is None else bias,
        logits if scale is None else scale,
        experts,
        weights,
        counts,
        entries,
        num_rows,
        EXPERTS=num_experts,
        CHOSEN=num_chosen,
        BLOCK=triton.next_power_of_2(num_experts),
        BLOCK_CHOSEN=triton.next_power_of_2(num_chosen),
        IS_SOFTMAX=bias is None,
        IS_RENORMALISED=is_renormalised,
        IS_ONE_ROW=num_rows == 1,
        SPLITS=num_splits,
        **launch_options(logits.device),
        num_warps=1,
    )
    return Choice(experts, weights, counts, entries)


@triton.jit
def _scores_by_lanes(
    x,
    weight,
    logits,
    counts,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """One row, a few experts. Every lane adds up its own share; shares are added once, at the end."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    expert = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    k = tl.arange(0, BLOCK_K)
    shares = tl.zeros([BLOCK_EXPERTS, BLOCK_K], tl.float32)
    for start in range(0, HIDDEN, BLOCK_K):
        is_k = k < HIDDEN - start
        is_weight = (expert < EXPERTS)[:, None] & is_k[None, :]
        v = tl.load(x + row.to(tl.int64) * HIDDEN + start + k, mask=is_k, other=0.0)
        w = tl.load(weight + expert[:, None] * HIDDEN + start + k[None, :], mask=is_weight, other=0.0)
        shares += v.to(tl.float32)[None, :] * w
    tl.store(logits + row * EXPERTS + expert, tl.sum(shares, 1), mask=expert < EXPERTS)
    tl.store(counts + expert, expert * 0, mask=(expert < EXPERTS) & (row == 0))


@triton.jit(do_not_specialize=("num_rows",))
def _scores_by_dots(
    x,
    weight,
    logits,
    counts,
    num_rows,
    EXPERTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_WIDE: tl.constexpr,
    SPLITS: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    """A tile over part of the inputs by matrix instructions: with the weight itself for wide rows, else with its three
    parts."""
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    expert = tl.program_id(1) * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS)
    k = tl.arange(0, BLOCK_K)
    PART: tl.constexpr = EXPERTS * HIDDEN
    inputs = x + row.to(tl.int64)[:, None] * HIDDEN + k[None, :]
    weights = weight + expert[:, None] * HIDDEN + k[None, :]
    high = tl.zeros([BLOCK_ROWS, BLOCK_EXPERTS], tl.float32)
    middle = tl.zeros([BLOCK_ROWS, BLOCK_EXPERTS], tl.float32)
    low = tl.zeros([BLOCK_ROWS, BLOCK_EXPERTS], tl.float32)
    NUM_BLOCKS: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    split = tl.program_id(2)
    for block in tl.range(split * NUM_BLOCKS // SPLITS, (split + 1) * NUM_BLOCKS // SPLITS):
        start = block * BLOCK_K
        is_k = k < HIDDEN - start
        is_weight = (expert < EXPERTS)[:, None] & is_k[None, :]
        v = tl.load(inputs + start, mask=(row < num_rows)[:, None] & is_k[None, :], other=0.0)
        w = tl.load(weights + start, mask=is_weight, other=0.0)
        high = tl.dot(v, tl.trans(w), high, input_precision="ieee")
        if not IS_WIDE:
            w = tl.load(weights + (PART + start), mask=is_weight, other=0.0)
            middle = tl.dot(v, tl.trans(w), middle)
            w = tl.load(weights + (2 * PART + start), mask=is_weight, other=0.0)
            low = tl.dot(v, tl.trans(w), low)
    place = logits + (split * num_rows + row[:, None]) * EXPERTS + expert[None, :]
    sums = high + (middle + low)
    tl.store(place, sums, mask=(row < num_rows)[:, None] & (expert < EXPERTS)[None, :])
    is_first = (tl.program_id(0) == 0) & (split == 0)
    tl.store(counts + expert, expert * 0, mask=(expert < EXPERTS) & is_first)


@triton.jit(do_not_specialize=("num_rows",))
def _choose_row(
    logits,
    bias,
    scale,
    experts,
    weights,
    counts,
    entries,
    num_rows,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_CHOSEN: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    SPLITS: tl.constexpr,
    MAY_OVERLAP: tl.constexpr,
):
    if MAY_OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    is_expert = expert < EXPERTS
    split_stride = num_rows * EXPERTS
    logit = load_sum(logits + row * EXPERTS + expert, is_expert, split_stride, SPLITS)
    logit = tl.where(is_expert, logit, float("-inf"))
    score = logit
    if not IS_SOFTMAX:
        score = 1.0 / (1.0 + tl.exp(-logit)) + tl.load(bias + expert, mask=is_expert, other=0.0)
    # Whole numbers in the order of scores and, of equal ones, of ids from the last to the first: a round is one
    # reduction.
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    LEAST: tl.constexpr = -(2**63)
    order = tl.where(is_expert, (order << 32) | (BLOCK - 1 - expert), LEAST)
    place = tl.arange(0, BLOCK_CHOSEN)
    chosen = tl.zeros([BLOCK_CHOSEN], tl.int32)
    for index in tl.static_range(CHOSEN):
        largest_order = tl.max(order, 0)
        best = tl.minimum(BLOCK - 1 - (largest_order & 0xFFFFFFFF).to(tl.int32), EXPERTS - 1)
        chosen = tl.where(place == index, best, chosen)
        order = tl.where(order == largest_order, LEAST, order)
    is_place = place < CHOSEN
    values = load_sum(logits + row * EXPERTS + chosen, is_place, split_stride, SPLITS)
    values = tl.where(is_place, values, float("-inf"))
    if not IS_SOFTMAX:
        # log sigmoid
        values = tl.minimum(values, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(values)))
    largest = tl.max(values, 0)
    share = tl.exp(values - largest)
    total = tl.sum(share, 0)
    if not IS_RENORMALISED:
        total = tl.sum(tl.where(is_expert, tl.exp(logit - largest), 0.0), 0)
    weight = share / total
    if not IS_SOFTMAX:
        weight = weight * tl.load(scale)
    tl.store(experts + row * CHOSEN + place, chosen, mask=is_place)
    tl.store(weights + row * CHOSEN + place, weight, mask=is_place)
    if not IS_ONE_ROW:
        # Rows that are no numbers may choose an expert twice.
        number = tl.atomic_add(counts + chosen, 1, mask=is_place, sem="relaxed")
        own = entries + chosen.to(tl.int64) * num_rows + number
        tl.store(own, (row * CHOSEN + place).to(tl.int32), mask=is_place & (number < num_rows))
