"""The parts of a step on the device: forward, verification and commit, drafts.

Belongs here: each part as a function of tensors, which may run at once or be recorded in a graph: none waits for the
device, and what decides about shapes is known on the host. Does not belong here: their order, and what is recorded
(model_runner.py), what runs (scheduling/).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from specbench.engine.config import EngineConfig
from specbench.engine.execution.input_batch import InputBatch, MixedInputs, mixed_indices
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.step_results import StepResults
from specbench.engine.execution.token_logprobs import LogprobRows, TokenLogprobs
from specbench.engine.layers import fusion
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.features import StepFeatures
from specbench.engine.layers.metadata import DeviceLayout, RowLayout, TargetOutput
from specbench.engine.layers.metadata_builder import AttentionMetadataBuilder
from specbench.engine.layers.token_pool import read_tokens
from specbench.engine.models.target import TargetModel
from specbench.engine.proposers.proposer import AdmittedRequest, DraftBatch, MixedRows, Proposer
from specbench.engine.proposers.row_indices import row_indices
from specbench.engine.sampling.drafting import DraftSampling, allocate_draft_probabilities
from specbench.engine.sampling.row_chunks import log_total
from specbench.engine.sampling.sampler import SamplingRows, Support, apply_rules_, draw, process, support_of
from specbench.engine.sampling.sharded import sample_own
from specbench.engine.sampling.verification import (
    ACCEPTANCE_RULES,
    Laws,
    Verdict,
    accept_at_rates,
    block_rule,
    conditional_rates,
    sample_and_match,
    verify_draws,
)


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What the target made of a batch."""

    batch: InputBatch
    # [num_tokens] int64
    positions: torch.Tensor
    hidden: TargetOutput

    @classmethod
    def of_rows(cls, batch: InputBatch, positions: torch.Tensor, hidden: TargetOutput) -> Forwarded:
        """From tensors in which the batch's rows are the first."""
        num_tokens = batch.indices.query_start_loc_np[-1]
        of_batch = TargetOutput(hidden.hidden_states[:num_tokens], hidden.residual[:num_tokens])
        return cls(batch, positions[:num_tokens], of_batch)


@dataclass(frozen=True, slots=True)
class MixedForwarded:
    """What the target made of a step of any kind, of which the host knows no more than the number of rows."""

    inputs: MixedInputs
    #: Verified like any other's.
    forwarded: Forwarded


class Verification(Enum):
    """What requests of a step ask of sampling, as far as recorded verifications know it."""

    GREEDY = "argmax"
    TEMPERED = "temperature"
    FILTERED = "temperature and filters"


