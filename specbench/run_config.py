"""The whole run as frozen dataclasses, checked as a whole before anything starts.

Belongs here: one dataclass a config group, its types and ranges, the rules across groups, and `resolve`, which puts
the checkpoint's facts in place of every "auto" and null. Does not belong here: Hydra (cli.py), reading checkpoints,
doing anything.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from specbench.engine.config import FAULTS
from specbench.engine.proposer_table import PROPOSERS
from specbench.errors import UserError, near_name
from specbench.records import INTERLEAVED


@dataclass(frozen=True, slots=True)
class AtLeast:
    """The number may not be smaller."""

    minimum: float

    def complaint(self, value: Any) -> str | None:
        return None if value >= self.minimum else f"must be at least {self.minimum:g}, not {value}"


@dataclass(frozen=True, slots=True)
class Above:
    """The number must be larger."""

    limit: float

    def complaint(self, value: Any) -> str | None:
        return None if value > self.limit else f"must be above {self.limit:g}, not {value}"


@dataclass(frozen=True, slots=True)
class Between:
    """The number lies between two others, or is one of them."""

    low: float
    high: float

    def complaint(self, value: Any) -> str | None:
        good = self.low <= value <= self.high
        return None if good else f"must be from {self.low:g} to {self.high:g}, not {value}"


@dataclass(frozen=True, slots=True)
class Counted:
    """How many there are: at least `low`, and at most `high`, beyond which laying them out would never end."""

    low: int
    high: int = 10**9

    def complaint(self, value: Any) -> str | None:
        if value < self.low:
            return f"must be at least {self.low}, not {value}"
        return None if value <= self.high else f"must be at most {self.high:,}, not {value}"


@dataclass(frozen=True, slots=True)
class Within:
    """The number lies above `low` and at most at `high`."""

    low: float
    high: float

    def complaint(self, value: Any) -> str | None:
        good = self.low < value <= self.high
        return None if good else f"must be above {self.low:g} and at most {self.high:g}, not {value}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """The value is one of a few names."""

    names: tuple[str, ...]

    def complaint(self, value: Any) -> str | None:
        return None if value in self.names else f"unknown value {value!r}; {near_name(str(value), self.names)}"


#: Of spec.method, "none" apart: the ways to draft.
METHODS = tuple(dict.fromkeys(line.method for line in PROPOSERS.values()))
#: Configurations of SPEED-Bench.
QUALITATIVE = "qualitative"
THROUGHPUT_CONFIGS = tuple(f"throughput_{size}" for size in ("1k", "2k", "8k", "16k", "32k"))
EVALS = (
    *("aime25", "fixed_length", "gsm8k", "lm_eval", "losslessness", "mmau", "mt_bench", "prompts", "random_ids"),
    *("spec_bench", "speed_bench"),
)
#: load -> its keys beyond those of every load.
LOAD_KEYS = {
    "closed": (),
    "poisson": ("rate",),
    "gamma": ("rate", "burstiness"),
    "burst": ("rate", "burst_size"),
    "ramp": ("rate_from", "rate", "ramp_s"),
    "offline": (),
    "trace": ("trace", "time_scale"),
}
LOADS = tuple(LOAD_KEYS)
Count = Annotated[int, Counted(0)]
Positive = Annotated[int, Counted(1)]
#: Drafts of a step: what reports count grows with their cube.
MAX_DRAFTS = 256
#: Rows of request state, which are laid out before their memory is counted.
MAX_NUM_SEQS = 65_536


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    #: A folder or a repository on the hub; None takes the packaged checkpoint (only inkling and inkling_nano have one).
    checkpoint: str | None
    revision: str | None
    #: "auto" is float32 on a CPU, the checkpoint's own on a GPU.
    dtype: Annotated[str, OneOf(("auto", "float32", "bfloat16"))]
    #: None takes the checkpoint's own.
    max_model_len: Positive | None
    tokenizer: str | None
    chat_template: str | None
    trust_remote_code: bool
    #: "random" draws the weights of target and draft: for speed, of a named shape or a folder with config.json alone.
    load: Annotated[str, OneOf(("checkpoint", "random"))] = "checkpoint"
    #: FP8 and NVFP4: dequantised when they are read, or kept in codes (a half or a quarter of what decoding reads).
    quantised_weights: Annotated[str, OneOf(("dequantise", "keep"))] = "dequantise"


@dataclass(frozen=True, slots=True)
class SpecConfig:
    name: str
    method: Annotated[str, OneOf(("none", *METHODS))]
    #: None takes the number of modules in the checkpoint (mtp).
    num_speculative_tokens: Annotated[int, Counted(1, MAX_DRAFTS)] | None
    #: mtp: "multi" runs N modules once each, "single" runs one N times; "auto" goes by how many the checkpoint has.
    modules: Annotated[str, OneOf(("auto", "single", "multi"))]
    #: draft_model: its folder, or a repository on the hub. None: the packaged model drafts for itself.
    checkpoint: str | None
    #: ngram: the newest tokens that must occur before, at least and at most.
    ngram_min: Positive
    ngram_max: Positive
    #: stub: where right drafts come from: a run directory, a file of JSON lines, or "auto", plain decoding first.
    drafts: str | None
    #: stub: drafts accepted at a request's 1st, 2nd, ... step, over again; None: 0 .. num_speculative_tokens in turn.
    accepted_counts: tuple[int, ...] | None
    #: stub: in place of accepted_counts, share of steps that accept more than i drafts, for each position i.
    accepted_rates: tuple[float, ...] | None
    #: mtp of several modules: "auto" goes by the model family.
    hidden_feedback: Annotated[str, OneOf(("auto", "chain", "target"))]
    trim_to_max_tokens: bool
    #: A draft is the argmax of its logits, or drawn from their softmax at the request's temperature.
    draft_sample_method: Annotated[str, OneOf(("greedy", "probabilistic"))]
    #: How drafts are accepted: exactly in law (standard, block) or by coins of given rates (synthetic).
    rejection_sample_method: Annotated[str, OneOf(("standard", "block", "synthetic"))]
    #: Synthetic only, one of the two: chance that drafts 0 .. i are all accepted, or the mean tokens of a step.
    synthetic_acceptance_rates: tuple[float, ...] | None
    synthetic_acceptance_length: Annotated[float, AtLeast(1)] | None
    #: Wiring mistakes to inject, to see which table shows them.
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    name: str
    tensor_parallel_size: Positive
    #: A rank has a part of the width of every expert, or some experts whole.
    experts: Annotated[str, OneOf(("width", "whole"))] = "width"
    #: Who starts the ranks: this process (spawn), torchrun before it, or torchrun where it has (auto).
    start: Annotated[str, OneOf(("auto", "spawn", "torchrun"))] = "auto"
    #: Seconds that a step may take before a rank counts as hung.
    timeout_s: Annotated[float, AtLeast(1)] = 120.0
    #: Sums over GPUs: NCCL's, or of few rows by kernels over the GPUs' memory (one_shot); auto: where they can be had.
    all_reduce: Annotated[str, OneOf(("auto", "one_shot", "nccl"))] = "nccl"
    #: Ranks that share a GPU: more than one to see on fewer GPUs that texts are right, never for speed.
    ranks_per_gpu: Positive = 1


@dataclass(frozen=True, slots=True)
class EngineGroup:
    name: Annotated[str, OneOf(("embedded",))]
    #: "auto", "cpu", "cuda" or "cuda:N".
    device: str
    max_num_seqs: Annotated[int, Counted(1, MAX_NUM_SEQS)]
    #: Token budget of one step.
    max_num_batched_tokens: Positive
    attention_backend: Annotated[str, OneOf(("auto", "flashinfer", "torch", "triton"))]
    #: Record steps of decoding once for each of a few batch sizes, and replay them.
    cuda_graphs: Annotated[str, OneOf(("auto", "on", "off"))]
    #: Steps that the device may have before it when the host schedules the next; None: 1 on a GPU, 0 on a CPU.
    pipeline_depth: Annotated[int, Between(0, 1)] | None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    name: str
    block_size: Positive
    #: None: what max_num_seqs requests of max_model_len can need, within memory_fraction.
    num_blocks: Positive | None
    #: Share the blocks of equal prefixes between requests.
    prefix_caching: bool
    #: Share of the device's free memory (of the machine's on a CPU) that weights, caches and, on a GPU, steps and their
    #: graphs may take together.
    memory_fraction: Annotated[float, Within(0, 1)]


@dataclass(frozen=True, slots=True)
class EvalConfig:
    name: Annotated[str, OneOf(EVALS)]
    data: str | None
    #: "chat" or "completion"; None where rows say it themselves (prompts).
    protocol: Annotated[str, OneOf(("chat", "completion"))] | None
    #: None: all, or PACKAGED_NUM_SAMPLES of the packaged problems.
    num_samples: Positive | None
    #: None: the tasks' own (lm_eval), none elsewhere.
    num_fewshot: Count | None
    #: Rows that shots are taken from; None takes the training rows that belong to the data.
    fewshot_data: str | None
    #: Text after the question, on a line of its own; None is the bare question, "auto" asks a real model to reason.
    instruction: str | None
    max_output_tokens: Positive
    #: None where nothing is scored.
    scorer: str | None
    #: None takes the protocol's own.
    stop: tuple[str, ...] | None
    #: losslessness, at a temperature: times that each side draws the first tokens of a prompt.
    num_law_draws: Annotated[int, Counted(1, 10**6)] | None = None
    #: mmau: folder of the clips; None: that of the questions.
    audio: str | None = None
    #: mmau: what is asked, by name or as a text.
    prompt: str | None = None
    #: mmau: of the data on the hub.
    revision: str | None = None
    #: mmau: such as music; None: all. lm_eval: names or files of tasks.
    tasks: tuple[str, ...] | None = None
    #: lm_eval: folder with further files of tasks.
    include: str | None = None
    #: fixed_length, random_ids, speed_bench: tokens of a prompt, template included, and of an answer.
    isl: Positive | None = None
    osl: Positive | None = None
    #: These, mt_bench and spec_bench: kinds of prompts; None: all.
    categories: tuple[str, ...] | None = None
    #: speed_bench: which of its configurations.
    source_config: Annotated[str, OneOf((QUALITATIVE, *THROUGHPUT_CONFIGS))] | None = None
    #: speed_bench: cut prompts to isl tokens.
    truncate: bool | None = None
    #: speed_bench: of the content that eval.data must have.
    sha256: str | None = None

    @property
    def has_exact_output(self) -> bool:
        """Whether each answer is osl tokens long, whatever is said."""
        return self.osl is not None and self.source_config != QUALITATIVE


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """generate.SamplingParams says what each means. None takes the checkpoint's generation_config.json."""

    name: str
    #: 0 is greedy.
    temperature: Annotated[float, AtLeast(0)] | None
    #: 0 is off.
    top_k: Count | None
    #: 1 is off.
    top_p: Annotated[float, Within(0, 1)] | None
    #: 0 is off.
    min_p: Annotated[float, AtLeast(0)] | None
    #: 1 is off.
    repetition_penalty: Annotated[float, AtLeast(0)] | None
    presence_penalty: float
    frequency_penalty: float
    min_tokens: Count
    #: In addition to the checkpoint's own end-of-sequence ids.
    stop_token_ids: tuple[int, ...]
    bad_words: tuple[str, ...]
    seed: Annotated[int, AtLeast(0)]
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class LoadConfig:
    name: Annotated[str, OneOf(LOADS)]
    #: Requests out at once: of a closed load always, of the others at most; None: no limit.
    concurrency: Positive | None
    #: Warm-up requests; None: as many as are out at once, SIDE_CONCURRENCY where there is no limit.
    warmup: Annotated[int, Counted(0, 10**5)] | None
    #: Empty the prefix cache after warm-up and between repeats, so that no run warms another.
    reset_cache: bool
    repeats: Annotated[int, Counted(1, 10**4)]
    #: poisson, gamma, burst: requests a second; ramp: at its end.
    rate: Annotated[float, Above(0)] | None = None
    #: gamma: shape of the law of gaps; 1 is Poisson, below 1 comes in clusters, above is more even.
    burstiness: Annotated[float, Above(0)] | None = None
    #: burst: requests that arrive together.
    burst_size: Positive | None = None
    #: ramp: requests a second at its beginning, and seconds until `rate` is reached.
    rate_from: Annotated[float, Above(0)] | None = None
    ramp_s: Annotated[float, Above(0)] | None = None
    #: trace: file with a timestamp in seconds a line (specbench/trace.py), and what each gap is multiplied by.
    trace: str | None = None
    time_scale: Annotated[float, Above(0)] | None = None


