"""One run, decided: checkpoint, samples, resolved settings, memory.

Belongs here: `prepare`, where every mistake that a user can make surfaces as a UserError, and the order of its checks.
Does not belong here: the larger checks (prompt_checks.py, figure_checks.py), running anything (benchmark.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specbench import run_config
from specbench.arrivals import check_timetable
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.generation_config import sampling_defaults
from specbench.engine.checkpoints.quantised import FP8, NVFP4
from specbench.engine.config import EngineConfig
from specbench.engine.content.content_tokens import AUDIO
from specbench.engine.execution.memory import MemoryPlan
from specbench.engine.layers.attention_backends.choose import choose_backend, choose_graphs
from specbench.engine.models.model_config import ModelConfig
from specbench.engine.models.registry import (
    check_checkpoint,
    content_tokens,
    load_model_config,
    num_parameters,
    open_checkpoint,
)
from specbench.engine.sampling.parameters import check_parameters
from specbench.engine.shard import Shard
from specbench.errors import UserError
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Task, measured_requests
from specbench.generate import GenerateRequest
from specbench.model_choice import ModelChoice, choose_draft, choose_model
from specbench.plan.checkpoint_identity import checkpoint_sha256, model_identity
from specbench.plan.devices import default_device, free_bytes, missing_device
from specbench.plan.figure_checks import check_figures
from specbench.plan.notices import (
    acceptance_notices,
    draft_notices,
    length_notices,
    model_notices,
    queue_notices,
    sharing_notices,
)
from specbench.plan.prompt_checks import check_prompts, require_tokenizer
from specbench.recorded_drafts import check_drafts
from specbench.records import INTERLEAVED, ModelIdentity
from specbench.resolved_config import CheckpointFacts, is_text_meaningless, plain_run_config, resolve
from specbench.run_config import RunConfig, SpecConfig


@dataclass(frozen=True, slots=True)
class Plan:
    """One run, decided."""

    config: RunConfig
    #: What `resolve` put in, one line each.
    differences: tuple[str, ...]
    choice: ModelChoice
    checkpoint: Checkpoint
    num_modules: int
    #: A draft model's; None where none drafts.
    draft_choice: ModelChoice | None
    task: Task
    requests: tuple[GenerateRequest, ...]
    notices: tuple[str, ...]
    #: The run without speculation that takes turns with this one; None where none does.
    baseline: Plan | None

    @property
    def engine_config(self) -> EngineConfig:
        return make_engine_config(self.config, self.checkpoint.path, self.memory_limit)

    @property
    def memory_limit(self) -> int | None:
        """memory_fraction of what is free for each rank, in bytes; None where free memory can't be read."""
        parallel = self.config.parallel
        free = free_bytes(self.config.engine.device, parallel.tensor_parallel_size, parallel.ranks_per_gpu)
        return None if free is None else int(self.config.cache.memory_fraction * free)

    def plan_memory(self) -> MemoryPlan:
        """The engine's memory budget. UserError where not one request fits."""
        # Only now is torch needed: a mistake elsewhere is told without waiting for it.
        from specbench.engine.execution.engine_memory import plan_engine_memory

        return plan_engine_memory(self.engine_config)

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.checkpoint)

    def model_identity(self) -> ModelIdentity:
        """Reads every byte of the checkpoint for its hash, once a process."""
        return model_identity(self.choice, self.checkpoint, self.num_modules)

    def draft_identity(self) -> ModelIdentity | None:
        """The same of a draft model's checkpoint."""
        if self.draft_choice is None:
            return None
        return model_identity(self.draft_choice, open_checkpoint(self.draft_choice.path, self.config.model.load))


