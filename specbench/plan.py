"""Everything that is decided before a weight is loaded: checkpoint, samples, resolved settings, memory.

Belongs here: `prepare`, where every mistake that a user can make surfaces as a UserError, and `describe`, which puts it
in words for `dry_run=true`. Does not belong here: running anything (benchmark.py).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench import __version__, environment
from specbench.arrivals import check_timetable
from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, Checkpoint
from specbench.engine.checkpoints.generation_config import sampling_defaults
from specbench.engine.checkpoints.quantised import FP8, NVFP4
from specbench.engine.config import EngineConfig
from specbench.engine.content.content_tokens import AUDIO
from specbench.engine.execution.memory import MemoryPlan, memory_text
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
from specbench.recorded_drafts import AUTO, check_drafts, drafts_sha256
from specbench.records import INTERLEAVED, DataIdentity, ModelIdentity, RunRecord, SampleRecord
from specbench.run_config import (
    LOAD_KEYS,
    CheckpointFacts,
    RunConfig,
    SpecConfig,
    is_text_meaningless,
    plain_run_config,
    resolve,
)
from specbench.run_directory import EventLog, RunDirectory
from specbench.trace import read_trace

if TYPE_CHECKING:
    from specbench.engine.tokenizer import Tokenizer

#: Requests that a notice names.
_NUM_NAMED = 3
_KNOWN_HASHES: dict[tuple, str] = {}


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
        from specbench.engine.llm_engine import plan_engine_memory

        return plan_engine_memory(self.engine_config)

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.checkpoint)

    def model_identity(self) -> ModelIdentity:
        """Reads every byte of the checkpoint for its hash, once a process."""
        return _identity(self.choice, self.checkpoint, self.num_modules)

    def draft_identity(self) -> ModelIdentity | None:
        """The same of a draft model's checkpoint."""
        if self.draft_choice is None:
            return None
        return _identity(self.draft_choice, open_checkpoint(self.draft_choice.path, self.config.model.load))