@dataclass(frozen=True, slots=True)
class ReportConfig:
    name: str
    #: Requests whose output is replayed without speculation; 0 turns the check off.
    output_check_requests: Count
    #: Samples that run once more with and without speculation, side by side, after the measured run; 0 is off. None:
    #: four per request at once with the packaged model, whose weights are small enough to load twice, else 0.
    plain_baseline_requests: Count | None
    #: What is written beside metrics.json and report.md, of REPORT_FORMATS.
    formats: tuple[str, ...]
    #: Conditions such as "acceptance.acceptance_length >= 0.99 * baseline" that decide the exit code.
    gates: tuple[str, ...]
    #: Directory of the run that gates and report.md compare with; "none": one without speculation that takes turns with
    #: this run, repeat by repeat.
    baseline: str | None
    #: Address in metrics.json of what a sweeper that searches, such as optuna, is given for each job.
    objective: str | None = None
    #: Goodput counts the requests that are within all of these.
    slo_ttft_ms: Annotated[float, Above(0)] | None = None
    slo_tpot_ms: Annotated[float, Above(0)] | None = None
    slo_e2el_ms: Annotated[float, Above(0)] | None = None


@dataclass(frozen=True, slots=True)
class RunConfig:
    model: ModelConfig
    spec: SpecConfig
    parallel: ParallelConfig
    engine: EngineGroup
    cache: CacheConfig
    eval: EvalConfig
    sampling: SamplingConfig
    load: LoadConfig
    report: ReportConfig
    #: Make any fallback an error. None: true in sweeps and with gates, unless inkling_nano is named.
    strict: bool | None
    dry_run: bool
    #: Where run directories go.
    output_root: str

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """The typed configuration of plain containers; any mistake is a UserError naming `group.key`."""
        config = _build(cls, values, prefix="")
        _check_across_groups(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Plain containers that `from_dict` reads back."""
        return dataclasses.asdict(self, dict_factory=lambda items: {key: _plain(value) for key, value in items})

    @property
    def side_concurrency(self) -> int:
        """Requests at once in what runs beside the measured load: warm-up, plain decoding, comparisons."""
        return self.load.concurrency or min(SIDE_CONCURRENCY, self.engine.max_num_seqs)


#: Models that run the packaged checkpoint when none is named.
WITH_PACKAGED = ("inkling", "inkling_nano")
#: Shapes that random weights can take without a folder of the user's own (assets/shapes/).
SHAPES = ("qwen3_8b", "qwen3_8b_fp8", "mimo_7b", "inkling_8b", "inkling_nvfp4", "qwen3_30b_a3b")
#: Formats of every report, and those that report.formats adds.
ALWAYS_WRITTEN = ("md", "json")
REPORT_FORMATS = ("pr", "html", "csv", "svg", "png")
#: Samples of the packaged problems that run unless eval.num_samples says otherwise.
PACKAGED_NUM_SAMPLES = 100
#: Samples of the plain baseline, per request at once, where report.plain_baseline_requests is unset.
BASELINE_REQUESTS_A_SLOT = 4
#: Requests at once beside a load that has no limit of its own.
SIDE_CONCURRENCY = 8


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


def _check_spec_sampling(spec: SpecConfig) -> None:
    """How drafts are drawn and accepted."""
    method, rates, length = (
        spec.rejection_sample_method,
        spec.synthetic_acceptance_rates,
        spec.synthetic_acceptance_length,
    )
    drawable = ("none", *(line.method for line in PROPOSERS.values() if line.has_draft_logits))
    if spec.draft_sample_method == "probabilistic" and spec.method not in drawable:
        raise UserError(f"spec.draft_sample_method: the drafts of {spec.method} come without probabilities; say greedy")
    if method == "block" and spec.draft_sample_method != "probabilistic":
        is_drawable = spec.method in drawable
        reason = "greedy drafts have none" if is_drawable else f"those of {spec.method} have none"
        advice = "spec.draft_sample_method=probabilistic" if is_drawable else "standard"
        raise UserError(
            f"spec.rejection_sample_method: block weighs the drafts' probabilities, and {reason}; say {advice}"
        )
    for key, value in (("rates", rates), ("length", length)):
        if value is not None and method != "synthetic":
            raise UserError(
                f"spec.synthetic_acceptance_{key}: unused with {method}; say spec.rejection_sample_method=synthetic"
            )
    if method == "synthetic" and spec.method == "none":
        raise UserError("spec.rejection_sample_method: without drafts there is nothing to accept; say spec=mtp8")
    # A resolved configuration holds the rates that a length stands for.
    if method == "synthetic" and rates is None and length is None:
        raise UserError(
            "spec.synthetic_acceptance_length: synthetic acceptance needs it (mean tokens of a step, such as 3.5) or "
            "spec.synthetic_acceptance_rates=[0.8,0.6]"
        )
    if rates is not None and not all(low <= high for low, high in zip((*rates, 0.0), (1.0, *rates), strict=True)):
        raise UserError(
            "spec.synthetic_acceptance_rates: chances that drafts 0 .. i are all accepted lie in 0 .. 1 and never "
            f"rise, not {list(rates)}"
        )


def _check_spec(spec: SpecConfig) -> None:
    """What the keys of the spec group mean to each other."""
    if spec.method == "none" and spec.num_speculative_tokens is not None:
        raise UserError("spec.num_speculative_tokens: drafts need a method; say spec=mtp8, or another spec=NAME")
    if spec.method not in ("none", "mtp") and spec.num_speculative_tokens is None:
        raise UserError(f"spec.num_speculative_tokens: spec.method={spec.method} needs a number; say 4")
    for fault in spec.faults:
        if fault not in FAULTS:
            raise UserError(f"spec.faults: unknown fault {fault!r}; {near_name(fault, FAULTS)}")
    for key, value, method in (
        ("faults", spec.faults, "mtp"),
        ("checkpoint", spec.checkpoint, "draft_model"),
        ("drafts", spec.drafts, "stub"),
        ("accepted_counts", spec.accepted_counts, "stub"),
        ("accepted_rates", spec.accepted_rates, "stub"),
    ):
        if value and spec.method != method:
            raise UserError(f"spec.{key}: has a meaning with spec.method={method} only, not with {spec.method}")
    if spec.ngram_min > spec.ngram_max:
        raise UserError(f"spec.ngram_min: {spec.ngram_min} is above spec.ngram_max={spec.ngram_max}; lower it")
    if spec.method == "stub":
        _check_stub(spec)
    _check_spec_sampling(spec)


def _check_stub(spec: SpecConfig) -> None:
    k = spec.num_speculative_tokens
    assert k is not None
    if spec.drafts is None:
        raise UserError("spec.drafts: unset; say auto, or name a run directory or a file of JSON lines")
    counts, rates = spec.accepted_counts, spec.accepted_rates
    if counts is not None and rates is not None:
        raise UserError("spec.accepted_rates: spec.accepted_counts is there too; leave one of them null")
    if counts is not None and (not counts or min(counts) < 0 or max(counts) > k):
        raise UserError(
            f"spec.accepted_counts: must be numbers of 0 .. {k} (num_speculative_tokens), not {list(counts)}"
        )
    falls = rates is None or all(low <= high for low, high in zip((*rates, 0.0), (1.0, *rates), strict=True))
    if rates is not None and (len(rates) != k or not falls):
        raise UserError(
            f"spec.accepted_rates: must be {k} shares (num_speculative_tokens) in 0 .. 1, none above the one before "
            f"it, not {list(rates)}"
        )


def _check_lengths(config: EvalConfig) -> None:
    """Of evals whose prompts and answers have a given length."""
    if config.osl is not None and config.max_output_tokens != config.osl:
        raise UserError("eval.max_output_tokens: follows eval.osl here; say eval.osl alone")
    if config.truncate and config.source_config == QUALITATIVE:
        raise UserError("eval.truncate: qualitative prompts are asked as they are; say eval.truncate=false")
    if config.truncate and config.isl is None:
        raise UserError("eval.isl: eval.truncate=true needs the tokens to cut to")


#: Keys of the eval group that some of its options alone have a use for.
_EVAL_KEYS = {
    "num_law_draws": ("losslessness",),
    "audio": ("mmau",),
    "prompt": ("mmau",),
    "revision": ("mmau",),
    "tasks": ("mmau", "lm_eval"),
    "include": ("lm_eval",),
    "isl": ("fixed_length", "random_ids", "speed_bench"),
    "osl": ("fixed_length", "random_ids", "speed_bench"),
    "categories": ("fixed_length", "mt_bench", "spec_bench", "speed_bench"),
    "source_config": ("speed_bench",),
    "truncate": ("speed_bench",),
    "sha256": ("speed_bench",),
}


def _check_eval(config: EvalConfig) -> None:
    """What the keys of the eval group mean to each other."""
    if "" in (config.stop or ()):
        raise UserError("eval.stop: an empty text would end every answer at once; leave it out")
    if config.name == "prompts" and config.num_fewshot:
        raise UserError("eval.num_fewshot: rows of prompts are run as they stand; say eval.num_fewshot=0")
    if config.name == "mmau" and config.num_fewshot:
        raise UserError("eval.num_fewshot: questions about clips come without shots; say eval.num_fewshot=0")
    if config.name in ("aime25", "mt_bench", "spec_bench") and config.num_fewshot:
        raise UserError(f"eval.num_fewshot: eval={config.name} is asked without shots; say eval.num_fewshot=0")
    if config.name in ("mt_bench", "spec_bench") and config.protocol == "completion":
        raise UserError(f"eval.protocol: the conversations of eval={config.name} are chats; say eval.protocol=chat")
    _check_lengths(config)
    for key, names in _EVAL_KEYS.items():
        if getattr(config, key) is not None and config.name not in names:
            raise UserError(f"eval.{key}: has a meaning with eval={' or '.join(names)} only; leave it out")


def _check_load(load: LoadConfig) -> None:
    """Every key that the load needs, and none of another's."""
    for key in dict.fromkeys(key for keys in LOAD_KEYS.values() for key in keys):
        is_set, is_needed = getattr(load, key) is not None, key in LOAD_KEYS[load.name]
        if is_needed and not is_set:
            raise UserError(f"load.{key}: load={load.name} needs it; say load.{key}=VALUE")
        if is_set and not is_needed:
            users = " or ".join(f"load={name}" for name, keys in LOAD_KEYS.items() if key in keys)
            raise UserError(f"load.{key}: load={load.name} has no use for it; leave it out, or say {users}")
    if load.name == "closed" and load.concurrency is None:
        raise UserError("load.concurrency: load=closed needs it; say load.concurrency=8, or load=offline for no limit")


def _check_across_groups(config: RunConfig) -> None:
    """The rules that need no checkpoint."""
    spec, engine = config.spec, config.engine
    _check_spec(spec)
    _check_load(config.load)
    for form in config.report.formats:
        if form not in REPORT_FORMATS:
            raise UserError(f"report.formats: unknown format {form!r}; {near_name(form, REPORT_FORMATS)}")
    name, _, index = engine.device.partition(":")
    if name not in ("auto", "cpu", "cuda") or (":" in engine.device and (name != "cuda" or not index.isdigit())):
        raise UserError(f"engine.device: unknown device {engine.device!r}; say auto, cpu, cuda or cuda:N")
    if config.eval.name == "losslessness" and spec.rejection_sample_method == "synthetic":
        raise UserError(
            "spec.rejection_sample_method: what coins accept is lossy on purpose; say standard, or another eval"
        )
    _check_eval(config.eval)
    sampling = config.sampling
    if sampling.temperature == 0 and (sampling.top_k or sampling.min_p or (sampling.top_p or 1.0) < 1):
        raise UserError(
            "sampling.temperature: top_k, top_p and min_p do nothing at temperature 0; say sampling=temperature1"
        )
    if config.report.baseline == INTERLEAVED and spec.method == "none":
        raise UserError(
            "report.baseline: none takes turns with a run without speculation, and this one has none itself; leave "
            "it out"
        )
    if config.model.trust_remote_code:
        raise UserError("model.trust_remote_code: no checkpoint's code is ever run by engine=embedded; leave it false")
    if config.model.checkpoint is None and config.model.load == "random":
        raise UserError(
            "model.checkpoint: random weights need a shape; name a folder with config.json, or one of specbench's own: "
            f"{', '.join(SHAPES)}"
        )
    if config.model.checkpoint is None and config.model.name not in WITH_PACKAGED:
        raise UserError(
            f"model.checkpoint: model={config.model.name} needs one; say model.checkpoint=DIR or owner/name"
        )


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


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _build(cls: type, values: Mapping[str, Any], prefix: str) -> Any:
    """An instance of the dataclass `cls` from plain values, every key known and every value of its type."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for key in values:
        if key not in hints:
            raise UserError(f"{prefix}{key}: unknown key; {near_name(str(key), hints)}")
    arguments = {}
    optional = {field.name for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
    for key, hint in hints.items():
        if key not in values:
            if key in optional:  # a value that the other options of its group have no use for
                continue
            raise UserError(_missing(prefix + key, hint))
        arguments[key] = _value(values[key], hint, prefix + key)
    return cls(**arguments)


def _missing(path: str, hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return f"{path}: none was chosen; say +{path}=NAME (`specbench list {path}` shows them)"
    return f"{path}: missing; say +{path}=VALUE"


def _value(value: Any, hint: Any, path: str) -> Any:
    """`value` as the type hint wants it."""
    if value == "???":
        raise UserError(f"{path}: has no default; say {path}=VALUE")
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, Mapping):
            raise UserError(f"{path}: a config group, not a value; say {path}.KEY=VALUE")
        return _build(hint, value, prefix=path + ".")
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        inner = [part for part in typing.get_args(hint) if part is not types.NoneType]
        assert len(inner) == 1
        return None if value is None else _value(value, inner[0], path)
    if origin is Annotated:
        base, rule = typing.get_args(hint)
        # Names are asked for by name, also where a value of another type was given.
        checked = value if isinstance(rule, OneOf) else _value(value, base, path)
        if complaint := rule.complaint(checked):
            raise UserError(f"{path}: {complaint}")
        return checked
    if origin is tuple:
        return _list(value, typing.get_args(hint)[0], path)
    return _scalar(value, hint, path)


def _list(value: Any, item_hint: type, path: str) -> tuple:
    example = {str: "texts such as [a,b]", float: "numbers such as [0.8,0.6]", int: "whole numbers such as [1,2]"}
    try:
        if not isinstance(value, list | tuple):
            raise UserError("")
        return tuple(_scalar(item, item_hint, path) for item in value)
    except UserError:
        raise UserError(f"{path}: must be a list of {example[item_hint]}, not {value!r}") from None


def _scalar(value: Any, hint: type, path: str) -> Any:
    """A bool, int, float or str; an int is a float too, and nothing else is anything else."""
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        # No setting means anything at infinity, and a whole number can be larger than any other.
        if not abs(value) <= sys.float_info.max:
            raise UserError(f"{path}: must be a finite number, not {value!r}")
        return float(value)
    if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    raise UserError(f"{path}: must be {names[hint]}, not {value!r}")


def known_keys() -> list[str]:
    """Every `group.key` and every top-level value."""
    keys = []
    for name, hint in typing.get_type_hints(RunConfig).items():
        keys += (
            [f"{name}.{field.name}" for field in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else [name]
        )
    return keys
