"""Kernels around the model against their references, exactly: in the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.step_results import StepResults
from specbench.engine.kernels.acceptance import accept_and_commit
from specbench.engine.kernels.draft_inputs import (
    draft_hiddens,
    draft_hiddens_reference,
    draft_rows,
    draft_rows_reference,
)
from specbench.engine.kernels.drafts import (
    OpenDraft,
    close_draft,
    count_drafts,
    count_drafts_reference,
    store_draft,
    store_recorded,
)
from specbench.engine.kernels.sampling import best_of_chunks
from specbench.engine.kernels.step_preparation import (
    gather_requests,
    gather_requests_reference,
    pool_tokens,
    pool_tokens_reference,
    row_slots,
    row_slots_reference,
)
from specbench.engine.proposers.stub import recorded_drafts
from specbench.engine.sampling.verification import (
    Windows,
    accept_at_rates,
    conditional_rates,
    sample_and_match,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_ids(*shape: int, low: int = 0, high: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("num_columns", [3, 1030])
def test_counts_and_tables_of_requests(num_columns: int):
    rows = torch.tensor([4, 0, 2, 4], device=DEVICE)
    counts = random_ids(2, 6, high=1000)
    tables = random_ids(3, 6, num_columns, high=5000).int()
    for found, expected in zip(
        gather_requests(rows, counts, tables), gather_requests_reference(rows, counts, tables), strict=True
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("has_dead_rows", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "block_size", "kernel"), [(1, 4, 1), (1, 4, 4), (5, 4, 4), (9, 16, 3), (20, 6, 2)]
)
def test_slots_of_rows(num_rows: int, block_size: int, kernel: int, has_dead_rows: bool):
    first_position = torch.tensor([0, 1, 37], device=DEVICE)
    num_live = torch.tensor([num_rows, 0, num_rows // 2], device=DEVICE) if has_dead_rows else None
    tables = random_ids(2, 3, 2 + (37 + num_rows) // block_size, low=1, high=500).int()
    tables[:, :, 0] = 0
    arguments = (first_position, num_live, tables, num_rows, block_size, kernel)
    for found, expected in zip(row_slots(*arguments), row_slots_reference(*arguments), strict=True):
        assert torch.equal(found, expected) and found.is_contiguous()


@pytest.mark.parametrize("num_tokens", [3, 300])
def test_tokens_of_rows(num_tokens: int):
    pool = random_ids(4, 40, low=-1, high=100)
    rows, request_of_row = torch.tensor([3, 0, 1], device=DEVICE), random_ids(num_tokens, high=3)
    positions = random_ids(num_tokens, high=35)
    arguments = (pool, rows, request_of_row, positions, 4)
    assert torch.equal(pool_tokens(*arguments), pool_tokens_reference(*arguments))
    arguments = (pool, rows[request_of_row], None, positions, 0)
    assert torch.equal(pool_tokens(*arguments), pool_tokens_reference(*arguments))


@pytest.mark.parametrize("num_modules", [2, 3, 8])
def test_rows_of_a_drafting_pass(num_modules: int):
    first_position, num_accepted = random_ids(140, high=12), random_ids(140, high=num_modules + 1, seed=1)
    arguments = (first_position, num_accepted + 1, num_accepted, num_modules)
    for found, expected in zip(draft_rows(*arguments), draft_rows_reference(*arguments), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("hidden_size", [48, 1500])
@pytest.mark.parametrize(("num_modules", "target_rows"), [(2, 3), (8, 9), (3, 1)])
def test_hiddens_of_a_drafting_pass(num_modules: int, target_rows: int, hidden_size: int):
    num_requests = 4
    hidden_states = torch.randn(num_requests * target_rows, hidden_size).to(DEVICE)
    window = torch.randn(6, num_modules - 1, hidden_size).to(DEVICE)
    rows = torch.tensor([4, 0, 5, 2], device=DEVICE)
    first_position = torch.tensor([0, 3, 30, 9], device=DEVICE)
    num_accepted = torch.tensor([0, target_rows // 2, target_rows - 1, 0], device=DEVICE)
    first, num_live, _ = draft_rows(first_position, num_accepted + 1, num_accepted, num_modules)
    num_valid = num_accepted + torch.tensor([1, 1, 1, 0], device=DEVICE)  # the last one is padding
    expected_window = window.clone()
    arguments = (rows, first_position, num_valid, first, num_modules + 1)
    expected = draft_hiddens_reference(hidden_states, expected_window, *arguments)
    found = draft_hiddens(hidden_states, window, *arguments)
    assert torch.equal(window, expected_window)
    is_live = torch.arange(num_modules + 1, device=DEVICE) < num_live[:, None]
    assert torch.equal(found[is_live.flatten()], expected[is_live.flatten()]) and found.isfinite().all()


@pytest.mark.parametrize("num_requests", [3, 130])
def test_drafts(num_requests: int):
    pool, k = random_ids(num_requests + 1, 30, low=-1, high=4), 5
    rows = torch.randperm(num_requests + 1, generator=torch.Generator().manual_seed(0))[:num_requests].to(DEVICE)
    columns, samples = random_ids(num_requests, high=20), random_ids(num_requests, high=2, seed=1)
    drafts, expected = random_ids(num_requests, high=90, seed=2), pool.clone()
    store_draft(pool, rows, columns, 3, drafts)
    expected[rows, columns + 3] = drafts
    assert torch.equal(pool, expected)
    found = torch.full_like(samples, -7)
    count_drafts(pool, rows, columns, samples, k, found)
    assert torch.equal(found, count_drafts_reference(pool, rows, columns, samples, k))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_recorded_texts_become_drafts(k: int):
    text, pool = random_ids(6, 30, low=-1, high=3), random_ids(6, 50, high=9, seed=1)
    rows, columns = torch.tensor([4, 0, 2, 5], device=DEVICE), torch.tensor([7, 0, 28, 40], device=DEVICE)
    wanted, expected = torch.tensor([0, k, 1, k - 1], device=DEVICE), pool.clone()
    expected[rows[:, None], columns[:, None] + torch.arange(k, device=DEVICE)] = recorded_drafts(
        text, rows, columns, wanted, k
    )
    store_recorded(text, pool, rows, columns, wanted, k)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("num_ids", [3, 9000])
def test_the_best_of_logits_becomes_a_draft(num_ids: int):
    pool, expected = (random_ids(6, 30, low=-1, high=4) for _ in range(2))
    rows, columns = torch.tensor([4, 0, 2], device=DEVICE), torch.tensor([7, 0, 20], device=DEVICE)
    logits = torch.randn(3, num_ids + 5, device=DEVICE)[:, :num_ids]
    logits[1, [1, num_ids - 1]] = 50.0  # a tie
    found = close_draft(OpenDraft(best_of_chunks(logits), num_ids, columns, 4), pool, rows)
    assert found.tolist() == [int(logits[0].argmax()), 1, int(logits[2].argmax())]
    expected[rows, columns + 4] = found
    assert torch.equal(pool, expected)


@pytest.mark.parametrize("is_synthetic", [False, True])
@pytest.mark.parametrize("has_single_rows", [False, True])
@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_acceptance_and_commit(k: int, has_single_rows: bool, is_synthetic: bool):
    """Against verification and commit as they are without a graph; the last request is padding."""
    num_requests, max_model_len = 5, 40
    num_rows = 1 if has_single_rows else k + 1
    states = [RequestState(1, num_requests - 1, max_model_len, k, 4, 50, torch.device(DEVICE)) for _ in range(2)]
    rows = torch.tensor([2, 0, 3, 1, states[0].scratch_row], device=DEVICE)
    num_live = torch.tensor([num_rows, max(num_rows - 1, 1), 1, num_rows, 0], device=DEVICE)
    sampled_ids = random_ids(num_requests * num_rows, high=3, seed=k)
    rates = torch.linspace(0.9, 0.2, k, device=DEVICE) if is_synthetic and k else None
    for state in states:
        state.token_pool.copy_(random_ids(*state.token_pool.shape, low=-1, high=3, seed=1))
        state.counts.copy_(random_ids(*state.counts.shape, low=5, high=max_model_len - 1))
        state.counts[:, state.scratch_row] = 0
        state.sampling.key.copy_(random_ids(num_requests, low=-(2**62), high=2**62, seed=2))
    expected, found = (StepResults.empty(k, num_requests, torch.device(DEVICE)) for _ in range(2))
    commit_reference(states[0], expected, sampled_ids, rows, num_live, rates, k)
    own_rates = None if rates is None else conditional_rates(rates)
    accept_and_commit(
        sampled_ids, rows, num_live, states[1].token_pool, states[1].counts, found.packed, states[1].sampling.key,
        own_rates,
    )  # fmt: skip
    assert torch.equal(found.packed[:, :-1][-6:], expected.packed[:, :-1][-6:])
    assert torch.equal(states[1].counts, states[0].counts)
    for request in range(num_requests - 1):
        count = int(found.packed[-6, request])
        assert torch.equal(found.token_ids[request, :count], expected.token_ids[request, :count])
        row, num_tokens = int(rows[request]), int(states[0].counts[0, rows[request]])
        assert torch.equal(states[1].token_pool[row, :num_tokens], states[0].token_pool[row, :num_tokens])
        # Behind the window nothing is touched.
        behind = num_tokens - count + k + 1
        assert torch.equal(states[1].token_pool[row, behind:], states[0].token_pool[row, behind:])


def commit_reference(
    state: RequestState,
    results: StepResults,
    sampled_ids: torch.Tensor,
    rows: torch.Tensor,
    num_live: torch.Tensor,
    rates: torch.Tensor | None,
    k: int,
) -> None:
    is_live = num_live.clamp_max(1)
    counts = state.counts[:, rows]
    draft_ids = state.token_pool[rows[:, None], counts[0][:, None] + torch.arange(k, device=DEVICE)]
    sampled = sampled_ids.view(len(rows), -1)
    sampled = sampled if sampled.shape[1] == k + 1 else sampled.expand(-1, k + 1)
    windows = Windows(rows, draft_ids, num_live - is_live, is_live, state.sampling.key[rows], counts[1])
    if rates is not None:
        verdict = accept_at_rates(sampled, windows, rates)
    else:
        verdict = sample_and_match(sampled, windows.draft_ids, windows.num_drafts, windows.samples)
    results.fill(verdict, counts + torch.stack([verdict.num_sampled, is_live + verdict.num_accepted]))
    state.commit(rows, verdict.token_ids, counts[0], results.counts)
