"""Verification of drawn drafts by kernels decides and emits what plain torch does: in Triton's interpreter on a CPU,
and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")
from specbench.engine.kernels.drawn_verification import DrawnWindows, verify_and_commit
from specbench.engine.sampling.verification import (
    ACCEPTANCE_RULES,
    Laws,
    Verdict,
    Windows,
    sample_and_match,
    verify_draws,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Three chunks, the last one short.
VOCAB = 9000
NUM_STATE_ROWS, WIDTH = 40, 64


@dataclass
class Step:
    """Requests whose windows are verified, and all that belongs to them."""

    # [R, VOCAB], before temperature
    logits: torch.Tensor
    windows: DrawnWindows
    # [R]
    persistent_row_of_logits: torch.Tensor
    # [R] each; None: nothing is cut
    threshold: torch.Tensor | None = None
    total: torch.Tensor | None = None

    @property
    def k(self) -> int:
        return self.windows.draft_probabilities.shape[1]

    def by_column(self, of_rows: torch.Tensor) -> torch.Tensor:
        columns = self.windows.row_of_column
        return of_rows.unflatten(0, (-1, self.k + 1)) if columns is None else of_rows[columns]

    def processed(self) -> torch.Tensor:
        temperature = self.windows.temperature[self.persistent_row_of_logits][:, None]
        scaled = self.logits / torch.where(temperature == 0, 1.0, temperature)
        if self.threshold is None:
            return scaled
        return torch.where((temperature != 0) & (scaled < self.threshold[:, None]), -torch.inf, scaled)

    def expected(self, method: str) -> Verdict:
        """By plain torch."""
        of, processed = self.windows, self.processed()
        columns = torch.arange(self.k + 1, device=DEVICE)
        position = of.counts[0, of.rows][:, None] + columns
        windows = Windows(
            rows=of.rows,
            draft_ids=of.token_pool[of.rows[:, None], position[:, : self.k]],
            num_drafts=of.num_drafts,
            samples=of.samples,
            keys=of.keys[of.rows],
            start=of.counts[1, of.rows],
        )
        laws = Laws(self.by_column(processed), self.by_column(processed.logsumexp(-1)), of.draft_probabilities, of.rows)
        drawn = verify_draws(ACCEPTANCE_RULES[method], windows, laws, position)
        argmax = self.by_column(processed.argmax(-1))
        greedy = sample_and_match(argmax, windows.draft_ids, windows.num_drafts, windows.samples)
        return greedy.where(of.temperature[of.rows] == 0, drawn)

    def assert_kernels_agree(self, method: str) -> Verdict:
        """And that they commit it, to the rows of the step alone."""
        verdict, of = self.expected(method), self.windows
        pool, counts, rows = of.token_pool.clone(), of.counts.clone(), of.rows
        verify_and_commit(
            self.logits,
            of,
            self.persistent_row_of_logits,
            is_block=method == "block",
            threshold=self.threshold,
            total=self.total,
        )
        packed = of.packed
        valid = of.num_certain_rows + verdict.num_accepted
        committed, computed = counts[0, rows] + verdict.num_sampled, counts[1, rows] + valid
        zeros = torch.zeros_like(valid)
        accepted = verdict.num_accepted
        expected = [verdict.num_sampled, verdict.num_drafted, zeros, accepted, committed, computed]
        assert torch.equal(packed[self.k + 1 :], torch.stack(expected))
        is_emitted = torch.arange(self.k + 1, device=DEVICE) < verdict.num_sampled[:, None]
        tokens = packed[: self.k + 1].T
        assert torch.equal(torch.where(is_emitted, tokens, 0), torch.where(is_emitted, verdict.token_ids, 0))
        self._assert_committed(pool, counts, tokens, torch.stack([committed, computed]))
        return verdict

    def _assert_committed(
        self, pool: torch.Tensor, counts: torch.Tensor, tokens: torch.Tensor, new_counts: torch.Tensor
    ) -> None:
        of = self.windows
        places = counts[0, of.rows][:, None] + torch.arange(self.k + 1, device=DEVICE)
        pool[of.rows[:, None], places] = tokens
        counts[:, of.rows] = new_counts
        assert torch.equal(of.token_pool, pool)
        assert torch.equal(of.counts, counts)


def make_step(
    num_requests: int = 12,
    k: int = 3,
    vocab: int = VOCAB,
    likeness: float = 0.7,
    is_cut: bool = False,
    num_drafts: list[int] | None = None,
    spread: float = 3.0,
) -> Step:
    """Target laws are mixtures of the drafts' and others; every fourth request is greedy. `num_drafts` without a window
    of k: a step of any shape."""
    rows = torch.randperm(NUM_STATE_ROWS)[:num_requests]
    temperature = torch.zeros(NUM_STATE_ROWS)
    temperature[rows] = torch.tensor([1.0, 0.6, 0.0, 1.4]).repeat(num_requests)[:num_requests]
    drafts_of = torch.full((num_requests,), k) if num_drafts is None else torch.tensor(num_drafts)
    counts = torch.stack([torch.randint(2, 40, (NUM_STATE_ROWS,)), torch.zeros(NUM_STATE_ROWS, dtype=torch.int64)])
    counts[1] = counts[0] - 1
    draft_logits = torch.randn(num_requests, k, vocab) * spread
    draft_probabilities = torch.rand(NUM_STATE_ROWS, k, vocab)
    law = draft_logits.softmax(-1)
    draft_probabilities[rows] = law
    draft_ids = torch.stack([torch.multinomial(law[:, index], 1)[:, 0] for index in range(k)], 1)
    pool = torch.randint(0, vocab, (NUM_STATE_ROWS, WIDTH))
    for index, row in enumerate(rows.tolist()):
        pool[row, counts[0, row] : counts[0, row] + k] = draft_ids[index]
    of_rows = [
        likeness * draft_logits[r, min(c, k - 1)] for r, n in enumerate(drafts_of.tolist()) for c in range(n + 1)
    ]
    logits = torch.stack(of_rows) + torch.randn(len(of_rows), vocab) * (1 - likeness) * spread
    row_of_logits = rows.repeat_interleave(drafts_of + 1)
    columns = None
    if num_drafts is not None:
        starts = (drafts_of + 1).cumsum(0) - drafts_of - 1
        columns = starts[:, None] + torch.arange(k + 1).clamp_max(drafts_of[:, None])
    threshold = total = None
    if is_cut:
        scaled = logits / torch.where(temperature == 0, 1.0, temperature)[row_of_logits][:, None]
        threshold = scaled.topk(vocab // 20).values[:, -1].contiguous()
        total = scaled.masked_fill(scaled < threshold[:, None], -torch.inf).logsumexp(-1)
    windows = DrawnWindows(
        rows=rows,
        num_drafts=drafts_of,
        samples=torch.ones(num_requests, dtype=torch.int64),
        num_certain_rows=torch.ones(num_requests, dtype=torch.int64),
        row_of_column=columns,
        token_pool=pool,
        counts=counts,
        keys=torch.randint(-(2**63), 2**63 - 1, (NUM_STATE_ROWS,)),
        temperature=temperature,
        draft_probabilities=draft_probabilities,
        packed=torch.full((k + 7, num_requests), -7),
    )
    on_device = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name in DrawnWindows.__dataclass_fields__
        for value in [getattr(windows, name)]
    }
    return Step(
        logits.to(DEVICE),
        DrawnWindows(**on_device),
        row_of_logits.to(DEVICE),
        None if threshold is None else threshold.to(DEVICE),
        None if total is None else total.to(DEVICE),
    )


METHODS = pytest.mark.parametrize("method", ACCEPTANCE_RULES)


@METHODS
@pytest.mark.parametrize("is_cut", [False, True])
def test_windows_of_one_length(method: str, is_cut: bool):
    torch.manual_seed(0)
    seen = set()
    for likeness in (0.95, 0.7):
        verdict = make_step(likeness=likeness, is_cut=is_cut).assert_kernels_agree(method)
        seen |= set(verdict.num_accepted.tolist())
    assert seen == {0, 1, 2, 3}


@METHODS
@pytest.mark.parametrize("is_cut", [False, True])
def test_windows_of_any_length_beside_chunks_of_prompts(method: str, is_cut: bool):
    torch.manual_seed(1)
    step = make_step(num_drafts=[3, 0, 1, 2, 3, 3, 0, 2], num_requests=8, is_cut=is_cut, likeness=0.9)
    # The second is a chunk that leaves part of its prompt, the seventh one that does not.
    of = step.windows
    of.samples[1] = 0
    of.num_certain_rows[1], of.num_certain_rows[6] = 5, 4
    of.counts[1, of.rows[1]] = of.counts[0, of.rows[1]] + 30
    step.assert_kernels_agree(method)


@METHODS
def test_totals_are_made_where_nobody_has_them(method: str):
    torch.manual_seed(2)
    step = make_step(is_cut=True, num_requests=6)
    step.total = None
    step.assert_kernels_agree(method)


@METHODS
@pytest.mark.parametrize("k", [1, 2, 8])
def test_windows_of_other_lengths(method: str, k: int):
    torch.manual_seed(3)
    make_step(num_requests=8, k=k, vocab=700, likeness=0.95).assert_kernels_agree(method)


@METHODS
def test_missing_drafts_end_a_window_and_what_is_behind_them_has_no_say(method: str):
    torch.manual_seed(4)
    step = make_step(num_requests=8, vocab=700, likeness=0.95)
    of = step.windows
    for index, gone in enumerate([0, 1, 2, 0, 1, 2, 0, 1]):
        row = of.rows[index]
        of.token_pool[row, of.counts[0, row] + gone] = -1
        of.draft_probabilities[row, gone:] = torch.nan
        step.logits.view(8, 4, -1)[index, gone + 1 :] = torch.nan
    step.assert_kernels_agree(method)


@METHODS
def test_equal_laws_accept_everything_and_laws_without_anything_in_common_nothing(method: str):
    torch.manual_seed(5)
    step = make_step(num_requests=8, vocab=700)
    of = step.windows
    is_greedy = of.temperature[of.rows] == 0
    drafts = torch.log(of.draft_probabilities[of.rows])
    temperature = of.temperature[of.rows][:, None, None]
    step.logits.view(8, 4, -1)[:, :3] = drafts * torch.where(temperature == 0, 1.0, temperature)
    counts, pool = of.counts.clone(), of.token_pool.clone()
    verdict = step.assert_kernels_agree(method)
    assert (verdict.num_accepted[~is_greedy] == 3).all()
    of.counts.copy_(counts)
    of.token_pool.copy_(pool)
    likely = of.draft_probabilities[of.rows] > 1e-4
    step.logits.view(8, 4, -1)[:, :3][likely] = -torch.inf
    verdict = step.assert_kernels_agree(method)
    assert (verdict.num_accepted[~is_greedy & (verdict.num_drafted > 0)] == 0).float().mean() > 0.5


@METHODS
def test_laws_that_lack_nothing_are_drawn_from_as_they_are(method: str):
    """As rounding has it, on a larger scale: drafts are rejected by laws that are nowhere larger than theirs."""
    torch.manual_seed(7)
    step = make_step(num_requests=8, vocab=700)
    of = step.windows
    temperature = of.temperature[of.rows][:, None, None]
    step.logits.view(8, 4, -1)[:, :3] = of.draft_probabilities[of.rows].log() * torch.where(
        temperature == 0, 1.0, temperature
    )
    of.draft_probabilities.mul_(3)
    verdict = step.assert_kernels_agree(method)
    assert (verdict.num_accepted < 3).any()


@METHODS
def test_requests_of_padding_move_nothing_but_their_scratch_row(method: str):
    """As a recorded step has them: no row that counts, greedy, all in one persistent row."""
    torch.manual_seed(6)
    step = make_step(num_requests=6, vocab=700)
    of = step.windows
    padding = of.rows[4:]
    padding.fill_(NUM_STATE_ROWS - 1)
    step.persistent_row_of_logits[16:] = NUM_STATE_ROWS - 1
    of.temperature[NUM_STATE_ROWS - 1] = 0
    for name in ("num_drafts", "samples", "num_certain_rows"):
        getattr(of, name)[4:] = 0
    counts, pool = of.counts.clone(), of.token_pool.clone()
    expected = step.expected(method)
    verify_and_commit(step.logits, of, step.persistent_row_of_logits, is_block=method == "block")
    live = [row for row in range(NUM_STATE_ROWS) if row not in of.rows.tolist()]
    assert torch.equal(of.counts[:, live], counts[:, live])
    assert torch.equal(of.counts[:, NUM_STATE_ROWS - 1], counts[:, NUM_STATE_ROWS - 1])
    assert torch.equal(of.token_pool[live], pool[live])
    assert torch.equal(of.packed[7, :4], expected.num_accepted[:4])
    assert of.packed[4:8, 4:].abs().sum() == 0
