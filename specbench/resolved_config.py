"""A run's configuration with the checkpoint's facts in place of every "auto" and null.

Belongs here: what stands for what was left open, and the rules that need a checkpoint. Does not belong here: reading
checkpoints (plan/), the rules that need none (run_config.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbench.errors import UserError
from specbench.records import INTERLEAVED
from specbench.run_config import RunConfig, SpecConfig

#: Samples of the packaged problems that run unless eval.num_samples says otherwise.
PACKAGED_NUM_SAMPLES = 100
#: Samples of the plain baseline, per request at once, where report.plain_baseline_requests is unset.
BASELINE_REQUESTS_A_SLOT = 4


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What the rules need to know of a checkpoint: read from config.json, never from weights."""

    path: str
    #: The checkpoint that comes with specbench.
    packaged: bool
    num_modules: int
    max_model_len: int
    #: Whether a token's place is part of what the model reads, so that places behind max_model_len mean nothing to it.
    has_positions: bool
    #: "float32" or "bfloat16".
    dtype: str
    #: "chain" or "target".
    hidden_feedback: str
    #: What an unset key of the sampling group stands for.
    sampling: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without "auto" or null, and one line for each value that was put in."""

    config: RunConfig
    differences: tuple[str, ...]


def resolve(config: RunConfig, facts: CheckpointFacts, *, device: str, is_sweep: bool) -> Resolved:
    """A new configuration with the checkpoint's facts in it; UserError where the two don't fit.

    `device` is the one that "auto" stands for on this machine.
    """
    changes: dict[str, dict[str, Any]] = {group.name: {} for group in dataclasses.fields(RunConfig)}
    if config.engine.device == "auto":
        changes["engine"]["device"] = device
    on_cpu = (changes["engine"].get("device") or config.engine.device) == "cpu"
    if config.model.dtype == "auto":
        changes["model"]["dtype"] = "float32" if on_cpu else facts.dtype
    if config.engine.pipeline_depth is None:
        changes["engine"]["pipeline_depth"] = 0 if on_cpu else 1
    changes["model"]["max_model_len"] = _model_len(config, facts)
    changes["spec"] |= _spec_changes(config.spec, facts)
    unset = [key for key in facts.sampling if getattr(config.sampling, key) is None]
    changes["sampling"] |= {key: facts.sampling[key] for key in unset}
    if is_text_meaningless(config):
        changes["eval"]["scorer"] = None
    has_packaged_data = facts.packaged and config.eval.name in ("gsm8k", "mmau") and config.eval.data is None
    if has_packaged_data and config.eval.num_samples is None:
        changes["eval"]["num_samples"] = PACKAGED_NUM_SAMPLES
    if config.eval.name == "speed_bench" and config.eval.data is not None and not config.eval.truncate:
        changes["eval"]["isl"] = None  # prompts have the lengths that they have
    if config.eval.has_exact_output and not config.sampling.ignore_eos:
        changes["sampling"]["ignore_eos"] = True
    if config.load.warmup is None:
        changes["load"]["warmup"] = config.side_concurrency
    if config.report.plain_baseline_requests is None:
        is_interleaved = config.report.baseline == INTERLEAVED
        is_measured = facts.packaged and config.spec.method != "none" and not is_sweep and not is_interleaved
        changes["report"]["plain_baseline_requests"] = BASELINE_REQUESTS_A_SLOT * config.side_concurrency * is_measured
    strict = config.strict
    if strict is None:
        strict = (is_sweep or bool(config.report.gates)) and config.model.name != "inkling_nano"
    resolved = dataclasses.replace(
        config,
        strict=strict,
        **{name: dataclasses.replace(getattr(config, name), **values) for name, values in changes.items() if values},
    )
    _check_resolved(resolved, facts)
    return Resolved(resolved, tuple(_differences(config, resolved)))


def is_text_meaningless(config: RunConfig) -> bool:
    """What random weights say, and what coins accept, is no answer to anything."""
    return config.spec.rejection_sample_method == "synthetic" or config.model.load == "random"


def plain_run_config(config: RunConfig) -> RunConfig:
    """The same run without speculation, of which nothing is asked beyond its own report."""
    spec = dataclasses.replace(
        config.spec,
        name="none",
        method="none",
        num_speculative_tokens=None,
        modules="auto",
        checkpoint=None,
        drafts=None,
        accepted_counts=None,
        accepted_rates=None,
        hidden_feedback="auto",
        draft_sample_method="greedy",
        rejection_sample_method="standard",
        synthetic_acceptance_rates=None,
        synthetic_acceptance_length=None,
        faults=(),
    )
    report = dataclasses.replace(config.report, gates=(), baseline=None, plain_baseline_requests=0, objective=None)
    return dataclasses.replace(config, spec=spec, report=report)


def _model_len(config: RunConfig, facts: CheckpointFacts) -> int:
    """Tokens of prompt and output together: what was asked for, at most the checkpoint's own where positions end."""
    asked = config.model.max_model_len
    if asked is not None and asked > facts.max_model_len and facts.has_positions:
        raise UserError(
            f"model.max_model_len: {asked} is more than the {facts.max_model_len} tokens that {facts.path} was made for"
        )
    return facts.max_model_len if asked is None else asked


