"""What steps take on a GPU beside all that is held throughout a run: measured at start-up, before the caches are sized.

Belongs here: the largest steps, run once on caches of one block, and the memory of recorded ones. Does not belong here:
what follows for the number of blocks (memory.py).

Nothing of it depends on how many blocks there are: the rows are those of the scratch request, which has none. What is
measured holds the workspaces of kernels and libraries, too.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.config import EngineConfig
from specbench.engine.execution.cuda_graphs import recorded_shapes
from specbench.engine.execution.input_batch import InputBatch
from specbench.engine.execution.model_runner import ModelRunner
from specbench.engine.execution.step_results import StepResults
from specbench.engine.layers.cache import CachePool
from specbench.engine.models.target import ContentEncoder, TargetModel
from specbench.engine.proposers.proposer import Proposer
from specbench.engine.sampling.parameters import RequestSampling
from specbench.engine.scheduling.step import DECODE, FINAL_CHUNK, SchedulerOutput
from specbench.errors import UserError
from specbench.generate import SamplingParams

#: What the driver keeps of a graph (measured: 0.2 to 0.4 MiB).
_DRIVER_BYTES = 1 << 19
#: A request that asks for everything that takes memory.
_SAMPLING = SamplingParams(
    1, temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, logprobs=1
)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes."""

    #: The most that a step which is not replayed holds at a time, its logits included.
    activations: int
    #: Of recorded steps: their intermediate results and buffers, and the driver's part.
    graphs: int


def measures_steps(device: torch.device) -> bool:
    """Whether the device says how much memory is in use."""
    return device.type == "cuda"


@torch.inference_mode()
def measure_step_memory(
    config: EngineConfig,
    model: TargetModel,
    proposer: Proposer | None,
    specs: Sequence[CacheGroupSpec],
    content_encoder: ContentEncoder | None,
) -> StepMemory:
    """Run and record the largest steps once, with weights and the buffers of drafting in place. UserError where they do
    not fit."""
    try:
        return _measure(config, model, proposer, specs, content_encoder)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"engine.max_num_batched_tokens={config.max_num_batched_tokens}: the largest step does not fit beside the "
            f"weights on {config.device}: lower it, or engine.max_num_seqs={config.max_num_seqs} ({error})"
        ) from error


def _measure(
    config: EngineConfig,
    model: TargetModel,
    proposer: Proposer | None,
    specs: Sequence[CacheGroupSpec],
    content_encoder: ContentEncoder | None,
) -> StepMemory:
    caches = {spec.name: CachePool(spec, 1, config.block_size, model.dtype, model.device) for spec in specs}
    runner = ModelRunner(config, model, proposer, caches, content_encoder)
    _ask_for_everything(runner)
    steps = [_longest(config, runner.state.scratch_row), _widest(config, runner.state.scratch_row)]
    measured = StepMemory(
        activations=max(_peak_bytes(runner, step) for step in steps),
        graphs=_graph_bytes(runner) if config.cuda_graphs else 0,
    )
    del runner, caches
    gc.collect()
    torch.cuda.empty_cache()
    return measured


def _ask_for_everything(runner: ModelRunner) -> None:
    """Give the scratch row parameters of sampling."""
    sampling = RequestSampling(_SAMPLING, key=0, num_prompt_tokens=1, stop_token_ids=(), bad_words=())
    runner.state.sampling.add([runner.state.scratch_row], [sampling])


def _longest(config: EngineConfig, row: int) -> SchedulerOutput:
    """As many rows as a step can have, in prompts as long as they can be."""
    length = min(config.max_model_len - 1, config.max_num_batched_tokens)
    num_requests = min(config.max_num_batched_tokens // length, config.max_num_seqs)
    return _step(config, row, FINAL_CHUNK, num_requests, length)


def _widest(config: EngineConfig, row: int) -> SchedulerOutput:
    """As many logits as a step can have."""
    num_rows = config.num_speculative_tokens + 1
    num_requests = min(config.max_num_seqs, max(config.max_num_batched_tokens // num_rows, 1))
    return _step(config, row, DECODE, num_requests, min(num_rows, config.max_num_batched_tokens))


def _step(config: EngineConfig, row: int, mode: int, num_requests: int, num_rows: int) -> SchedulerOutput:
    return SchedulerOutput(
        step=0,
        rows=[row] * num_requests,
        modes=[mode] * num_requests,
        num_tokens=[num_rows] * num_requests,
        max_seq_lens=[config.max_model_len] * num_requests,
    )


def _peak_bytes(runner: ModelRunner, step: SchedulerOutput) -> int:
    """The most that the step holds at a time beside what was held before."""
    device, stages = runner.state.device, runner.stages
    held = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    batch = InputBatch.gather(step, runner.state, runner.k)
    forwarded, results = stages.forward(batch), StepResults.empty(runner.k, step.num_requests, device)
    stages.verify(forwarded, results)
    # What a proposer that asks the host would draft, it has no request for.
    if runner.proposer is not None and runner.proposer.is_capturable:
        stages.draft(forwarded, results, is_sampled=True)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - held


def _graph_bytes(runner: ModelRunner) -> int:
    """Of all shapes, from the largest ones: the smaller ones find their memory."""
    device, buffers = runner.state.device, runner.feature_buffers
    held = torch.cuda.memory_allocated(device)
    recorder = runner.capture(lambda message: None, is_trial=True)
    pool, in_use = recorder.pool_bytes
    mixed, shapes = recorded_shapes(runner.stages, runner.limits)
    num_times = (len(mixed) + len(shapes)) / runner.captured_steps.num_shapes
    # Inputs, results and plans beside the pool, and the driver's part, are each shape's own.
    own = max(0, torch.cuda.memory_allocated(device) - held - in_use) + recorder.num_graphs * _DRIVER_BYTES
    return pool + math.ceil(own * num_times) + (0 if buffers is None else buffers.num_bytes)
