"""The whole run as frozen dataclasses, checked as a whole before anything starts.

Belongs here: one dataclass a config group, its ranges, the rules across groups. Does not belong here: Hydra (cli.py),
reading checkpoints, doing anything.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    name: str
    checkpoint: str | None
    revision: str | None
    #: "auto" (float32 on a CPU, the checkpoint's own on a GPU), "float32" or "bfloat16".
    dtype: str
    max_model_len: int | None
    tokenizer: str | None
    chat_template: str | None
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class SpecConfig:
    name: str
    #: "none" or "mtp".
    method: str
    #: None takes the number of modules in the checkpoint.
    num_speculative_tokens: int | None
    #: "auto" (by the checkpoint) or "multi".
    modules: str
    #: "auto" (by the model family), "chain" or "target".
    hidden_feedback: str
    trim_to_max_tokens: bool
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    name: str
    tensor_parallel_size: int


@dataclass(frozen=True, slots=True)
class EngineGroup:
    #: "embedded".
    name: str
    #: "auto", "cpu", "cuda" or "cuda:N".
    device: str
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class CacheConfig:
    name: str
    block_size: int
    #: None: what max_num_seqs requests of max_model_len can need, within memory_fraction.
    num_blocks: int | None
    #: Share of the device's free memory (of the machine's on a CPU) that weights and caches may take together.
    memory_fraction: float


@dataclass(frozen=True, slots=True)
class EvalConfig:
    #: "gsm8k" or "prompts".
    name: str
    data: str | None
    #: "chat" or "completion"; None where rows say it themselves (prompts).
    protocol: str | None
    #: None: all.
    num_samples: int | None
    num_fewshot: int
    #: Rows that shots are taken from; None takes the training rows that belong to the data.
    fewshot_data: str | None
    max_output_tokens: int
    #: None where nothing is scored.
    scorer: str | None
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    name: str
    temperature: float
    top_k: int
    top_p: float
    seed: int
    ignore_eos: bool


@dataclass(frozen=True, slots=True)
class LoadConfig:
    name: str
    concurrency: int
    #: Warm-up requests; None: as many as the concurrency.
    warmup: int | None
    repeats: int


@dataclass(frozen=True, slots=True)
class ReportConfig:
    name: str
    #: Requests whose output is replayed without speculation; 0 turns the check off.
    output_check_requests: int


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
    #: Make any fallback an error.
    strict: bool
    dry_run: bool
    #: Where run directories go.
    output_root: str