@dataclass(frozen=True, slots=True)
class _Model:
    """The target, found and not yet read."""

    choice: ModelChoice
    checkpoint: Checkpoint
    config: ModelConfig

    @classmethod
    def find(cls, config: run_config.ModelConfig) -> _Model:
        choice = choose_model(config)
        checkpoint = open_checkpoint(choice.path, config.load, config.quantised_weights)
        return cls(choice, checkpoint, load_model_config(checkpoint))

    @property
    def facts(self) -> CheckpointFacts:
        return CheckpointFacts(
            path=str(self.choice.path),
            packaged=self.choice.packaged,
            num_modules=self.config.num_modules,
            max_model_len=self.config.max_model_len,
            has_positions="relative_bias" not in self.config.attention_features,
            dtype=_own_dtype(self.checkpoint),
            # Inkling's modules each take their predecessor's hidden.
            hidden_feedback="chain",
            sampling=sampling_defaults(self.choice.path),
        )


def prepare(config: RunConfig, *, is_sweep: bool) -> Plan:
    """Find, read and check everything but the weights. UserError where anything doesn't fit."""
    config = _with_whole_paths(config)
    model = _Model.find(config.model)
    facts = model.facts
    resolved = resolve(config, facts, device=default_device(), is_sweep=is_sweep)
    config = resolved.config
    device_notices = _check_devices(config)
    _check_model(config, model)
    config, draft_choice = _choose_draft(config)
    config, backend = _choose_attention(config, model.config, draft_choice, is_here=not device_notices)
    _check_kept_weights(config)
    if config.spec.drafts is not None:
        check_drafts(config.spec.drafts, lambda: checkpoint_sha256(model.checkpoint))
    config, task = _load_task(config, model)
    requests = tuple(measured_requests(task, config.sampling, config.load.repeats))
    notices = (
        *device_notices,
        *sharing_notices(config),
        *model_notices(model.choice, model.checkpoint),
        *length_notices(config, facts),
        *task.notices,
        *draft_notices(config, model.choice, draft_choice, requests),
        *_check_requests(config, model, requests),
        *acceptance_notices(config, requests),
    )
    plan = Plan(
        config,
        (*resolved.differences, *backend),
        model.choice,
        model.checkpoint,
        model.config.num_modules,
        draft_choice,
        task,
        requests,
        notices,
        baseline=_baseline(config, is_sweep=is_sweep),
    )
    _check_memory(plan)
    check_figures(config, plan.choice, plan.num_modules, task)
    return plan


def _check_devices(config: RunConfig) -> list[str]:
    """UserError where they are not here; in a dry run a notice."""
    device, parallel = config.engine.device, config.parallel
    if parallel.ranks_per_gpu > 1 and device == "cpu":
        raise UserError(f"parallel.ranks_per_gpu: {parallel.ranks_per_gpu}, and ranks are on a CPU; leave it out")
    missing = missing_device(device, parallel.tensor_parallel_size, parallel.ranks_per_gpu)
    if missing is None:
        return []
    if not config.dry_run:
        raise UserError(missing)
    return [f"planned for a machine that has them: {missing.partition(';')[0]}."]


def _check_model(config: RunConfig, model: _Model) -> None:
    """UserError where the checkpoint is not what the resolved configuration wants."""
    choice = model.choice
    if _has_whole_experts(config) and not model.config.has_experts:
        raise UserError(f"parallel.experts: {choice.ran} has no experts that ranks could have whole; say width")
    if config.strict and choice.is_fallback:
        raise UserError(
            f"model.checkpoint: unset, so {choice.ran} would run in place of {choice.requested}, which strict=true "
            "refuses; name a checkpoint, or say model=inkling_nano"
        )
    check_checkpoint(model.checkpoint, model.config, num_modules=_num_modules_used(config.spec))


def _load_task(config: RunConfig, model: _Model) -> tuple[RunConfig, Task]:
    """The task, and the configuration with its scorer."""
    eval_model = EvalModel(
        model.choice.packaged,
        config.model.max_model_len or model.config.max_model_len,
        functools.cache(lambda: require_tokenizer(config, model.choice.path)),
        model.config.eos_token_ids,
        model.config.vocab_size,
    )
    task = load_task(config.eval, eval_model)
    if config.strict and task.data.packaged and model.choice.requested != "inkling_nano":
        raise UserError(
            f"eval.data: unset, so {task.data.name} would run in place of {config.eval.name}, which strict=true "
            "refuses; say eval.data=FILE"
        )
    if is_text_meaningless(config):
        task = replace(task, scorers=(), judge=None)
    if task.judge is not None and config.eval.scorer is None:
        config = replace(config, eval=replace(config.eval, scorer=task.headline))
    return config, task


