"""The whole run as frozen dataclasses, checked as a whole before anything starts.

Belongs here: one dataclass a config group, its types and ranges, and the rules across groups. Does not belong here: how
values are read (config_values.py), what stands for "auto" and null (resolved_config.py), Hydra (cli.py), doing
anything.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from specbench.config_values import Above, AtLeast, Between, Counted, OneOf, Within, build_config
from specbench.engine.config import FAULTS
from specbench.engine.proposer_table import PROPOSERS
from specbench.errors import UserError, near_name
from specbench.records import INTERLEAVED

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
    all_reduce: Annotated[str, OneOf(("auto", "one_shot", "nccl"))] = "auto"
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
        config = build_config(cls, values, prefix="")
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
#: Requests at once beside a load that has no limit of its own.
SIDE_CONCURRENCY = 8


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


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def known_keys() -> list[str]:
    """Every `group.key` and every top-level value."""
    keys = []
    for name, hint in typing.get_type_hints(RunConfig).items():
        keys += (
            [f"{name}.{field.name}" for field in dataclasses.fields(hint)] if dataclasses.is_dataclass(hint) else [name]
        )
    return keys
