"""The embedded engine's one public class: requests in, results with every verify step out.

Belongs here: the life of a request and the order schedule -> execute -> settle. Does not belong here: what is
scheduled (scheduling/), how a step runs (execution/), what is recorded about a run (benchmark.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.checkpoints.load_progress import LoadProgress
from specbench.engine.config import EngineConfig
from specbench.engine.content.content_tokens import AUDIO, NUM_BANDS, NUM_BINS
from specbench.engine.content.hearing import ClipReader, hear
from specbench.engine.content.placement import Content, PlacedContent, place
from specbench.engine.execution.engine_memory import NO_PROPOSER, allocate_caches, budget_memory, with_equal_blocks
from specbench.engine.execution.memory import MemoryPlan, memory_text
from specbench.engine.execution.model_runner import ModelRunner
from specbench.engine.execution.step_memory import measure_step_memory, measures_steps
from specbench.engine.execution.step_results import PendingStep
from specbench.engine.layers.attention_backends.choose import make_backend
from specbench.engine.layers.parallel import ALONE, TensorParallel
from specbench.engine.models.registry import build_model, content_tokens, load_model_config, open_checkpoint
from specbench.engine.models.target import ContentEncoder
from specbench.engine.output_stream import OutputStream
from specbench.engine.proposer_table import PROPOSERS
from specbench.engine.proposers.proposer import ProposerRequirements
from specbench.engine.proposers.registry import make_proposer
from specbench.engine.request import Request
from specbench.engine.request_records import failed_result, request_record
from specbench.engine.sampling.parameters import bad_word_sequences, check_parameters, stop_ids
from specbench.engine.scheduling.kv_cache import KVCacheManager
from specbench.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from specbench.engine.scheduling.step import SchedulerOutput, StepOutput
from specbench.engine.tokenizer import encode_prompt, load_tokenizer
from specbench.errors import UserError
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult, Load, TokenLogprob
from specbench.record_columns import RequestSteps
from specbench.records import EngineStep
from specbench.submission import Client, Submission

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _Running:
    """A request, its stop conditions and its verify steps so far."""

    def __init__(self, request: Request, stream: OutputStream, prompt_text: str | None):
        self.request = request
        self.stream = stream
        self.prompt_text = prompt_text
        self.verify_steps = RequestSteps(request.request_id)
        #: None where they were not asked for.
        self.logprobs: list[TokenLogprob] | None = None if request.sampling.logprobs is None else []
        #: The first token has nothing before it.
        self.prompt_logprobs: list[TokenLogprob | None] | None = [None] if request.needs_prompt_logprobs else None


@dataclass(frozen=True, slots=True)
class _OutstandingStep:
    """A step that the device has before it, or has done and nobody has looked at."""

    output: SchedulerOutput
    pending: PendingStep
    #: When it was scheduled, and how long that took.
    start_s: float
    schedule_s: float


class LLMEngine:
    """Continuous batching over one checkpoint. `add_request` and `step` are the loop; `generate` runs it under a load.

    `clock` gives seconds since the run's start.
    """

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.perf_counter,
        on_progress: Callable[[str], None] = lambda message: None,
        parallel: TensorParallel = ALONE,
    ):
        assert parallel.shard == config.shard
        self.config = config
        self.clock = clock
        on_progress("reading the checkpoint")
        checkpoint = open_checkpoint(config.checkpoint, config.load, config.quantised_weights)
        self.model_config = load_model_config(checkpoint)
        self.tokenizer = load_tokenizer(config.checkpoint, config.tokenizer, config.chat_template)
        on_progress("loading weights")
        checkpoint = replace(checkpoint, on_read=LoadProgress(checkpoint.num_bytes, on_progress))
        device = torch.device(config.device)
        self.model = build_model(
            checkpoint,
            self.model_config,
            DTYPES[config.dtype],
            device,
            make_backend(config.attention_backend),
            parallel,
        )
        proposer = make_proposer(config, checkpoint)
        requirements = NO_PROPOSER if proposer is None else proposer.requirements()
        _check_sampling(config)
        specs = self.model.cache_groups() + requirements.cache_groups
        if proposer is not None:
            proposer.load(self.model)
        self._content_tokens = content_tokens(self.model_config)
        encoder = cast(ContentEncoder, self.model) if self._content_tokens else None
        # What does not fit in any case is refused before anything runs.
        self.memory = budget_memory(config, checkpoint, self.model_config, specs, requirements)
        if measures_steps(device):
            on_progress("measuring the memory of the largest steps")
            step_memory = measure_step_memory(config, self.model, proposer, specs, encoder)
            self.memory = budget_memory(config, checkpoint, self.model_config, specs, requirements, step_memory)
        self.memory = with_equal_blocks(config, self.memory, parallel)
        on_progress(f"memory: {memory_text(self.memory)}")
        self.caches = allocate_caches(self.memory, self.model.dtype, device)
        self.runner = ModelRunner(config, self.model, proposer, self.caches, encoder)
        if config.cuda_graphs:
            self.runner.capture(on_progress)
        self.scheduler = _build_scheduler(config, specs, self.memory, requirements)
        self._running: dict[str, _Running] = {}
        self._outstanding: deque[_OutstandingStep] = deque()
        self._next_generation = 0

    def add_request(self, source: GenerateRequest, arrival_s: float, clips: Sequence[Content] | None = None) -> None:
        """Queue a request; `clips`: those of its audio, where they have been heard already.

        Raises UserError when it can never run: no tokenizer, ids or length out of range, a clip that can't be heard.
        """
        if source.request_id in self._running:
            raise UserError(f"request id {source.request_id!r} is already running: ids must be unique")
        prompt = encode_prompt(self.tokenizer, source)
        heard = [hear(one) for one in source.audio] if clips is None else clips
        token_ids, content = self.place_clips(prompt.token_ids, heard)
        self._check_prompt(source.request_id, token_ids)
        max_output = min(source.sampling.max_output_tokens, self.config.max_model_len - len(token_ids))
        stop_token_ids, bad_words = self._check_sampling(source)
        request = Request(
            source,
            token_ids,
            max_output,
            arrival_s,
            self._next_generation,
            stop_token_ids,
            bad_words,
            content=content,
        )
        self._next_generation += 1
        stream = OutputStream(source.sampling, stop_token_ids, max_output, self.tokenizer)
        self._check_fits(request)
        self._running[source.request_id] = _Running(request, stream, prompt.text)
        self.scheduler.add(request)

    def place_clips(
        self, token_ids: list[int], clips: Sequence[Content]
    ) -> tuple[list[int], tuple[PlacedContent, ...]]:
        """The prompt with each clip's placeholders behind its marker, and what they stand for. UserError where there
        are not as many clips as markers."""
        if not clips:
            return token_ids, ()
        tokens = self._content_tokens.get(AUDIO)
        if tokens is None:
            raise UserError(
                f"{self.config.checkpoint}: holds no audio tower (model.audio.*) for {NUM_BANDS} bands of {NUM_BINS} "
                "bins, and the request has audio; choose another checkpoint, or ask without audio"
            )
        return place(token_ids, clips, tokens)

    def _check_sampling(self, source: GenerateRequest) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        """Ids that end the request, and token sequences that it may not generate."""
        sampling = source.sampling
        eos_token_ids = self.model_config.eos_token_ids
        check_parameters(f"request {source.request_id}: ", sampling, self.model_config.vocab_size, eos_token_ids)
        if (sampling.stop or sampling.bad_words) and self.tokenizer is None:
            raise UserError(f"request {source.request_id}: stop strings and bad words need one: set model.tokenizer")
        encode = None if self.tokenizer is None else self.tokenizer.encode
        return stop_ids(sampling, eos_token_ids), bad_word_sequences(sampling, encode)

    def _check_prompt(self, request_id: str, token_ids: list[int]) -> None:
        if not token_ids:
            raise UserError(f"request {request_id}: the prompt is empty: give at least one token")
        if len(token_ids) >= self.config.max_model_len:
            raise UserError(
                f"request {request_id}: a prompt of {len(token_ids)} tokens leaves no room for output in a context of "
                f"model.max_model_len={self.config.max_model_len}: shorten it or raise model.max_model_len"
            )
        if min(token_ids) < 0 or max(token_ids) >= self.model_config.vocab_size:
            raise UserError(
                f"request {request_id}: prompt_token_ids must lie in [0, {self.model_config.vocab_size}), the "
                "checkpoint's vocabulary"
            )

    def _check_fits(self, request: Request) -> None:
        extent = self.scheduler.longest_extent(request)
        too_small = self.scheduler.kv_cache.group_too_small(extent)
        if too_small is not None:
            group, needed, available = too_small
            raise UserError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt and {request.max_output_tokens} "
                f"output tokens, drafts included, need {needed} blocks of cache group {group}, which has {available}: "
                "raise cache.num_blocks or lower eval.max_output_tokens"
            )

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    def reset_prefix_cache(self) -> None:
        """What ran so far no longer speeds up what comes; running requests go on."""
        self.scheduler.kv_cache.forget_all()

    def memory_budget(self) -> dict[str, Any]:
        """The memory plan, as it stands in run.json."""
        return self.memory.to_dict()

    def abort(self, request_id: str) -> GenerateResult | None:
        """End a running request early. Its result, with what it has so far; None while a step of it is outstanding:
        then it comes out of `step` when that settles, and nothing more is kept. UserError where no such request is
        running."""
        running = self._running.get(request_id)
        if running is None:
            raise UserError(f"request id {request_id!r} is not running: it has ended, or was never added")
        if not self.scheduler.abort(running.request):
            return None
        return self._finish(self._running.pop(request_id))

    def step(self) -> tuple[list[GenerateResult], EngineStep | None]:
        """Schedule and run one step, and settle the oldest one that is due. Returns the requests that finished, and
        the settled step's record (None while the pipeline fills)."""
        start_s = self.clock()
        output = self.scheduler.schedule()
        schedule_s = self.clock() - start_s
        if output.num_requests:
            self._outstanding.append(_OutstandingStep(output, self._execute(output), start_s, schedule_s))
        elif not self._outstanding:
            raise AssertionError("requests are waiting, and nothing can ever run: admission let one in that cannot fit")
        if len(self._outstanding) > self.config.pipeline_depth or not output.num_requests:
            return self._settle(self._outstanding.popleft())
        return [], None

    def _execute(self, output: SchedulerOutput) -> PendingStep:
        return self.runner.execute(output)

    def _settle(self, step: _OutstandingStep) -> tuple[list[GenerateResult], EngineStep]:
        output, result = step.output, step.pending.wait()
        end_s = self.clock()
        finished = []
        kv_blocks_used = self.scheduler.kv_cache.num_blocks_used
        num_sampled, num_drafted = result.num_sampled.tolist(), result.num_drafted.tolist()
        num_proposed, token_ids = result.num_proposed.tolist(), result.token_ids.tolist()
        for index, request_id in enumerate(output.request_ids):
            running = self._running.get(request_id)
            if running is None or running.request.generation != output.generations[index]:
                raise AssertionError("a row is released only when its last outstanding step settles")
            if index in result.prompt_logprobs:
                _extend_prompt_logprobs(running.prompt_logprobs, *result.prompt_logprobs[index])
            num_kept = self._settle_request(
                running,
                step,
                index,
                token_ids[index][: num_sampled[index]],
                num_drafted[index],
                num_proposed[index],
                end_s,
            )
            if running.logprobs is not None and num_kept:
                running.logprobs += result.logprobs[index][:num_kept]
            if running.request.is_finished and not running.request.in_flight:
                finished.append(self._finish(self._running.pop(request_id)))
        return finished, _engine_step(step, result, end_s, kv_blocks_used)

    def _settle_request(
        self,
        running: _Running,
        step: _OutstandingStep,
        index: int,
        token_ids: list[int],
        num_drafted: int,
        num_proposed: int,
        end_s: float,
    ) -> int:
        """Returns how many of `token_ids` are kept."""
        request, output = running.request, step.output
        if request.first_scheduled_s is None:
            request.first_scheduled_s = step.start_s
        kept: list[int] = []
        if token_ids and not request.is_finished:
            kept, reason = running.stream.push(token_ids)
            if request.num_output_tokens == 0:
                request.first_token_s = end_s
            else:
                num_accepted, output_index = len(token_ids) - 1, request.num_output_tokens
                running.verify_steps.add(
                    (output.step, output_index, num_drafted, num_accepted, len(kept), output.num_requests, end_s)
                )
            request.last_token_s = end_s
            if reason is not None:
                self.scheduler.finish(request, reason)
        num_rows = output.num_tokens[index]
        num_rejected = num_rows - len(token_ids) if output.is_decode(index) else 0
        self.scheduler.settle(request, num_rejected, kept, num_proposed)
        return len(kept)

    def _finish(self, running: _Running) -> GenerateResult:
        request, stream = running.request, running.stream
        text_ids = request.output_token_ids[:-1] if stream.ends_in_stop_token else request.output_token_ids
        answer, reasoning = "", ""
        if self.tokenizer is not None:
            num_cut_chars = stream.match.num_cut_chars if stream.match else 0
            channels = self.tokenizer.split_channels(text_ids, num_cut_chars, request.prompt_token_ids)
            answer, reasoning = channels.answer_text, channels.reasoning_text
        return GenerateResult(
            record=request_record(request),
            verify_steps=running.verify_steps,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            output_text=answer,
            reasoning_text=reasoning,
            prompt_text=running.prompt_text,
            logprobs=running.logprobs,
            prompt_logprobs=running.prompt_logprobs,
            sampling=request.sampling,
            audio=request.source.audio,
        )

    def generate(self, requests: Iterable[GenerateRequest], load: Load, listener: GenerateListener) -> None:
        """Run all requests, submitted as `load` says. A request that cannot run is a result with an error."""
        reader: ClipReader[Submission] = ClipReader()
        with Client(requests, load, self.clock) as client, reader:
            while not client.is_done:
                for one in client.take():
                    reader.put(one, one.request.audio if one.error is None else ())
                heard = reader.take()
                finished = [result for one, clips in heard if (result := self._submit(one, clips)) is not None]
                if self.has_requests:
                    ended, engine_step = self.step()
                    if engine_step is not None:
                        listener.on_engine_step(engine_step)
                    finished += ended
                elif not finished and not reader.wait():
                    client.wait()
                for result in finished:
                    listener.on_finished(client.finished(result))

    def _submit(self, submission: Submission, clips: list[Content] | UserError) -> GenerateResult | None:
        """The result of a request that can't be queued."""
        request, error = submission.request, submission.error
        if error is None:
            try:
                if isinstance(clips, UserError):
                    raise clips
                self.add_request(request, submission.arrival_s, clips)
                return None
            except UserError as refusal:
                error = str(refusal)
        return failed_result(request, submission.arrival_s, error)