def prepare(config: RunConfig, *, is_sweep: bool) -> Plan:
    """Find, read and check everything but the weights. UserError where anything doesn't fit."""
    config = _with_whole_paths(config)
    choice = choose_model(config.model)
    checkpoint = open_checkpoint(choice.path, config.model.load, config.model.quantised_weights)
    model_config = load_model_config(checkpoint)
    facts = CheckpointFacts(
        path=str(choice.path),
        packaged=choice.packaged,
        num_modules=model_config.num_modules,
        max_model_len=model_config.max_model_len,
        has_positions="relative_bias" not in model_config.attention_features,
        dtype=_own_dtype(checkpoint),
        # Inkling's modules each take their predecessor's hidden.
        hidden_feedback="chain",
        sampling=sampling_defaults(choice.path),
    )
    resolved = resolve(config, facts, device=default_device(), is_sweep=is_sweep)
    config = resolved.config
    parallel = config.parallel
    missing = missing_device(config.engine.device, parallel.tensor_parallel_size, parallel.ranks_per_gpu)
    if missing is not None and not config.dry_run:
        raise UserError(missing)
    if parallel.ranks_per_gpu > 1 and config.engine.device == "cpu":
        raise UserError(f"parallel.ranks_per_gpu: {parallel.ranks_per_gpu}, and ranks are on a CPU; leave it out")
    if _has_whole_experts(config) and not model_config.has_experts:
        raise UserError(f"parallel.experts: {choice.ran} has no experts that ranks could have whole; say width")
    if config.strict and choice.is_fallback:
        raise UserError(
            f"model.checkpoint: unset, so {choice.ran} would run in place of {choice.requested}, which strict=true "
            "refuses; name a checkpoint, or say model=inkling_nano"
        )
    check_checkpoint(checkpoint, model_config, num_modules=_num_modules_used(config.spec))
    config, draft_choice = _choose_draft(config)
    config, backend = _choose_attention(config, model_config, draft_choice, is_here=missing is None)
    _check_kept_weights(config)
    if config.spec.drafts is not None:
        check_drafts(config.spec.drafts, lambda: checkpoint_sha256(checkpoint))
    task = load_task(
        config.eval,
        EvalModel(
            choice.packaged,
            config.model.max_model_len or model_config.max_model_len,
            functools.cache(lambda: _require_tokenizer(config, choice.path)),
            model_config.eos_token_ids,
            model_config.vocab_size,
        ),
    )
    if config.strict and task.data.packaged and choice.requested != "inkling_nano":
        raise UserError(
            f"eval.data: unset, so {task.data.name} would run in place of {config.eval.name}, which strict=true "
            "refuses; say eval.data=FILE"
        )
    if is_text_meaningless(config):
        task = dataclasses.replace(task, scorers=(), judge=None)
    if task.judge is not None and config.eval.scorer is None:
        config = replace(config, eval=replace(config.eval, scorer=task.headline))
    requests = tuple(measured_requests(task, config.sampling, config.load.repeats))
    if any(request.audio for request in requests) and AUDIO not in content_tokens(model_config):
        raise UserError(
            f"model.checkpoint: {choice.path} has no audio tower, and eval={config.eval.name} asks about clips; name "
            "another checkpoint"
        )
    timetable_notices = check_timetable(
        config.load,
        seed=config.sampling.seed,
        num_repeats=config.load.repeats,
        num_requests=sum(one.repeat == 0 and one.follows is None for one in requests),
    )
    for sampling in {request.sampling for request in requests}:
        check_parameters("sampling.", sampling, model_config.vocab_size, model_config.eos_token_ids)
    notices = [
        *([] if missing is None else [f"planned for a machine that has them: {missing.partition(';')[0]}."]),
        *_sharing_notices(config),
        *_model_notices(choice, checkpoint),
        *_length_notices(config, facts),
        *task.notices,
        *timetable_notices,
        *_draft_notices(config, choice, draft_choice, requests),
        *_check_prompts(config, choice.path, model_config.vocab_size, requests),
    ]
    notices += _acceptance_notices(config, requests)
    if (config.load.concurrency or 0) > config.engine.max_num_seqs:
        notices.append(
            f"load.concurrency={config.load.concurrency} is above engine.max_num_seqs={config.engine.max_num_seqs}: "
            "requests queue in the engine, and TTFT holds their wait."
        )
    plan = Plan(
        config,
        (*resolved.differences, *backend),
        choice,
        checkpoint,
        model_config.num_modules,
        draft_choice,
        task,
        requests,
        tuple(notices),
        baseline=_baseline(config, is_sweep=is_sweep),
    )
    _check_memory(plan)
    _check_gates(plan)
    return plan


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


def _check_gates(plan: Plan) -> None:
    """UserError for a gate that cannot be judged and for a baseline that cannot be read or did not finish."""
    report = plan.config.report
    if report.baseline not in (None, INTERLEAVED):
        assert report.baseline is not None
        status = RunDirectory.open(Path(report.baseline)).read_run().status
        if status != "finished":
            raise UserError(
                f"report.baseline: {report.baseline} is a run that has not finished ({status}); name another"
            )
    if report.gates:
        from specbench.reports.gates import check_gates, parse_gates
        from specbench.reports.metrics import compute_metrics

        skeleton = compute_metrics(
            _record_to_be(plan.config, plan.choice, plan.num_modules, plan.task.data),
            EventLog(samples=_samples_to_be(plan.task, plan.config.eval.scorer)),
        )
        gates = parse_gates(report.gates)
        check_gates(gates, skeleton, has_baseline=report.baseline is not None)
        dimensions = skeleton["eval"]["by"]
        for path in (gate.path for gate in gates if gate.path.startswith("eval.by.")):
            if not dimensions:
                raise UserError(
                    f"report.gates: {path}: accuracy on {plan.task.data.name} is given by no dimension; name "
                    "eval.accuracy"
                )