def _check_requests(config: RunConfig, model: _Model, requests: Sequence[GenerateRequest]) -> list[str]:
    """UserError for what can't be asked, or not at the times of the load; notices of what will be queued or fail."""
    if any(request.audio for request in requests) and AUDIO not in content_tokens(model.config):
        raise UserError(
            f"model.checkpoint: {model.choice.path} has no audio tower, and eval={config.eval.name} asks about clips; "
            "name another checkpoint"
        )
    timetable_notices = check_timetable(
        config.load,
        seed=config.sampling.seed,
        num_repeats=config.load.repeats,
        num_requests=sum(one.repeat == 0 and one.follows is None for one in requests),
    )
    for sampling in {request.sampling for request in requests}:
        check_parameters("sampling.", sampling, model.config.vocab_size, model.config.eos_token_ids)
    prompt_notices = check_prompts(config, model.choice.path, model.config.vocab_size, requests)
    return [*timetable_notices, *prompt_notices, *queue_notices(config)]


def _with_whole_paths(config: RunConfig) -> RunConfig:
    """The baseline's and the trace's path from the root: run.json is read from other places too."""
    baseline, trace = config.report.baseline, config.load.trace
    if baseline is not None and baseline != INTERLEAVED:
        config = replace(config, report=replace(config.report, baseline=str(Path(baseline).resolve())))
    if trace is not None:
        config = replace(config, load=replace(config.load, trace=str(Path(trace).resolve())))
    return config


def _baseline(config: RunConfig, *, is_sweep: bool) -> Plan | None:
    """Of the run without speculation that is to take turns with one of the resolved `config`."""
    return prepare(plain_run_config(config), is_sweep=is_sweep) if config.report.baseline == INTERLEAVED else None


def _check_memory(plan: Plan) -> None:
    """UserError where not one request fits, or not both of two runs in turns."""
    first = plan.plan_memory()
    if plan.baseline is None:
        return
    limit, needed = plan.memory_limit, first.total_bytes + plan.baseline.plan_memory().total_bytes
    if limit is not None and needed > limit:
        raise UserError(
            f"report.baseline: none loads two engines, which take {needed / 2**20:,.1f} MiB together, and "
            f"cache.memory_fraction leaves {limit / 2**20:,.1f}; set cache.num_blocks or lower engine.max_num_seqs, or "
            "name a run with report.baseline=DIR"
        )


def _choose_draft(config: RunConfig) -> tuple[RunConfig, ModelChoice | None]:
    """The configuration with the folder of the draft model that it names, and the draft model."""
    if config.spec.checkpoint is None:
        return config, None
    choice = choose_draft(config.spec.checkpoint, config.model.load)
    spec = replace(config.spec, checkpoint=str(choice.path))
    return replace(config, spec=spec), choice


def _choose_attention(
    config: RunConfig, model_config: ModelConfig, draft_choice: ModelChoice | None, *, is_here: bool
) -> tuple[RunConfig, list[str]]:
    """The configuration with the attention backend that runs and whether graphs do, and what `auto` became, and why.
    is_here: whether the devices are this machine's."""
    asked, features = config.engine.attention_backend, set(model_config.attention_features)
    if draft_choice is not None:
        features |= load_model_config(open_checkpoint(draft_choice.path, config.model.load)).attention_features
    choice = choose_backend(asked, config.engine.device, config.model.dtype, features, is_here=is_here)
    graphs = choose_graphs(config.engine.cuda_graphs, choice.name, config.engine.device)
    engine = replace(config.engine, attention_backend=choice.name, cuda_graphs=graphs.name)
    chosen = {"attention_backend": (asked, choice), "cuda_graphs": (config.engine.cuda_graphs, graphs)}
    lines = [f"engine.{key}: {asked} -> {one.name} ({one.reason})" for key, (asked, one) in chosen.items()]
    return replace(config, engine=engine), [line for line in lines if ": auto ->" in line]