def _check_sampling(config: EngineConfig) -> None:
    """UserError where drafts cannot be drawn or accepted as asked."""
    if not config.num_speculative_tokens:
        return
    is_drawn = config.draft_sample_method == "probabilistic"
    if is_drawn and not PROPOSERS[config.proposer].has_draft_logits:
        raise UserError(
            f"spec.draft_sample_method=probabilistic: the drafts of {config.proposer} come without probabilities; say "
            "spec.draft_sample_method=greedy"
        )
    if config.rejection_sample_method == "block" and not is_drawn:
        raise UserError(
            "spec.rejection_sample_method=block: it weighs the drafts' probabilities, and greedy drafts have none; say "
            "spec.draft_sample_method=probabilistic, or standard"
        )


def _build_scheduler(
    config: EngineConfig,
    specs: tuple[CacheGroupSpec, ...],
    memory: MemoryPlan,
    requirements: ProposerRequirements,
) -> Scheduler:
    if config.max_num_batched_tokens < requirements.num_prompt_lookahead:
        raise UserError(
            f"engine.max_num_batched_tokens={config.max_num_batched_tokens} is below the "
            f"{requirements.num_prompt_lookahead} prompt tokens that the drafter reads ahead, and a chunk of a prompt "
            f"could stall: set it to {requirements.num_prompt_lookahead} or more"
        )
    scheduler_config = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_speculative_tokens=requirements.num_speculative_tokens,
        num_prompt_lookahead=requirements.num_prompt_lookahead,
        trim_to_max_tokens=config.trim_to_max_tokens,
        pipeline_depth=config.pipeline_depth,
    )
    kv_cache = KVCacheManager(specs, config.block_size, memory.num_blocks, config.prefix_caching)
    return Scheduler(scheduler_config, kv_cache)


def _engine_step(step: _OutstandingStep, result: StepOutput, end_s: float, kv_blocks_used: int) -> EngineStep:
    output = step.output
    return EngineStep(
        engine_step=output.step,
        start_s=step.start_s,
        end_s=end_s,
        num_prefill_tokens=output.num_prefill_tokens,
        num_decode_requests=output.num_decode_requests,
        num_tokens=output.total_tokens,
        schedule_s=step.schedule_s,
        target_s=result.target_s,
        verify_s=result.verify_s,
        draft_s=result.draft_s,
        kv_blocks_used=kv_blocks_used,
        num_preempted=output.num_preempted,
        num_evicted_blocks=output.num_evicted_blocks,
        idle_s=result.idle_s,
    )


def _extend_prompt_logprobs(
    known: list[TokenLogprob | None] | None, first_position: int, logprobs: list[TokenLogprob]
) -> None:
    """Add those of the prompt's next tokens. A resumed request runs its prompt again: what is known stays."""
    assert known is not None and len(known) >= first_position
    known += logprobs[len(known) - first_position :]