def _samples_to_be(task: Task, scorer: str | None) -> list[SampleRecord]:
    """One of each kind that accuracy is given by."""
    if scorer is None:
        return []
    kinds = {(sample.category, tuple(sample.groups.items())) for sample in task.samples}
    return [
        SampleRecord(
            sample_id=str(index),
            turn=0,
            repeat=0,
            prompt=None,
            prompt_token_ids=None,
            output_text="",
            reasoning_text="",
            output_token_ids=(),
            reference=None,
            extracted={scorer: None},
            score={scorer: 0.0},
            is_truncated=False,
            category=category,
            groups=dict(groups),
        )
        for index, (category, groups) in enumerate(sorted(kinds, key=str))
    ]


def check_objective(config: RunConfig) -> None:
    """UserError where what a searching sweeper is to be given can be no figure of a job."""
    from specbench.reports.metric_path import check_path
    from specbench.reports.metrics import compute_metrics

    path = config.report.objective
    if path is None:
        raise UserError(
            "report.objective: unset, and hydra/sweeper searches for something; say which path of metrics.json, such "
            "as report.objective=throughput.output_token_per_s"
        )
    data = DataIdentity(config.eval.name, None, None, None, packaged=False)
    choice = ModelChoice(config.model.name, config.model.name, Path(), None, packaged=False)
    try:
        check_path(compute_metrics(_record_to_be(config, choice, 0, data), EventLog()), path)
    except UserError as error:
        raise UserError(f"report.objective: {error}") from error


def _record_to_be(config: RunConfig, choice: ModelChoice, num_modules: int, data: DataIdentity) -> RunRecord:
    """As much of run.json as decides which figures there will be."""
    model = ModelIdentity(choice.requested, choice.ran, None, None, None, choice.packaged)
    return RunRecord(
        status="running",
        config=config.to_dict(),
        command="",
        version=__version__,
        commit=None,
        is_dirty=None,
        hardware={},
        packages={},
        model=replace(model, num_modules=num_modules),
        data=data,
        acceptance_source="engine",
        started_at="",
    )


def _identity(choice: ModelChoice, checkpoint: Checkpoint, num_modules: int = 0) -> ModelIdentity:
    return ModelIdentity(
        requested=choice.requested,
        ran=choice.ran,
        path=str(choice.path),
        revision=choice.revision,
        sha256=checkpoint_sha256(checkpoint),
        packaged=choice.packaged,
        num_parameters=num_parameters(checkpoint),
        num_modules=num_modules,
    )


def checkpoint_sha256(checkpoint: Checkpoint) -> str:
    """The checkpoint's hash; read again only when a file has another size or time."""
    files = (checkpoint.path / CONFIG_FILE, *checkpoint.files)
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    if stamps not in _KNOWN_HASHES:
        _KNOWN_HASHES[stamps] = checkpoint.sha256()
    return _KNOWN_HASHES[stamps]