def _check_kept_weights(config: RunConfig) -> None:
    """UserError where nothing multiplies by codes: on a CPU, in fp32, and with heads in another order."""
    engine = config.engine
    if config.model.quantised_weights == "keep" and (
        engine.attention_backend == "torch" or config.model.dtype != "bfloat16"
    ):
        raise UserError(
            "model.quantised_weights: products with codes run in bfloat16 on a GPU with attention_backend=triton, "
            f"not in {config.model.dtype} on {engine.device} with {engine.attention_backend}; say dequantise"
        )


def _num_modules_used(spec: SpecConfig) -> int:
    """MTP modules of the checkpoint that a resolved configuration runs."""
    if spec.method != "mtp":
        return 0
    return 1 if spec.modules == "single" else spec.num_speculative_tokens or 0


def _has_whole_experts(config: RunConfig) -> bool:
    return config.parallel.tensor_parallel_size > 1 and config.parallel.experts == "whole"


def make_engine_config(config: RunConfig, checkpoint: Path, memory_limit: int | None) -> EngineConfig:
    """The embedded engine's settings from a resolved configuration."""
    spec, max_model_len = config.spec, config.model.max_model_len
    assert max_model_len is not None
    num_drafts = spec.num_speculative_tokens or 0
    pipeline_depth = config.engine.pipeline_depth
    assert pipeline_depth is not None
    return EngineConfig(
        checkpoint=str(checkpoint),
        dtype=config.model.dtype,
        device=config.engine.device,
        max_model_len=max_model_len,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        attention_backend=config.engine.attention_backend,
        cuda_graphs=config.engine.cuda_graphs == "on",
        pipeline_depth=pipeline_depth,
        block_size=config.cache.block_size,
        num_blocks=config.cache.num_blocks,
        prefix_caching=config.cache.prefix_caching,
        num_speculative_tokens=num_drafts,
        proposer=f"mtp_{spec.modules}" if spec.method == "mtp" else spec.method,
        hidden_feedback="chain" if spec.hidden_feedback == "auto" else spec.hidden_feedback,
        trim_to_max_tokens=spec.trim_to_max_tokens,
        draft_sample_method=spec.draft_sample_method,
        rejection_sample_method=spec.rejection_sample_method,
        synthetic_acceptance_rates=spec.synthetic_acceptance_rates or (),
        faults=spec.faults,
        draft_checkpoint=spec.checkpoint,
        ngram_min=spec.ngram_min,
        ngram_max=spec.ngram_max,
        drafts=spec.drafts,
        accepted_counts=spec.accepted_counts,
        accepted_rates=spec.accepted_rates,
        tokenizer=config.model.tokenizer,
        chat_template=config.model.chat_template,
        memory_limit=memory_limit,
        shard=Shard(0, config.parallel.tensor_parallel_size, _has_whole_experts(config)),
        rank_start=config.parallel.start,
        rank_timeout_s=config.parallel.timeout_s,
        rank_all_reduce=config.parallel.all_reduce,
        ranks_per_gpu=config.parallel.ranks_per_gpu,
        load=config.model.load,
        quantised_weights=config.model.quantised_weights,
    )


def _own_dtype(checkpoint: Checkpoint) -> str:
    """The type that most of the checkpoint's numbers have, as they are computed with; float32 unless that is bfloat16,
    or codes of fewer bits."""
    sizes: dict[str, int] = {}
    for entry in checkpoint.tensors.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return "bfloat16" if max(sizes, key=lambda dtype: sizes[dtype]) in ("BF16", FP8, NVFP4) else "float32"
