"""One step on the device: inputs, forward, verification, commit, drafts.

Belongs here: the order of one step, and whether its parts are replayed or run. Does not belong here: what runs
(scheduling/), what one part of the step computes (stages.py), any feature of one model or proposer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from specbench.engine.config import EngineConfig
from specbench.engine.execution.cuda_graphs import CapturedMixed, CapturedStep, CapturedSteps, Recorder, StepLimits
from specbench.engine.execution.features import FeatureBuffers, step_content
from specbench.engine.execution.input_batch import InputBatch
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.stages import Forwarded, StepStages
from specbench.engine.execution.step_clock import StepClock
from specbench.engine.execution.step_results import PendingStep, StepResults
from specbench.engine.execution.token_logprobs import PromptLogprobs, TokenLogprobs, prompt_logprobs
from specbench.engine.layers.cache import CachePool
from specbench.engine.layers.features import StepFeatures
from specbench.engine.models.target import ContentEncoder, TargetModel
from specbench.engine.proposers.proposer import AdmittedRequest, Proposer
from specbench.engine.scheduling.step import SchedulerOutput


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
        self.k = config.num_speculative_tokens
        self.content_encoder = content_encoder
        self.proposer = proposer
        self.state = RequestState.of(config, len(caches), model.vocab_size, model.device)
        self.stages = StepStages(config, model, proposer, caches, self.state)
        self.captured_steps = CapturedSteps()
        #: None before anything is recorded.
        self._recorder: Recorder | None = None
        self._clock = StepClock(model.device)
        self.limits = StepLimits.of(config, proposer)
        #: None where no graph reads features of audio or images.
        self.feature_buffers: FeatureBuffers | None = None
        if content_encoder is not None and config.cuda_graphs:
            self.feature_buffers = FeatureBuffers(
                config.max_num_seqs + 1, self.limits.num_features, model.hidden_size, model.dtype, model.device
            )

    @torch.inference_mode()
    def capture(self, on_progress: Callable[[str], None], *, is_trial: bool = False) -> Recorder:
        """Record steps, before the first one runs; in a trial the largest alone."""
        self._recorder = self.captured_steps.capture(
            self.stages, self.limits, self.feature_buffers, on_progress, is_trial=is_trial
        )
        return self._recorder

    def release_graphs(self) -> None:
        """Destroy what is recorded; no step runs afterwards."""
        if self._recorder is not None:
            self._recorder.release()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> PendingStep:
        """Queue a step's work; nothing here waits for the device."""
        if output.finished_rows and self.proposer is not None:
            self.proposer.release(output.finished_rows)
        self.state.apply(output)
        captured = self.captured_steps.find(output)
        if captured is not None:
            return self._replay(captured, output)
        mixed = self.captured_steps.find_mixed(output)
        return self._run(output) if mixed is None else self._replay_mixed(mixed, output)

    def _run(self, output: SchedulerOutput) -> PendingStep:
        """A step of any shape, as it comes."""
        results = StepResults.empty(self.k, output.num_requests, self.state.device)
        batch = InputBatch.gather(output, self.state, self.k)
        times = self._clock.begin()
        features = self._features(output)
        forwarded = self.stages.forward(batch, features)
        times.mark()
        token_logprobs = self.stages.verify(forwarded, results)
        times.mark()
        self._draft(forwarded, results, output, features)
        self._clock.end(times)
        found = self._prompt_logprobs(forwarded, output)
        return PendingStep(results, output.num_requests, times, token_logprobs, found)

    def _replay_mixed(self, captured: CapturedMixed, output: SchedulerOutput) -> PendingStep:
        """A step of any kind, in parts that are recorded. What nobody recorded runs on the real requests."""
        verification = self.stages.verification(output.rows)
        can_draft = self.proposer is None or captured.can_draft(output)
        asks_for_prompts = self.state.sampling.is_any_prompt_logprob(output.rows)
        is_whole = verification is not None and can_draft and not asks_for_prompts
        # Taken before anything is committed.
        batch = None if is_whole else InputBatch.gather(output, self.state, self.k)
        captured.set(output)
        times = self._clock.begin()
        features = self._features(output)
        self._hand_over(features)
        captured.forward()
        real = None if batch is None else captured.real_requests(batch)
        times.mark()
        token_logprobs: list[TokenLogprobs] = []
        results = captured.results.first(output.num_requests)
        if verification is not None:
            captured.verify(verification)
        else:
            assert real is not None
            token_logprobs = self.stages.verify(real, results)
            captured.clear_padding(output.num_requests)
        times.mark()
        if can_draft and self.proposer is not None:
            captured.draft(output, self._draws(output))
        elif real is not None:
            self._draft(real, results, output, features)
        self._clock.end(times)
        found = {} if real is None else self._prompt_logprobs(real, output)
        return PendingStep(captured.results, output.num_requests, times, token_logprobs, found)

    def _draft(
        self, forwarded: Forwarded, results: StepResults, output: SchedulerOutput, features: StepFeatures | None
    ) -> None:
        """Let the proposer draft as it comes."""
        is_sampled = self.state.sampling.is_any_sampled(output.rows)
        admitted = [AdmittedRequest(new.row, new.token_ids, new.sampling.key) for new in output.new_requests]
        self.stages.draft(forwarded, results, is_sampled=is_sampled, admitted=admitted, features=features)

    def _prompt_logprobs(self, forwarded: Forwarded, output: SchedulerOutput) -> dict[int, PromptLogprobs]:
        if not self.state.sampling.is_any_prompt_logprob(output.rows):
            return {}
        hidden_states = forwarded.hidden.hidden_states
        return prompt_logprobs(self.stages.model, self.state, output, forwarded.batch, hidden_states)

    def _draws(self, output: SchedulerOutput) -> bool:
        """Whether drafts are drawn from laws that are kept."""
        return self.stages.draft_probabilities is not None and self.state.sampling.is_any_sampled(output.rows)

    def _features(self, output: SchedulerOutput) -> StepFeatures | None:
        """What placeholders of this step's rows stand for; None where its rows are token ids alone."""
        content = step_content(output.content, output.num_requests, self.state.device)
        if content is None:
            return None
        assert self.content_encoder is not None, "a request with content is refused where the model has no tower"
        return content.encode(self.content_encoder.encode_content)

    def _hand_over(self, features: StepFeatures | None) -> None:
        """Leave the features of a step where recorded steps read them."""
        if features is not None:
            assert self.feature_buffers is not None
            self.feature_buffers.fill(features)

    def _replay(self, captured: CapturedStep, output: SchedulerOutput) -> PendingStep:
        """A step of verifications, padded to a recorded shape. Parts that nobody recorded run on its buffers."""
        verification = self.stages.verification(output.rows)
        results = captured.results.first(output.num_requests)
        token_logprobs: list[TokenLogprobs] = []
        captured.set(output)
        times = self._clock.begin()
        features = self._features(output)
        self._hand_over(features)
        captured.forward()
        times.mark()
        if verification is not None:
            captured.verify(verification)
        else:
            token_logprobs = self.stages.verify(captured.real_requests(output), results)
            captured.clear_padding(output.num_requests)
        times.mark()
        if captured.can_draft:
            captured.draft(self._draws(output), has_features=features is not None)
        elif self.proposer is not None:
            self._draft(captured.real_requests(output), results, output, features)
        self._clock.end(times)
        return PendingStep(captured.results, output.num_requests, times, token_logprobs, {})
