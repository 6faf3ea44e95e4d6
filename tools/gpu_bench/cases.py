"""An engine on a shape, and a batch run through it: step time, its parts, tokens a second.

Belongs here: building engines, running batches, medians. Does not belong here: what to compare a figure with.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, read_json
from specbench.engine.config import EngineConfig
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.sampling.verification import conditional_rates
from specbench.generate import GenerateRequest, GenerateResult, SamplingParams
from specbench.records import EngineStep

#: Invented, with the decay that real drafters show; the peers' figures were taken with the same.
ACCEPTANCE_RATES = (0.8, 0.62, 0.48, 0.37, 0.29, 0.23, 0.18, 0.14)


#: Those of section decode; the last is the one that later sections go on with.
DECODE_SHAPES = ("qwen3_30b_a3b", "inkling_8b", "mimo_7b", "qwen3_8b_fp8", "qwen3_8b")
#: EngineConfig fields that a GPU is made for; a run resolves its own to the same.
ON_GPU: dict[str, object] = {"attention_backend": "triton", "pipeline_depth": 1, "cuda_graphs": True}


@dataclass(frozen=True, slots=True)
class Settings:
    """How everything is run."""

    device: torch.device
    num_prompt: int = 1024
    #: Output tokens of the shorter and of the longer run.
    num_outputs: tuple[int, int] = (128, 256)
    num_runs: int = 3
    batch_sizes: tuple[int, ...] = (1, 16, 64)
    #: Where tiny shapes and recorded drafts are written.
    scratch: Path = Path()
    is_small: bool = False
    #: Of section decode.
    shapes: tuple[str, ...] = DECODE_SHAPES
    #: EngineConfig fields that a call on the command line sets.
    engine: dict[str, object] = field(default_factory=dict)

    @property
    def mean_context(self) -> int:
        """Tokens before a row, over the steps that only the longer run has."""
        return self.num_prompt + sum(self.num_outputs) // 2

    def quantised_weights(self, folder: Path) -> str:
        """In codes where the shape has any, and the device multiplies by them."""
        is_quantised = "quantization_config" in read_json(folder / CONFIG_FILE)
        return "keep" if is_quantised and self.device.type == "cuda" else "dequantise"

    @property
    def max_model_len(self) -> int:
        return self.num_prompt + self.num_outputs[1] + 64


@dataclass(frozen=True, slots=True)
class Drafting:
    """Who drafts how much, and how much of it is accepted."""

    proposer: str = "none"
    num_drafts: int = 0
    #: Chance that drafts 0 .. i are all accepted.
    rates: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch, from the first request to the last token."""

    seconds: float
    results: tuple[GenerateResult, ...]
    steps: tuple[EngineStep, ...]

    @property
    def num_output_tokens(self) -> int:
        return sum(len(result.output_token_ids) for result in self.results)

    @property
    def decode_steps(self) -> tuple[EngineStep, ...]:
        """Those of the whole batch without any prompt."""
        return tuple(s for s in self.steps if not s.num_prefill_tokens and s.num_decode_requests == len(self.results))

    @property
    def acceptance_length(self) -> float:
        rows = [step for result in self.results for step in result.verify_steps]
        drafted = [row for row in rows if row.num_drafted]
        return 1 + sum(row.num_accepted for row in drafted) / max(1, len(drafted))


@dataclass(frozen=True, slots=True)
class StepTime:
    """A batch's step in seconds: the median of the runs, and what the engine's own events say."""

    batch: int
    #: None where it cannot be told: the longer runs took no longer than the shorter ones.
    step_s: float | None
    #: Between the longest and the shortest, over the median.
    spread: float | None
    #: Of the longer runs, prompts included.
    token_per_s: float
    prefill_s: float
    #: Means over steps of the last run, from end to end and of the parts; None where the engine does not measure them.
    interval_s: float | None
    target_s: float | None
    verify_s: float | None
    draft_s: float | None
    schedule_s: float
    drafts_a_step: float

    @property
    def work_s(self) -> float | None:
        """What the device was busy with, by events."""
        parts = (self.target_s, self.verify_s, self.draft_s)
        return None if self.target_s is None else sum(part or 0.0 for part in parts)

    @property
    def gap_share(self) -> float | None:
        """Share of a step in which neither target nor verification nor drafting ran."""
        if self.work_s is None or self.interval_s is None:
            return None
        return 1 - self.work_s / self.interval_s


class EngineShelf:
    """The one engine that is loaded: sections that want the same one in a row share it, for starting takes seconds."""

    def __init__(self) -> None:
        self._config: EngineConfig | None = None
        self._engine: LLMEngine | None = None

    def engine(self, settings: Settings, folder: Path, drafting: Drafting, **changes: object) -> LLMEngine:
        """With random weights, warm at every batch size. Whoever had the last one may no longer use it."""
        rates = drafting.rates or (0.0,) * drafting.num_drafts
        wanted = engine_config(settings, folder, replace(drafting, rates=()), **changes)
        if wanted != self._config:
            self.clear()
            start_s = time.perf_counter()
            self._config, self._engine = wanted, LLMEngine(wanted)
            start_s = time.perf_counter() - start_s
            for batch in settings.batch_sizes:
                run_batch(self._engine, settings, batch, num_output=8, seed=99)
            print(f"   ({folder.name}, {drafting.proposer}: engine ready in {start_s:.1f} s)", flush=True)
        assert self._engine is not None
        set_synthetic_rates(self._engine, rates)
        return self._engine

    def clear(self) -> None:
        """Give back everything that the engine holds."""
        self._config = self._engine = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def set_synthetic_rates(engine: LLMEngine, rates: tuple[float, ...]) -> None:
    """Of an engine that drafts: the rates lie on the device, where recorded steps read them."""
    if rates:
        stages = engine.runner.stages
        stages.synthetic_rates.copy_(torch.tensor(rates, dtype=stages.synthetic_rates.dtype))
        # What the fused acceptance of a GPU reads in their place.
        stages.conditional_rates.copy_(conditional_rates(stages.synthetic_rates))