def default_device() -> str:
    """What engine.device=auto stands for. torch takes seconds to import: it is asked only where there may be a GPU."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def missing_device(device: str, num_ranks: int = 1, ranks_per_gpu: int = 1) -> str | None:
    """What to say of a GPU that is not there. None where all are."""
    if not device.startswith("cuda"):
        return None
    import torch

    index = int(device.partition(":")[2] or 0)
    num_gpus = math.ceil(num_ranks / ranks_per_gpu)
    if num_gpus > 1 and index + num_gpus > torch.cuda.device_count():
        return (
            f"parallel.tensor_parallel_size: {num_ranks} ranks from device {index} on take more than the "
            f"{torch.cuda.device_count()} CUDA devices that torch sees; say parallel=tp1, or parallel.ranks_per_gpu=N "
            "to see on fewer that texts are right, not how fast they come"
        )
    if index >= torch.cuda.device_count():
        return (
            f"engine.device: {device} is not there, torch sees {torch.cuda.device_count()} CUDA devices; say "
            "engine.device=auto (`specbench doctor` shows why)"
        )
    return None


def free_bytes(device: str, num_ranks: int = 1, ranks_per_gpu: int = 1) -> int | None:
    """Memory that is free for each rank: of its device or its share of one, or its share of the machine's. None where
    it is not known, as of devices that are not here."""
    if device == "cpu":
        free = environment.free_memory_bytes()
        return None if free is None else free // num_ranks
    if missing_device(device, num_ranks, ranks_per_gpu) is not None:
        return None
    import torch

    first = int(device.partition(":")[2] or 0)
    last = first + math.ceil(num_ranks / ranks_per_gpu) - 1
    return min(torch.cuda.mem_get_info(index)[0] for index in range(first, last + 1)) // min(ranks_per_gpu, num_ranks)


def _choose_draft(config: RunConfig) -> tuple[RunConfig, ModelChoice | None]:
    """The configuration with the folder of the draft model that it names, and the draft model."""
    if config.spec.checkpoint is None:
        return config, None
    choice = choose_draft(config.spec.checkpoint, config.model.load)
    spec = dataclasses.replace(config.spec, checkpoint=str(choice.path))
    return dataclasses.replace(config, spec=spec), choice


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
    engine = dataclasses.replace(config.engine, attention_backend=choice.name, cuda_graphs=graphs.name)
    chosen = {"attention_backend": (asked, choice), "cuda_graphs": (config.engine.cuda_graphs, graphs)}
    lines = [f"engine.{key}: {asked} -> {one.name} ({one.reason})" for key, (asked, one) in chosen.items()]
    return dataclasses.replace(config, engine=engine), [line for line in lines if ": auto ->" in line]


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
        load=config.model.load,
        quantised_weights=config.model.quantised_weights,
    )


def fingerprint(plan: Plan, model: ModelIdentity) -> dict[str, Any]:
    """What decides a run's records: two runs with equal `sha256` need not both be run."""
    settings = plan.config.to_dict()
    for key in ("output_root", "dry_run", "strict"):
        del settings[key]
    for key in ("gates", "baseline", "objective"):
        if settings["report"][key] != INTERLEAVED:  # which makes it another run
            del settings["report"][key]
    parts = {
        "config": _sha256(settings),
        "code": _sha256([environment.commit().commit, environment.source_sha256()]),
        "checkpoint": model.sha256,
        "drafter": _drafter_sha256(plan),
        "data": _data_sha256(plan),
        "hardware": _sha256(environment.hardware()),
    }
    return {"sha256": _sha256(parts), **parts}


def _data_sha256(plan: Plan) -> str | None:
    """Of the samples, and of the trace where one is replayed."""
    trace = plan.config.load.trace
    return plan.task.data.sha256 if trace is None else _sha256([plan.task.data.sha256, read_trace(trace)])


def _drafter_sha256(plan: Plan) -> str | None:
    """Of what drafts come from besides the checkpoint that runs; None where there is nothing else."""
    draft, drafts = plan.draft_identity(), plan.config.spec.drafts
    if draft is not None:
        return draft.sha256
    return None if drafts is None or drafts == AUTO else drafts_sha256(Path(drafts))


def describe(plan: Plan) -> str:
    """What would run, for `dry_run=true`."""
    config, data = plan.config, plan.task.data
    engine = plan.engine_config
    from specbench.reports.layout_check import layout_text

    lines = [
        f"model       {plan.choice.requested} -> {plan.choice.ran} ({plan.num_parameters / 1e6:.1f} M parameters, "
        f"{plan.num_modules} MTP modules)",
        f"checkpoint  {plan.choice.path}",
        f"data        {data.name}: {data.num_samples} samples from {data.path or 'the hub'}",
        f"load        {len(plan.requests)} requests, {_load_text(config)}; {config.load.warmup} warm up",
        f"spec        {config.spec.name}: {engine.num_speculative_tokens} drafts a step",
        f"engine      {engine.device}, {engine.dtype}, {engine.max_num_seqs} requests of {engine.max_model_len} "
        f"tokens, cache blocks of {engine.block_size} tokens",
        f"parallel    {layout_text(config.to_dict())}",
        f"memory      {_memory_line(plan)}",
        f"fallback    {'; '.join(_fallbacks(plan)) or 'none'}",
    ]
    if plan.baseline is not None:
        lines.append("baseline    a run without speculation, in turns with this one")
    if config.report.gates:
        against = f", against {config.report.baseline}" if config.report.baseline else ""
        lines.append(f"gates       {len(config.report.gates)}{against}")
    lines += [f"resolved    {line}" for line in plan.differences]
    lines += [f"note        {line}" for line in plan.notices]
    return "\n".join(lines)


