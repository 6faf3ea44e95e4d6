"""One step on the device: inputs, forward, verification, commit, drafts.

Belongs here: the order of one step. Does not belong here: what runs (scheduling/), what one part of the step does
(its own file), any feature of one model or proposer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from specbench.engine.config import EngineConfig
from specbench.engine.execution.features import encode_step
from specbench.engine.execution.input_batch import InputBatch
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.token_logprobs import LogprobRows, prompt_logprobs
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.features import StepFeatures
from specbench.engine.layers.metadata import AttentionMetadata, AttentionMetadataBuilder, RowLayout, TargetOutput
from specbench.engine.models.target import ContentEncoder, TargetModel
from specbench.engine.proposers.proposer import AdmittedRequest, DraftBatch, Proposer
from specbench.engine.proposers.row_indices import row_indices
from specbench.engine.sampling.drafting import DraftSampling, allocate_draft_probabilities
from specbench.engine.sampling.row_chunks import log_total
from specbench.engine.sampling.sampler import SamplingRows, process, sample
from specbench.engine.sampling.verification import (
    ACCEPTANCE_RULES,
    Laws,
    Verdict,
    Windows,
    accept_at_rates,
    sample_and_match,
    verify_draws,
)
from specbench.engine.scheduling.step import PARTIAL_CHUNK, SchedulerOutput, StepOutput


class ModelRunner:
    """Runs steps in the order in which they are handed over; holds the request rows."""

    def __init__(
        self,
        config: EngineConfig,
        model: TargetModel,
        proposer: Proposer | None,
        caches: Mapping[str, CachePool],
        content_encoder: ContentEncoder | None = None,
    ):
        self.model = model
        self.content_encoder = content_encoder
        self.proposer = proposer
        self.caches = caches
        self.k = config.num_speculative_tokens
        self.num_target_groups = len(model.cache_groups())
        self.state = RequestState.of(config, len(caches), model.vocab_size, model.device)
        self.metadata_builder = AttentionMetadataBuilder(
            model.cache_groups(),
            config.block_size,
            model.relative_extents,
            model.device,
            model.attention.needs_segments,
        )
        # [max_num_seqs, k, vocab] fp32; None where every draft is an argmax or comes without logits
        self.draft_probabilities = allocate_draft_probabilities(config, model.vocab_size)
        self.acceptance_rule = ACCEPTANCE_RULES.get(config.rejection_sample_method)
        # [k] fp32; None where drafts are verified
        self.synthetic_rates = (
            torch.tensor(config.synthetic_acceptance_rates, device=model.device)
            if config.rejection_sample_method == "synthetic" and self.k
            else None
        )
        self._is_cpu = model.device.type == "cpu"

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepOutput:
        if output.finished_rows and self.proposer is not None:
            self.proposer.release(output.finished_rows)
        self.state.apply(output)
        batch = InputBatch.gather(output, self.state, self.k)
        times = [time.perf_counter()]
        features = encode_step(output.content, output.num_requests, self.content_encoder, self.model.device)
        metadata, hidden = self._forward(output, batch, features)
        times.append(time.perf_counter())
        verdict, logprob_rows = self._verify(output, batch, metadata, hidden)
        counts = self._commit(batch, verdict)
        times.append(time.perf_counter())
        num_proposed = self._propose(output, batch, verdict, counts, hidden, features)
        times.append(time.perf_counter())
        step_output = self._to_host(verdict, num_proposed, times)
        for rows in logprob_rows:
            step_output.logprobs |= rows.of_tokens(verdict)
        if self.state.sampling.is_any_prompt_logprob(output.rows):
            step_output.prompt_logprobs = prompt_logprobs(self.model, self.state, output, batch, hidden.hidden_states)
        return step_output

    def _forward(
        self, output: SchedulerOutput, batch: InputBatch, features: StepFeatures | None
    ) -> tuple[AttentionMetadata, TargetOutput]:
        layout = RowLayout(batch.indices.query_start_loc_np, batch.first_position, None, output.max_seq_lens)
        metadata = self.metadata_builder.build(batch.block_tables[: self.num_target_groups], layout)
        embeds = self.model.embed(batch.token_ids(self.state, metadata.positions))
        if features is not None:
            indices = row_indices(batch.indices.query_start_loc_np, self.model.device)
            embeds = features.merge(embeds, indices.request_of_row, metadata.positions)
        return metadata, self.model.forward(embeds, metadata, self.caches)

    def _verify(
        self, output: SchedulerOutput, batch: InputBatch, metadata: AttentionMetadata, hidden: TargetOutput
    ) -> tuple[Verdict, list[LogprobRows]]:
        """The verdict, and the logits of the requests that want log-probabilities of what it emits."""
        indices, windows = batch.indices, batch.windows(self.state, self.k)
        if indices.num_logits == 0:  # partial chunks only: nothing is sampled
            none = torch.zeros(len(output.rows), self.k + 1, dtype=torch.int64, device=self.model.device)
            return sample_and_match(none, windows.draft_ids, windows.num_drafts, windows.samples), []
        logits_rows = indices.token_row_of_logits
        hiddens = hidden.hidden_states if logits_rows is None else hidden.hidden_states[logits_rows]
        rows = batch.sampling_rows(self.state, output, metadata.positions)
        logits = self.model.compute_logits(hiddens)
        wants_logprobs = self.state.sampling.is_any_logprob(output.rows)
        raw = (
            LogprobRows.keep(logits, output, batch, self.state, self.k, is_processed=False) if wants_logprobs else None
        )
        logits = process(logits, rows)
        law = LogprobRows.keep(logits, output, batch, self.state, self.k, is_processed=True) if wants_logprobs else None
        verdict = self._accept(batch, windows, logits, rows)
        return verdict, [kept for kept in (raw, law) if kept is not None]

    def _accept(self, batch: InputBatch, windows: Windows, logits: torch.Tensor, rows: SamplingRows | None) -> Verdict:
        """Which drafts the processed logits accept, and what is emitted behind them."""
        if self.synthetic_rates is not None:
            return accept_at_rates(batch.by_column(sample(logits, rows), self.k), windows, self.synthetic_rates)
        if rows is not None and rows.temperature is not None and self.draft_probabilities is not None and self.k:
            return self._verify_draws(batch, windows, logits, rows)
        sampled = batch.by_column(sample(logits, rows), self.k)
        return sample_and_match(sampled, windows.draft_ids, windows.num_drafts, windows.samples)

    def _verify_draws(self, batch: InputBatch, windows: Windows, logits: torch.Tensor, rows: SamplingRows) -> Verdict:
        """Verification of drafts with probabilities; greedy requests of the batch match the argmax."""
        assert self.draft_probabilities is not None and self.acceptance_rule is not None
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

    def _commit(self, batch: InputBatch, verdict: Verdict) -> torch.Tensor:
        """Returns committed and computed tokens of each request, [2, num_requests]."""
        num_valid = batch.indices.num_certain_rows + verdict.num_accepted
        counts = batch.counts + torch.stack([verdict.num_sampled, num_valid])
        self.state.commit(batch.rows, verdict.token_ids, batch.num_tokens, counts)
        return counts

    def _propose(
        self,
        output: SchedulerOutput,
        batch: InputBatch,
        verdict: Verdict,
        counts: torch.Tensor,
        hidden: TargetOutput,
        features: StepFeatures | None,
    ) -> torch.Tensor:
        """Let the proposer draft; returns how many drafts it left for each request, [num_requests]."""
        if self.proposer is None:
            return verdict.num_accepted  # zeros
        is_sampled = batch.indices.samples > 0
        num_tokens, num_computed = counts
        draft_columns = torch.where(is_sampled, num_tokens, self.state.spill_column)
        draft_batch = DraftBatch(
            rows=batch.rows,
            rows_np=output.rows,
            query_start_loc_np=batch.indices.query_start_loc_np,
            first_position=batch.first_position,
            num_valid=num_computed - batch.first_position,
            num_accepted=verdict.num_accepted,
            is_chunk_np=batch.indices.is_chunk_np,
            is_partial_np=tuple(mode == PARTIAL_CHUNK for mode in output.modes),
            max_seq_lens_np=output.max_seq_lens,
            hidden_states=hidden.hidden_states,
            residual=hidden.residual,
            token_pool=self.state.token_pool,
            draft_columns=draft_columns,
            block_tables=batch.block_tables[self.num_target_groups :],
            caches=self.caches,
            features=features,
            sampling=self._draft_sampling(output, batch, num_tokens),
            admitted=[AdmittedRequest(new.row, new.token_ids, new.sampling.key) for new in output.new_requests],
        )
        self.proposer.propose(draft_batch)
        columns = draft_columns[:, None] + self.state.columns[: self.k]
        is_draft = self.state.token_pool[batch.rows[:, None], columns] >= 0
        return is_draft.long().cumprod(dim=1).sum(dim=1) * is_sampled

    def _draft_sampling(
        self, output: SchedulerOutput, batch: InputBatch, num_tokens: torch.Tensor
    ) -> DraftSampling | None:
        """How this batch's drafts are drawn; None where each is the argmax."""
        if self.draft_probabilities is None or not self.state.sampling.is_any_sampled(output.rows):
            return None
        return DraftSampling(
            probabilities=self.draft_probabilities,
            rows=batch.rows,
            temperature=self.state.sampling.temperature[batch.rows],
            keys=self.state.sampling.key[batch.rows],
            window_start=num_tokens - 1,
        )

    def _to_host(self, verdict: Verdict, num_proposed: torch.Tensor, times: list[float]) -> StepOutput:
        """One copy from the device for everything that the host learns of a step."""
        counts = (verdict.num_sampled, verdict.num_drafted, num_proposed)
        step = torch.cat([verdict.token_ids, *(count[:, None] for count in counts)], dim=1).cpu().numpy()
        step_output = StepOutput(
            token_ids=step[:, :-3], num_sampled=step[:, -3], num_drafted=step[:, -2], num_proposed=step[:, -1]
        )
        if self._is_cpu:  # elsewhere the host's clock says when work was queued, not how long it took
            step_output.target_s, step_output.verify_s = times[1] - times[0], times[2] - times[1]
            step_output.draft_s = times[3] - times[2]
        return step_output
