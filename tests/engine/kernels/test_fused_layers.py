"""Kernels of layers equal plain torch in fp64: in Triton's interpreter on a CPU, and on a GPU in both dtypes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from specbench.engine.kernels.activation import silu_and_multiply, silu_and_multiply_reference
from specbench.engine.kernels.attention_inputs import (
    HeadNorm,
    HeadShape,
    Turn,
    attention_inputs,
    attention_inputs_reference,
)
from specbench.engine.kernels.draft_inputs import InputNorms, module_inputs, module_inputs_reference
from specbench.engine.kernels.drafts import OpenDraft
from specbench.engine.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference, sum_rms_norm
from specbench.engine.kernels.rotation import rotation, rotation_reference
from specbench.engine.kernels.sampling import best_of_chunks
from specbench.engine.kernels.short_conv import CachedConv, PickedRows, conv_add_norm, conv_add_norm_reference
from specbench.engine.kernels.step_preparation import pool_tokens_reference
from specbench.engine.kernels.step_rows import PoolTokens, StepRows

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
EPS = 1e-6
DTYPES = [
    torch.float32,
    pytest.param(
        torch.bfloat16, marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")]
    ),
]
BLOCK_SIZE, KERNEL = 4, 3


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """What is allocated is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_near(value: Tensor, expected: Tensor) -> None:
    tolerance = 1e-6 if value.dtype == torch.float32 else 6e-3
    assert value.isfinite().all()
    assert float((value.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (3, 2, 100), (1, 192)])