def _load_text(config: RunConfig) -> str:
    load = config.load
    if load.name == "closed":
        return f"{load.concurrency} at once"
    keys = ", ".join(f"{key}={getattr(load, key)}" for key in LOAD_KEYS[load.name])
    limit = "" if load.concurrency is None else f", {load.concurrency} out at once at most"
    return " ".join(part for part in (load.name, keys) if part) + limit


def _memory_line(plan: Plan) -> str:
    limit = plan.memory_limit
    bound = "" if limit is None else f"; at most {limit / 2**20:,.1f} MiB by cache.memory_fraction"
    num_ranks = plan.config.parallel.tensor_parallel_size
    of_rank = f", on each of {num_ranks} ranks" if num_ranks > 1 else ""
    return f"{memory_text(plan.plan_memory())}{bound}{of_rank}"


def _fallbacks(plan: Plan) -> list[str]:
    found = []
    if plan.choice.is_fallback:
        found.append(f"{plan.choice.ran} runs in place of {plan.choice.requested}")
    if plan.task.data.packaged:
        found.append(f"{plan.task.data.name} runs in place of {plan.config.eval.name}")
    return found


def _own_dtype(checkpoint: Checkpoint) -> str:
    """The type that most of the checkpoint's numbers have, as they are computed with; float32 unless that is bfloat16,
    or codes of fewer bits."""
    sizes: dict[str, int] = {}
    for entry in checkpoint.tensors.values():
        sizes[entry.dtype] = sizes.get(entry.dtype, 0) + math.prod(entry.shape)
    return "bfloat16" if max(sizes, key=lambda dtype: sizes[dtype]) in ("BF16", FP8, NVFP4) else "float32"


def _sharing_notices(config: RunConfig) -> Iterable[str]:
    parallel = config.parallel
    if parallel.ranks_per_gpu > 1 and parallel.tensor_parallel_size > 1 and config.engine.device.startswith("cuda"):
        yield (
            f"parallel.ranks_per_gpu={parallel.ranks_per_gpu}: ranks have a GPU in turn, or share it; texts and "
            "acceptance can be read, speed cannot."
        )


def _model_notices(choice: ModelChoice, checkpoint: Checkpoint) -> Iterable[str]:
    if checkpoint.is_random:
        millions = num_parameters(checkpoint) / 1e6
        yield (
            f"{choice.ran} ({millions:,.1f} M parameters): weights are drawn at random (model.load=random); the text "
            "means nothing, only speed can be read."
        )
    if choice.packaged:
        millions = num_parameters(checkpoint) / 1e6
        yield f"{choice.ran} (packaged, {millions:.1f} M parameters): not Inkling; name one with model.checkpoint=DIR"


def _length_notices(config: RunConfig, facts: CheckpointFacts) -> Iterable[str]:
    asked = config.model.max_model_len
    assert asked is not None
    if asked > facts.max_model_len:
        yield (
            f"model.max_model_len={asked} is more than the {facts.max_model_len} tokens that the checkpoint was made "
            "for: it runs, since distances alone count, and what it says there means little."
        )


def _draft_notices(
    config: RunConfig, choice: ModelChoice, draft: ModelChoice | None, requests: Iterable[GenerateRequest]
) -> Iterable[str]:
    if draft is None:
        return
    if draft.path == choice.path:
        yield f"{draft.ran} drafts for itself: each draft is its own next token, and acceptance shows nothing."
    kinds = content_tokens(load_model_config(open_checkpoint(draft.path, config.model.load)))
    if AUDIO not in kinds and any(request.audio for request in requests):
        yield f"{draft.ran} holds no audio tower: it drafts without hearing the clips."