def _spec_changes(spec: SpecConfig, facts: CheckpointFacts) -> dict[str, Any]:
    if spec.method == "none":
        return {}
    changes = _mtp_changes(spec, facts) if spec.method == "mtp" else {}
    num_drafts = changes.get("num_speculative_tokens", spec.num_speculative_tokens)
    assert num_drafts is not None
    if spec.rejection_sample_method == "synthetic":
        changes["synthetic_acceptance_rates"] = _synthetic_rates(spec, num_drafts)
    if spec.method == "draft_model" and spec.checkpoint is None:
        if not facts.packaged:
            raise UserError("spec.checkpoint: spec=draft_model needs a draft's; say spec.checkpoint=DIR or owner/name")
        changes["checkpoint"] = facts.path
    if spec.method == "stub" and spec.accepted_counts is None and spec.accepted_rates is None:
        changes["accepted_counts"] = tuple(range(num_drafts + 1))
    return changes


def _mtp_changes(spec: SpecConfig, facts: CheckpointFacts) -> dict[str, Any]:
    if facts.num_modules == 0:
        raise UserError(f"spec.method: {facts.path} has no MTP modules; say spec=ngram, spec=draft_model or spec=none")
    asked = spec.num_speculative_tokens
    is_multi = spec.modules == "multi" or (spec.modules == "auto" and facts.num_modules > 1)
    if not is_multi:
        if spec.hidden_feedback == "target":
            raise UserError(
                "spec.hidden_feedback: the later rows of one module that runs again have no target's hidden; say chain"
            )
        if spec.faults:
            raise UserError("spec.faults: these are faults of several modules; say spec=mtp_multi")
        return {"modules": "single", "num_speculative_tokens": asked or 1}
    if asked is not None and asked > facts.num_modules:
        raise UserError(
            f"spec.num_speculative_tokens: {asked} drafts need {asked} MTP modules, {facts.path} has "
            f"{facts.num_modules}; say at most {facts.num_modules}, or spec.modules=single to run one module again"
        )
    changes: dict[str, Any] = {"modules": "multi", "num_speculative_tokens": asked or facts.num_modules}
    if spec.hidden_feedback == "auto":
        changes["hidden_feedback"] = facts.hidden_feedback
    return changes


def _synthetic_rates(spec: SpecConfig, num_drafts: int) -> tuple[float, ...]:
    """Chance that drafts 0 .. i are all accepted, for each draft: as given, or a run of sure drafts and one in doubt
    that have the given mean length."""
    rates, length = spec.synthetic_acceptance_rates, spec.synthetic_acceptance_length
    if rates is None:
        assert length is not None
        if length > num_drafts + 1:
            raise UserError(
                f"spec.synthetic_acceptance_length: {num_drafts} drafts and the bonus token make at most "
                f"{num_drafts + 1} tokens a step, not {length:g}"
            )
        return tuple(min(1.0, max(0.0, length - 1 - draft)) for draft in range(num_drafts))
    if len(rates) != num_drafts:
        raise UserError(
            f"spec.synthetic_acceptance_rates: {num_drafts} drafts need {num_drafts} rates, not {len(rates)}"
        )
    return rates


def _check_resolved(config: RunConfig, facts: CheckpointFacts) -> None:
    """The rules that need the checkpoint's facts."""
    max_model_len = config.model.max_model_len
    assert max_model_len is not None
    if config.cache.block_size > max_model_len:
        raise UserError(
            f"cache.block_size: {config.cache.block_size} is more than the context of {max_model_len} tokens; lower it"
        )
    if config.eval.max_output_tokens >= max_model_len:
        key = "max_output_tokens" if config.eval.osl is None else "osl"
        raise UserError(
            f"eval.{key}: {config.eval.max_output_tokens} leaves no room for a prompt in a context of "
            f"{max_model_len} tokens; lower it or raise model.max_model_len"
        )
    is_multi = config.spec.method == "mtp" and config.spec.modules == "multi"
    num_modules = (config.spec.num_speculative_tokens or 0) if is_multi else 0
    if config.engine.max_num_batched_tokens < num_modules:
        raise UserError(
            f"engine.max_num_batched_tokens: {config.engine.max_num_batched_tokens} is below {num_modules}, the prompt "
            f"tokens that {num_modules} MTP modules read ahead, so a chunk of a prompt could stall; raise it"
        )


def _differences(before: RunConfig, after: RunConfig) -> list[str]:
    """`group.key: old -> new` for each value that `resolve` put in."""
    old, new = before.to_dict(), after.to_dict()
    lines = []
    for group, values in new.items():
        if not isinstance(values, dict):
            if values != old[group]:
                lines.append(f"{group}: {old[group]} -> {values}")
            continue
        lines += [
            f"{group}.{key}: {old[group][key]} -> {value}" for key, value in values.items() if value != old[group][key]
        ]
    return lines