class StepStages:
    """The parts, over one model, one proposer and one set of request rows."""

    def __init__(
        self,
        config: EngineConfig,
        model: TargetModel,
        proposer: Proposer | None,
        caches: Mapping[str, CachePool],
        state: RequestState,
    ):
        self.model = model
        self.proposer = proposer
        self.caches = caches
        self.state = state
        self.k = config.num_speculative_tokens
        self.num_target_groups = len(model.cache_groups())
        self.metadata_builder = AttentionMetadataBuilder(
            model.cache_groups(),
            config.block_size,
            model.relative_extents,
            model.device,
            model.attention.needs_segments,
        )
        # [max_num_seqs + 1, k, vocab] fp32; None where every draft is an argmax or comes without logits
        self.draft_probabilities = allocate_draft_probabilities(config, model.vocab_size)
        self.acceptance_rule = ACCEPTANCE_RULES.get(config.rejection_sample_method)
        # [k] fp32; None where drafts are verified
        self.synthetic_rates = (
            torch.tensor(config.synthetic_acceptance_rates, device=model.device)
            if config.rejection_sample_method == "synthetic" and self.k
            else None
        )
        self.conditional_rates = None if self.synthetic_rates is None else conditional_rates(self.synthetic_rates)

    def forward(self, batch: InputBatch, features: StepFeatures | None = None) -> Forwarded:
        """features: of audio and images in the prompts."""
        indices = batch.indices
        layout = RowLayout(indices.query_start_loc_np, batch.first_position, indices.num_live, batch.max_seq_lens_np)
        metadata = self.metadata_builder.build(batch.block_tables[: self.num_target_groups], layout)
        embeds = self.model.embed(batch.token_ids(self.state, metadata.positions))
        if features is not None:
            request_of_row = row_indices(indices.query_start_loc_np, self.model.device).request_of_row
            embeds = features.merge(embeds, request_of_row, metadata.positions)
        return Forwarded(batch, metadata.positions, self.model.forward(embeds, metadata, self.caches))

    def forward_mixed(
        self, inputs: MixedInputs, num_tokens: int, max_seq_len: int, features: StepFeatures | None
    ) -> MixedForwarded:
        """The forward of any mix of requests with at most `num_tokens` rows. Those that are left over are dead rows of
        the last request, behind all others."""
        state = self.state
        counts, tables = state.of_rows(inputs.rows)
        layout = DeviceLayout.of(inputs.num_tokens, counts[1], num_tokens, max_seq_len)
        metadata = self.metadata_builder.build_on_device(tables[: self.num_target_groups], layout)
        embeds = self.model.embed(read_tokens(state.token_pool, inputs.rows, layout.request_of_row, layout.positions))
        if features is not None:
            embeds = features.merge(embeds, layout.request_of_row, layout.positions)
        hidden = self.model.forward(embeds, metadata, self.caches)
        batch = InputBatch(mixed_indices(inputs, num_tokens, self.k), counts, tables, (max_seq_len,))
        return MixedForwarded(inputs, Forwarded(batch, layout.positions, hidden))

    def verify(self, forwarded: Forwarded, results: StepResults) -> list[TokenLogprobs]:
        """Verify and commit, with every sampling parameter; returns the log-probabilities that requests ask for."""
        batch = forwarded.batch
        if batch.indices.num_logits == 0:  # partial chunks only: nothing is sampled
            none = torch.zeros(batch.num_requests, self.k + 1, dtype=torch.int64, device=self.model.device)
            windows = batch.windows(self.state, self.k)
            verdict = sample_and_match(none, windows.draft_ids, windows.num_drafts, windows.samples)
            self._commit(batch, verdict, results)
            return []
        rows = batch.sampling_rows(self.state, forwarded.positions)
        wants_logprobs = self.state.sampling.is_any_logprob(batch.indices.rows_np)
        if not wants_logprobs and self._can_sample_own(rows):
            self._match_and_commit(batch, self._sample_own(forwarded, rows), results)
            return []
        logits = self._logits(forwarded)
        raw = LogprobRows.keep(logits, batch, self.state, self.k, is_processed=False) if wants_logprobs else None
        law = self._processed_logprobs(batch, logits, rows) if wants_logprobs else None
        self._accept_and_commit(batch, logits, rows, results)
        return [kept.of_tokens(results.token_ids) for kept in (raw, law) if kept is not None]

    def _processed_logprobs(
        self, batch: InputBatch, logits: torch.Tensor, rows: SamplingRows | None
    ) -> LogprobRows | None:
        if not self.state.sampling.has_processed_logprobs_np[batch.indices.rows_np].any():
            return None
        return LogprobRows.keep(process(logits.clone(), rows), batch, self.state, self.k, is_processed=True)

    def verification(self, rows_np: Sequence[int]) -> Verification | None:
        """What requests of these persistent rows ask for; None where that is not recorded."""
        sampling = self.state.sampling
        if sampling.needs_host(rows_np):
            return None
        if sampling.needs_filters(rows_np):
            return Verification.FILTERED
        return Verification.TEMPERED if sampling.is_any_sampled(rows_np) else Verification.GREEDY

    def verify_as(self, verification: Verification, forwarded: Forwarded, results: StepResults) -> None:
        """As `verify`, where no request asks for more."""
        if verification is Verification.GREEDY:
            self.verify_greedy(forwarded, results)
        elif verification is Verification.TEMPERED:
            self.verify_tempered(forwarded, results)
        else:
            self.verify_filtered(forwarded, results)

    def verify_greedy(self, forwarded: Forwarded, results: StepResults) -> None:
        """The same where every request is greedy and asks for nothing."""
        hiddens = self._sampled_hiddens(forwarded)
        if self._can_sample_own(None):
            self._match_and_commit(forwarded.batch, self._sample_own(forwarded, None), results)
        elif fusion.is_fused(hiddens):
            from specbench.engine.kernels.sampling import ids_of_bests

            ids = ids_of_bests(self.model.compute_bests(hiddens), self.model.vocab_size)
            self._match_and_commit(forwarded.batch, ids, results)
        else:
            self._accept_and_commit(forwarded.batch, self._logits(forwarded), None, results)

    def verify_tempered(self, forwarded: Forwarded, results: StepResults) -> None:
        """The same where no request asks for more than a temperature."""
        batch, indices = forwarded.batch, forwarded.batch.indices
        if self._verifies_draws and fusion.is_fused(batch.rows):
            self._verify_draws_by_kernels(batch, self._logits(forwarded), None, results)
            return
        rows = self.state.sampling.tempered_rows(
            indices.persistent_row_of_logits, forwarded.positions, indices.token_row_of_logits
        )
        if self._can_sample_own(rows):
            self._match_and_commit(batch, self._sample_own(forwarded, rows), results)
        else:
            self._accept_and_commit(batch, self._logits(forwarded), rows, results)

    def verify_filtered(self, forwarded: Forwarded, results: StepResults) -> None:
        """The same where no request asks for more than filters and a temperature, whoever asks for which."""
        batch, indices = forwarded.batch, forwarded.batch.indices
        rows = self.state.sampling.filtered_rows(
            indices.persistent_row_of_logits, forwarded.positions, indices.token_row_of_logits
        )
        self._accept_and_commit(batch, self._logits(forwarded), rows, results)

    def _can_sample_own(self, rows: SamplingRows | None) -> bool:
        """Whether ranks share the vocabulary, and each can do its part of sampling with its own logits."""
        if self.model.vocabulary.is_whole:
            return False
        needs_laws = rows is not None and self.draft_probabilities is not None
        return rows is None or not (needs_laws or rows.needs_whole_rows)

    def _sample_own(self, forwarded: Forwarded, rows: SamplingRows | None) -> torch.Tensor:
        """The target's samples, int64 [num_logits], without gathering logits."""
        hiddens = self._sampled_hiddens(forwarded)
        if rows is None and fusion.is_fused(hiddens):
            return self.model.vocabulary.ids_of_bests(self.model.compute_bests(hiddens))
        own_logits = self.model.compute_own_logits(hiddens)
        return sample_own(own_logits, rows, self.model.vocabulary)

    def _sampled_hiddens(self, forwarded: Forwarded) -> torch.Tensor:
        logits_rows = forwarded.batch.indices.token_row_of_logits
        hiddens = forwarded.hidden.hidden_states
        return hiddens if logits_rows is None else hiddens[logits_rows]

    def _logits(self, forwarded: Forwarded) -> torch.Tensor:
        return self.model.compute_logits(self._sampled_hiddens(forwarded))

    def _accept_and_commit(
        self, batch: InputBatch, logits: torch.Tensor, rows: SamplingRows | None, results: StepResults
    ) -> None:
        """Which drafts the logits accept, as their parameters change them, and what is emitted behind them."""
        if rows is not None and rows.temperature is not None and self._verifies_draws:
            if fusion.is_fused(logits):
                self._verify_draws_by_kernels(batch, logits, rows, results)
            else:
                self._commit(batch, self._verify_draws(batch, process(logits, rows), rows), results)
            return
        self._match_and_commit(batch, draw(logits, rows), results)

    @property
    def _verifies_draws(self) -> bool:
        """Whether drafts of requests at a temperature have laws of their own, and are not accepted by coins alone."""
        return self.k > 0 and self.draft_probabilities is not None and self.synthetic_rates is None

    def _match_and_commit(self, batch: InputBatch, sampled_ids: torch.Tensor, results: StepResults) -> None:
        """Drafts against the target's own samples, [num_logits], or against coins."""
        if fusion.is_fused(sampled_ids) and batch.indices.num_live is not None:
            self._accept_by_kernel(batch, sampled_ids, results)
            return
        windows, sampled = batch.windows(self.state, self.k), batch.by_column(sampled_ids, self.k)
        if self.synthetic_rates is not None:
            verdict = accept_at_rates(sampled, windows, self.synthetic_rates)
        else:
            verdict = sample_and_match(sampled, windows.draft_ids, windows.num_drafts, windows.samples)
        self._commit(batch, verdict, results)

    def _accept_by_kernel(self, batch: InputBatch, sampled_ids: torch.Tensor, results: StepResults) -> None:
        """Match or coins, and the commit, in one launch: for steps whose requests have equally many rows."""
        from specbench.engine.kernels.acceptance import accept_and_commit

        assert batch.indices.num_live is not None
        state = self.state
        accept_and_commit(
            sampled_ids, batch.rows, batch.indices.num_live, state.token_pool, state.counts, results.packed,
            state.sampling.key, self.conditional_rates,
        )  # fmt: skip

    def _verify_draws(self, batch: InputBatch, logits: torch.Tensor, rows: SamplingRows) -> Verdict:
        """Verification of drafts with probabilities; greedy requests of the batch match the argmax."""
        assert self.draft_probabilities is not None and self.acceptance_rule is not None
        windows = batch.windows(self.state, self.k)
        argmax = batch.by_column(logits.argmax(dim=-1), self.k)
        greedy = sample_and_match(argmax, windows.draft_ids, windows.num_drafts, windows.samples)
        laws = Laws(
            target_logits=batch.by_column(logits, self.k),
            target_total=batch.by_column(log_total(logits), self.k),
            draft_probabilities=self.draft_probabilities,
            rows=windows.rows,
        )
        drawn = verify_draws(self.acceptance_rule, windows, laws, batch.by_column(rows.positions, self.k))
        return greedy.where(self.state.sampling.temperature[windows.rows] == 0, drawn)

    def _verify_draws_by_kernels(
        self, batch: InputBatch, logits: torch.Tensor, rows: SamplingRows | None, results: StepResults
    ) -> None:
        """The same and the commit, in steps of any shape. `rows` None: no request asks for more than a temperature."""
        from specbench.engine.kernels.drawn_verification import DrawnWindows, verify_and_commit

        assert self.draft_probabilities is not None
        support = Support(None, None)
        if rows is not None:
            apply_rules_(logits, rows)
            support = support_of(logits, rows)
        indices, state = batch.indices, self.state
        windows = DrawnWindows(
            rows=batch.rows,
            num_drafts=indices.num_drafts,
            samples=indices.samples,
            num_certain_rows=indices.num_certain_rows,
            row_of_column=indices.logits_row_of_column,
            token_pool=state.token_pool,
            counts=state.counts,
            keys=state.sampling.key,
            temperature=state.sampling.temperature,
            draft_probabilities=self.draft_probabilities,
            packed=results.packed,
        )
        is_block = self.acceptance_rule is block_rule
        verify_and_commit(
            logits, windows, indices.persistent_row_of_logits, is_block=is_block,
            threshold=support.threshold, total=support.total,
        )  # fmt: skip

    def _commit(self, batch: InputBatch, verdict: Verdict, results: StepResults) -> None:
        num_valid = batch.indices.num_certain_rows + verdict.num_accepted
        results.fill(verdict, batch.counts + torch.stack([verdict.num_sampled, num_valid]))
        self.state.commit(batch.rows, verdict.token_ids, batch.num_tokens, results.counts)

    def draft(
        self,
        forwarded: Forwarded,
        results: StepResults,
        *,
        is_sampled: bool,
        admitted: Sequence[AdmittedRequest] = (),
        features: StepFeatures | None = None,
    ) -> None:
        """Let the proposer draft behind what was committed. is_sampled: whether a request of the batch has a
        temperature."""
        if self.proposer is not None:
            live = forwarded.batch.indices.is_live
            self._propose(forwarded, results, live, None, is_sampled=is_sampled, admitted=admitted, features=features)

    def draft_mixed(
        self, mixed: MixedForwarded, results: StepResults, *, is_sampled: bool, features: StepFeatures | None
    ) -> None:
        """The same behind `forward_mixed`, in passes of as many rows."""
        inputs, forwarded = mixed.inputs, mixed.forwarded
        rows = MixedRows(len(forwarded.positions), inputs.num_tokens, inputs.is_chunk > 0, inputs.samples)
        is_live = inputs.num_tokens.clamp_max(1)
        self._propose(forwarded, results, is_live, rows, is_sampled=is_sampled, admitted=(), features=features)

    def _propose(
        self,
        forwarded: Forwarded,
        results: StepResults,
        is_live: torch.Tensor | None,
        mixed: MixedRows | None,
        *,
        is_sampled: bool,
        admitted: Sequence[AdmittedRequest],
        features: StepFeatures | None,
    ) -> None:
        assert self.proposer is not None
        batch, indices, state = forwarded.batch, forwarded.batch.indices, self.state
        num_tokens, num_computed = results.counts
        draft_batch = DraftBatch(
            rows=batch.rows,
            rows_np=indices.rows_np,
            mixed=mixed,
            query_start_loc_np=indices.query_start_loc_np,
            first_position=batch.first_position,
            num_valid=num_computed - batch.first_position,
            num_accepted=results.num_accepted,
            is_live=is_live,
            is_chunk_np=indices.is_chunk_np,
            is_partial_np=indices.is_partial_np,
            max_seq_lens_np=batch.max_seq_lens_np,
            hidden_states=forwarded.hidden.hidden_states,
            residual=forwarded.hidden.residual,
            token_pool=state.token_pool,
            draft_columns=torch.where(indices.samples > 0, num_tokens, state.spill_column),
            block_tables=batch.block_tables[self.num_target_groups :],
            caches=self.caches,
            sampling=self._draft_sampling(batch.rows, num_tokens) if is_sampled else None,
            admitted=admitted,
            features=features,
        )
        self.proposer.propose(draft_batch)
        self._count_drafts(draft_batch, indices.samples, results)

    def _count_drafts(self, batch: DraftBatch, samples: torch.Tensor, results: StepResults) -> None:
        """samples: [num_requests] int64, 0 for a request whose drafts nobody reads, else 1."""
        token_pool, draft_columns = batch.token_pool, batch.draft_columns
        if fusion.is_fused(token_pool):
            from specbench.engine.kernels.drafts import count_drafts

            count_drafts(token_pool, batch.rows, draft_columns, samples, self.k, results.num_proposed)
            return
        columns = draft_columns[:, None] + self.state.columns[: self.k]
        is_draft = token_pool[batch.rows[:, None], columns] >= 0
        torch.mul(is_draft.long().cumprod(dim=1).sum(dim=1), samples, out=results.num_proposed)

    def _draft_sampling(self, rows: torch.Tensor, num_tokens: torch.Tensor) -> DraftSampling | None:
        """How the drafts of these persistent rows are drawn; None where each is the argmax."""
        if self.draft_probabilities is None:
            return None
        return DraftSampling(
            probabilities=self.draft_probabilities,
            rows=rows,
            temperature=self.state.sampling.temperature[rows],
            keys=self.state.sampling.key[rows],
            window_start=num_tokens - 1,
        )