def engine_config(settings: Settings, folder: Path, drafting: Drafting, **changes: object) -> EngineConfig:
    values: dict = {
        "checkpoint": str(folder),
        "load": "random",
        "quantised_weights": settings.quantised_weights(folder),
        "dtype": "bfloat16",
        "device": str(settings.device),
        "max_model_len": settings.max_model_len,
        "max_num_seqs": max(settings.batch_sizes),
        "max_num_batched_tokens": 8192,
        "block_size": 16,
        "num_blocks": None,
        "num_speculative_tokens": drafting.num_drafts,
        "proposer": drafting.proposer,
    }
    if settings.device.type == "cuda":
        values |= ON_GPU
    if drafting.num_drafts:
        rates = drafting.rates or (0.0,) * drafting.num_drafts
        values |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    if drafting.proposer == "stub":
        values |= {"drafts": str(write_drafts(settings)), "accepted_counts": (0,)}
    return EngineConfig(**(values | settings.engine | changes))


def prompt_ids(settings: Settings, index: int, seed: int) -> tuple[int, ...]:
    """Random ids that every shape's vocabulary has."""
    return _random_ids(settings.num_prompt, 1000 * seed + index)


@cache
def _random_ids(count: int, seed: int) -> tuple[int, ...]:
    """Drawn once, so that drawing them is in no batch's time but the first one's."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, 500, (count,), generator=generator).tolist())


def write_drafts(settings: Settings) -> Path:
    """Recorded texts for the proposer that takes its drafts from a file, so that every step has all its drafts."""
    num_prompts = max(settings.batch_sizes)
    file = settings.scratch / f"drafts_{num_prompts}_{settings.num_runs}.jsonl"
    if file.exists():
        return file
    output = [(7 * index) % 490 + 2 for index in range(settings.num_outputs[1] + 64)]
    seeds = [*range(settings.num_runs), 99]
    with file.open("w", encoding="utf-8") as stream:
        for seed in seeds:
            for index in range(num_prompts):
                row = {"prompt_token_ids": prompt_ids(settings, index, seed), "output_token_ids": output}
                stream.write(json.dumps(row) + "\n")
    return file


def run_batch(
    engine: LLMEngine, settings: Settings, batch: int, num_output: int, seed: int, first: int = 0
) -> BatchRun:
    """All requests at once, to their full length. first: the place of the first one's prompt among all of the seed."""
    gc.collect()
    synchronize(settings.device)
    start_s = time.perf_counter()
    submit_batch(engine, settings, batch, num_output, seed, first)
    results: list[GenerateResult] = []
    steps: list[EngineStep] = []
    while engine.has_requests:
        finished, step = engine.step()
        results += finished
        if step is not None:
            steps.append(step)
    synchronize(settings.device)
    return BatchRun(time.perf_counter() - start_s, tuple(results), tuple(steps))


def submit_batch(engine: LLMEngine, settings: Settings, batch: int, num_output: int, seed: int, first: int = 0) -> None:
    """Queue all requests of a batch; first: see `run_batch`."""
    for index in range(first, first + batch):
        sampling = SamplingParams(num_output, ignore_eos=True)
        ids = prompt_ids(settings, index, seed)
        engine.add_request(GenerateRequest(str(index), str(index), sampling, prompt_token_ids=ids), engine.clock())


def measure_step(engine: LLMEngine, settings: Settings, batch: int) -> StepTime:
    """By the rules: (T256 - T128) / 128, the median of the runs. One token a step is taken for granted."""
    short, long = settings.num_outputs
    seconds, rates = [], []
    for seed in range(settings.num_runs):
        first = run_batch(engine, settings, batch, short, seed)
        last = run_batch(engine, settings, batch, long, seed)
        seconds.append((last.seconds - first.seconds) / (long - short))
        rates.append(last.num_output_tokens / last.seconds)
    middle = positive_median(seconds)
    return StepTime(
        batch=batch,
        step_s=middle,
        spread=None if middle is None else (max(seconds) - min(seconds)) / middle,
        token_per_s=statistics.median(rates),
        prefill_s=max(r.record.first_token_s - r.record.arrival_s for r in last.results),
        interval_s=_interval_s(last.decode_steps),
        target_s=_mean([step.target_s for step in last.decode_steps]),
        verify_s=_mean([step.verify_s for step in last.decode_steps]),
        draft_s=_mean([step.draft_s for step in last.decode_steps]),
        schedule_s=_mean([step.schedule_s for step in last.decode_steps]) or 0.0,
        drafts_a_step=_mean([row.num_drafted for result in last.results for row in result.verify_steps]) or 0.0,
    )


def positive_median(seconds: Sequence[float]) -> float | None:
    """None where it is no time: a difference of two runs may be lost in their noise."""
    middle = statistics.median(seconds)
    return middle if middle > 0 else None


def _interval_s(steps: tuple[EngineStep, ...]) -> float | None:
    """Mean time from the end of a step to the end of the next."""
    return (steps[-1].end_s - steps[0].end_s) / (len(steps) - 1) if len(steps) > 1 else None


def _mean(values: list) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