def _acceptance_notices(config: RunConfig, requests: Iterable[GenerateRequest]) -> Iterable[str]:
    if config.spec.method == "none":
        return
    if config.eval.name == "prompts" and any(request.prompt_token_ids is not None for request in requests):
        yield "prompts are token ids: if they were drawn at random, acceptance says little about real text."
    if config.sampling.ignore_eos:
        yield "ignore_eos is on: text behind the end of an answer repeats itself, and its acceptance says little."
    if config.spec.rejection_sample_method == "synthetic":
        yield "synthetic acceptance: drafts are accepted by coins; the text means nothing, only speed can be read."
    if config.spec.faults:
        yield f"faults injected on purpose: {', '.join(config.spec.faults)}."


def _require_tokenizer(config: RunConfig, checkpoint: Path) -> Tokenizer:
    from specbench.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(checkpoint, config.model.tokenizer, config.model.chat_template)
    if tokenizer is None:
        raise UserError(f"model.tokenizer: {checkpoint} has none, and eval={config.eval.name} counts tokens; give one")
    return tokenizer


def _check_prompts(
    config: RunConfig, checkpoint: Path, vocab_size: int, requests: Iterable[GenerateRequest]
) -> list[str]:
    """UserError for a prompt that leaves no room; notices of audio that does not, and of answers that may be cut."""
    from specbench.engine.content.audio_files import MAX_TOKENS, num_audio_tokens
    from specbench.engine.tokenizer import encode_prompt, load_tokenizer

    tokenizer = load_tokenizer(checkpoint, config.model.tokenizer, config.model.chat_template)
    max_model_len = config.model.max_model_len
    assert max_model_len is not None
    advice = ", lower eval.num_fewshot" if config.eval.num_fewshot else ""
    misfits: dict[str, list[str]] = {"clip": [], "context": [], "answer": []}
    #: Request -> tokens of its prompt, of a turn behind another one without the answers, and the answers' most.
    lengths: dict[str, tuple[int, int]] = {}
    for request in requests:
        if request.repeat:
            continue
        token_ids = encode_prompt(tokenizer, request).token_ids
        before, answers = (0, 0) if request.follows is None else lengths[request.follows]
        num_tokens = len(token_ids) + before
        clips = [num_audio_tokens(source) or 0 for source in request.audio]
        lengths[request.request_id] = (num_tokens + sum(clips), answers + request.sampling.max_output_tokens)
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            raise UserError(
                f"eval.data: prompt_token_ids of {request.sample_id}: ids must lie in 0 .. {vocab_size - 1}, the "
                "checkpoint's vocabulary; correct them"
            )
        if num_tokens >= max_model_len:
            raise UserError(
                f"eval.data: the prompt of {request.sample_id} has {num_tokens} tokens and leaves no room in a context "
                f"of {max_model_len}; shorten it{advice} or raise model.max_model_len"
            )
        if max(clips, default=0) > MAX_TOKENS:
            misfits["clip"].append(request.sample_id)
        elif num_tokens + sum(clips) >= max_model_len:
            misfits["context"].append(request.sample_id)
        elif sum(lengths[request.request_id]) > max_model_len:
            misfits["answer"].append(request.sample_id)
    return _misfit_notices(misfits, max_model_len)


def _misfit_notices(misfits: Mapping[str, Sequence[str]], max_model_len: int) -> list[str]:
    """One for each kind that has any: requests that are too long fail one by one, and the others run."""
    from specbench.engine.content.audio_files import MAX_TOKENS

    context = f"a context of {max_model_len} tokens"
    texts = {
        "clip": f"a clip of over {MAX_TOKENS:,} tokens (10 minutes) and will fail: cut it",
        "context": f"a prompt whose audio leaves no room in {context} and will fail: raise model.max_model_len",
        "answer": f"less room than max_output_tokens in {context}",
    }
    return [
        f"{len(ids)} request{' has' if len(ids) == 1 else 's have'} {texts[kind]} ({_first_of(ids)})."
        for kind, ids in misfits.items()
        if ids
    ]


def _first_of(ids: Sequence[str]) -> str:
    more = len(ids) - _NUM_NAMED
    return ", ".join(ids[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