def test_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, delta = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    weight = randn(*shape[1:], dtype=dtype)
    assert_near(rms_norm(x, weight, EPS), rms_norm_reference(x.double(), weight.double(), EPS))
    summed, normed = add_rms_norm(x, delta, weight, EPS)
    torch.testing.assert_close(summed, x + delta, rtol=0, atol=0)
    assert_near(normed, rms_norm_reference(summed.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_partial_sums(dtype: torch.dtype) -> None:
    product, weight = randn(3, 5, 100, dtype=torch.float32), randn(100, dtype=dtype)
    summed, normed = sum_rms_norm(product, weight, EPS, dtype)
    assert_near(summed, product.double().sum(0))
    assert_near(normed, rms_norm_reference(summed.double(), weight.double(), EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 1500])
def test_silu(width: int, dtype: torch.dtype) -> None:
    gate_up = randn(3, 2 * width, dtype=dtype) * 4
    assert_near(silu_and_multiply(gate_up, dtype), silu_and_multiply_reference(gate_up.double()))


def test_rotation() -> None:
    positions = torch.tensor([0, 1, 77, 4095, 131071], device=DEVICE)
    frequencies = 1.0 / 1e4 ** (torch.arange(0, 20, 2, device=DEVICE) / 20)
    expected = rotation_reference(positions, frequencies, 1.3)
    for value, reference in zip(rotation(positions, frequencies, 1.3), expected, strict=True):
        torch.testing.assert_close(value, reference, rtol=0, atol=1e-6)


class PagedRows:
    """Rows of some requests: their slots and those of their taps, in shuffled blocks; block 0 is zeros."""

    def __init__(self, first_positions: list[int], counts: list[int], live: list[int] | None = None) -> None:
        num_blocks = max(first_positions) // BLOCK_SIZE + 6
        blocks = 1 + torch.randperm(len(counts) * num_blocks).view(len(counts), -1)
        self.num_slots = BLOCK_SIZE * (len(counts) * num_blocks + 1)
        slots, taps, self.live_rows, self.older = [], [], [], []
        starts = [0]
        for request, (first, count) in enumerate(zip(first_positions, counts, strict=True)):

            def slot(position: int, table: Tensor = blocks[request]) -> int:
                return 0 if position < 0 else int(table[position // BLOCK_SIZE]) * BLOCK_SIZE + position % BLOCK_SIZE

            for offset in range(count):
                position, is_live = first + offset, live is None or offset < live[request]
                slots.append(slot(position) if is_live else -1)
                taps.append([slot(position - age) for age in reversed(range(KERNEL))])
                if is_live:
                    self.live_rows.append(starts[-1] + offset)
            self.older += [slot(position) for position in range(max(first - KERNEL + 1, 0), first)]
            starts.append(starts[-1] + count)
        self.slot_mapping = torch.tensor(slots, device=DEVICE)
        self.tap_slots = torch.tensor(taps, device=DEVICE).view(-1)
        query_start_loc = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.rows = StepRows(query_start_loc, len(counts), max(counts))

    def cache(self, width: int, dtype: torch.dtype) -> Tensor:
        """Inputs of older rows; canaries wherever nothing was stored yet."""
        cache = torch.full((self.num_slots + 1, width), 1e4).to(DEVICE, dtype)
        cache[:BLOCK_SIZE] = 0
        cache[self.older] = randn(len(self.older), width, dtype=dtype)
        return cache


ROWS = {
    "decode": lambda: PagedRows([0, 5, 30], [1, 1, 1]),
    "verify with dead rows": lambda: PagedRows([0, 5, 30], [3, 3, 3], [3, 1, 0]),
    "chunks": lambda: PagedRows([0, 1, 30], [7, 1, 3]),
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_of_partial_sums(dtype: torch.dtype) -> None:
    """Every row is summed up and rounded before anything else."""
    paged, width = ROWS["chunks"](), 37
    num_rows = len(paged.slot_mapping)
    parts, residual = randn(2, num_rows, width, dtype=torch.float32), randn(num_rows, width, dtype=dtype)
    taps, weight = randn(KERNEL, width, dtype=torch.float32), randn(width, dtype=dtype)
    conv = CachedConv(taps, paged.cache(width, dtype), paged.slot_mapping, paged.tap_slots)
    whole = replace(conv, cache=conv.cache.clone())
    outputs = conv_add_norm(parts, residual, conv, paged.rows, weight, EPS)
    expected = conv_add_norm((parts[0] + parts[1]).to(dtype), residual, whole, paged.rows, weight, EPS)
    assert torch.equal(conv.cache, whole.cache)
    # A compiler is free to fuse one product or another with the addition that follows: the last bit may differ.
    for output, other in zip(outputs, expected, strict=True):
        assert output.dtype == dtype
        assert_near(output, other.double())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
def test_picked_rows_of_a_convolution(has_norm: bool, dtype: torch.dtype) -> None:
    paged, width = ROWS["verify with dead rows"](), 37
    num_rows = len(paged.slot_mapping)
    x, residual = randn(num_rows, width, dtype=dtype), randn(num_rows, width, dtype=dtype)
    taps, weight = randn(KERNEL, width, dtype=torch.float32), randn(width, dtype=dtype) if has_norm else None
    conv = CachedConv(taps, paged.cache(width, dtype), paged.slot_mapping, paged.tap_slots)
    # The last request has no row that lives: what it names is another's.
    rows = torch.tensor([2, 3, 5], device=DEVICE)
    picked = PickedRows(rows, torch.full((3, width), 7.0).to(DEVICE, dtype))
    _, normed = conv_add_norm(x, residual, conv, paged.rows, weight, EPS, picked)
    assert torch.equal(picked.output[:2], normed[rows[:2]]) and (picked.output[2] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_embed_norm", [False, True])
def test_inputs_of_a_module(has_embed_norm: bool, dtype: torch.dtype) -> None:
    width, num_ids, lookahead = 37, 50, 3
    pool = torch.randint(-1, num_ids, (4, 40), device=DEVICE)
    request_of_row, positions = torch.randint(0, 3, (11,), device=DEVICE), torch.randint(0, 36, (11,), device=DEVICE)
    tokens = PoolTokens(pool, torch.tensor([3, 0, 1], device=DEVICE), request_of_row, positions, lookahead)
    hidden, table = randn(11, width, dtype=dtype), randn(num_ids, width, dtype=dtype)
    embed_weight = randn(width, dtype=dtype) if has_embed_norm else None
    norms = InputNorms(table, embed_weight, 1e-5, randn(2, width, dtype=dtype), EPS)
    wide = InputNorms(
        table.double(), None if embed_weight is None else embed_weight.double(), 1e-5, norms.weight.double(), EPS
    )
    token_ids = pool_tokens_reference(pool, tokens.rows, request_of_row, positions, lookahead)
    assert_near(module_inputs(tokens, hidden, norms), module_inputs_reference(token_ids, hidden.double(), wide))
    # The same with the newest token of two requests still to be found among logits.
    logits, before = torch.randn(3, num_ids, device=DEVICE), pool.clone()
    columns = torch.stack([(positions + lookahead).masked_fill(request_of_row != i, 0).amax() for i in range(3)]) - 2
    columns[1] = 0
    tokens = replace(tokens, draft=OpenDraft(best_of_chunks(logits), num_ids, columns, 2))
    is_draft = positions + lookahead == columns[request_of_row] + 2
    token_ids = token_ids.where(~is_draft, logits.argmax(1)[request_of_row])
    assert_near(module_inputs(tokens, hidden, norms), module_inputs_reference(token_ids, hidden.double(), wide))
    assert is_draft.any()
    before[tokens.rows[request_of_row[is_draft]], (positions + lookahead)[is_draft]] = token_ids[is_draft]
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_conv_add_norm(name: str, has_norm: bool, dtype: torch.dtype) -> None:
    paged, width = ROWS[name](), 37
    num_rows = len(paged.slot_mapping)
    x, residual = randn(num_rows, width, dtype=dtype), randn(num_rows, width, dtype=dtype)
    taps, weight = randn(KERNEL, width, dtype=torch.float32), randn(width, dtype=dtype)
    conv = CachedConv(taps, paged.cache(width, dtype), paged.slot_mapping, paged.tap_slots)
    wide_conv = replace(conv, cache=conv.cache.double())
    norm = weight if has_norm else None
    summed, normed = conv_add_norm(x, residual, conv, paged.rows, norm, EPS)
    expected, expected_norm = conv_add_norm_reference(
        x.double(), residual.double(), wide_conv, norm if norm is None else norm.double(), EPS
    )
    live = paged.live_rows
    assert_near(summed[live], expected[live])
    assert_near(normed[live], expected_norm[live])
    # The last slot is scratch.
    torch.testing.assert_close(conv.cache[:-1].double(), wide_conv.cache[:-1], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("shape", [HeadShape(4, 2, 16), HeadShape(6, 3, 32), HeadShape(3, 1, 20)], ids=str)
def test_rotary_inputs(shape: HeadShape, has_norm: bool, dtype: torch.dtype) -> None:
    paged = ROWS["verify with dead rows"]()
    num_rows, d = len(paged.slot_mapping), shape.head_dim
    projected = randn(num_rows, (shape.num_heads + 2 * shape.num_kv_heads) * d, dtype=dtype)
    angles = torch.rand(num_rows, 1, d // 2).to(DEVICE) * 6
    sines = torch.cat((-angles.sin(), angles.sin()), 2)
    turn = Turn(torch.cat((angles.cos(),) * 2, 2).to(dtype), sines.to(dtype))
    norm = HeadNorm(randn(shape.num_heads + shape.num_kv_heads, d, dtype=dtype), EPS) if has_norm else None
    _check_inputs(projected, shape, paged, norm, turn, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ROWS)
def test_convolved_inputs(name: str, dtype: torch.dtype) -> None:
    paged, shape, relative_width = ROWS[name](), HeadShape(6, 3, 32), 18
    num_rows, kv_width = len(paged.slot_mapping), 2 * 3 * 32
    projected = randn(num_rows, 6 * 32 + relative_width + kv_width, dtype=dtype)
    norm = HeadNorm(randn(9, 32, dtype=dtype), EPS)
    taps, cache = randn(KERNEL, kv_width, dtype=torch.float32), paged.cache(kv_width, dtype)
    conv = CachedConv(taps, cache, paged.slot_mapping, paged.tap_slots)
    _check_inputs(projected, shape, paged, norm, None, conv)


def _check_inputs(
    projected: Tensor,
    shape: HeadShape,
    paged: PagedRows,
    norm: HeadNorm | None,
    turn: Turn | None,
    conv: CachedConv | None,
) -> None:
    kv_cache = torch.full((paged.num_slots + 1, 2, shape.num_kv_heads, shape.head_dim), 1e4)
    kv_cache = kv_cache.to(DEVICE, projected.dtype)
    wide_cache = kv_cache.double()
    wide_norm = norm and HeadNorm(norm.weight.double(), norm.eps)
    wide_turn = turn and Turn(turn.cos.double(), turn.signed_sin.double())
    wide_conv = conv and replace(conv, cache=conv.cache.double())
    rows = None if conv is None else paged.rows
    query = attention_inputs(projected, shape, kv_cache, paged.slot_mapping, norm, turn, conv, rows)
    expected = attention_inputs_reference(
        projected.double(), shape, wide_cache, paged.slot_mapping, wide_norm, wide_turn, wide_conv
    )
    live = paged.live_rows
    assert_near(query[live], expected[live])
    stored = paged.slot_mapping[live]
    assert_near(kv_cache[stored], wide_cache[stored])
    is_stored = torch.zeros(len(kv_cache), dtype=torch.bool, device=DEVICE)
    is_stored[stored] = True
    is_stored[-1] = True  # scratch
    assert (kv_cache[~is_stored] == wide_cache[~is_stored]).all()
    if conv is not None and wide_conv is not None:
        torch.testing.assert_close(conv.cache[:-1].double(), wide_conv.cache[:-1], rtol=0, atol=0)
