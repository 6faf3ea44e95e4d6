"""What verification costs beside the bare argmax of the same rows, where the vocabulary is large.

    python tools/benchmarks/verify_cost.py

Eight requests with eight drafts each, 72 rows of 200,000 logits, through the runner's own verification; the logits are
there already, so no model is timed. Every line is timed in turn with the argmax, and the median ratio printed. Lines
that change logits in place have a copy of them in their time.

Exits 1 when greedy verification costs more than 1.5 times the argmax.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.config import EngineConfig
from specbench.engine.execution.input_batch import InputBatch
from specbench.engine.execution.model_runner import ModelRunner
from specbench.engine.execution.stages import Forwarded
from specbench.engine.execution.step_results import StepResults
from specbench.engine.layers.metadata import TargetOutput
from specbench.engine.layers.parallel import ALONE, Vocabulary
from specbench.engine.sampling.parameters import RequestSampling
from specbench.engine.scheduling.step import DECODE, NewRequest, SchedulerOutput
from specbench.generate import SamplingParams

BATCH_SIZE, K, NUM_PROMPT = 8, 8, 64
MAX_GREEDY_RATIO = 1.5
#: Name -> sampling parameters, draft_sample_method, rejection_sample_method.
LINES: dict[str, tuple[dict, str, str]] = {
    "greedy": ({}, "greedy", "standard"),
    "greedy, penalties": ({"repetition_penalty": 1.1, "frequency_penalty": 0.1}, "greedy", "standard"),
    "greedy, logprobs=5": ({"logprobs": 5}, "greedy", "standard"),
    "temperature 1": ({"temperature": 1.0}, "greedy", "standard"),
    "temperature 1, top_k=50": ({"temperature": 1.0, "top_k": 50}, "greedy", "standard"),
    "temperature 1, top_p=0.95": ({"temperature": 1.0, "top_p": 0.95}, "greedy", "standard"),
    "drawn drafts, standard": ({"temperature": 1.0}, "probabilistic", "standard"),
    "drawn drafts, block": ({"temperature": 1.0}, "probabilistic", "block"),
}


@dataclass(frozen=True)
class NoAttention:
    needs_segments: bool = False
    is_capturable: bool = False


@dataclass
class GivenLogits:
    """A target whose logits are there: what the runner asks of a model, and no model."""

    logits: torch.Tensor
    is_copied: bool
    relative_extents: dict[str, int]
    attention: NoAttention = NoAttention()

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.vocab_size, ALONE)

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self.logits.device

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        return (CacheGroupSpec("none", "target", "full_attention", (), (), element_size=4, window=None),)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits.clone() if self.is_copied else self.logits


def make_step(logits: torch.Tensor, params: dict, draft: str, method: str) -> Callable[[], object]:
    """One verify step of BATCH_SIZE requests, to be called again and again."""
    config = EngineConfig(
        checkpoint="",
        dtype="float32",
        device="cpu",
        max_model_len=256,
        max_num_seqs=BATCH_SIZE,
        max_num_batched_tokens=256,
        block_size=16,
        num_blocks=None,
        num_speculative_tokens=K,
        proposer="none",
        draft_sample_method=draft,
        rejection_sample_method=method,
    )
    runner = ModelRunner(config, GivenLogits(logits, bool(params), relative_extents={}), None, {})
    step = SchedulerOutput(step=0, new_requests=[_request(row, params) for row in range(BATCH_SIZE)])
    runner.state.apply(step)
    probabilities = runner.stages.draft_probabilities
    if probabilities is not None:
        probabilities.copy_(torch.randn_like(probabilities).softmax(-1))
    runner.state.counts[1] = NUM_PROMPT - 1
    # Drafts that the target takes, and one in the middle that it doesn't.
    drafts = logits.argmax(-1).view(BATCH_SIZE, -1)[:, :K].clone()
    drafts[:, K // 2] = 0
    for row in range(BATCH_SIZE):
        step.rows.append(row)
        step.modes.append(DECODE)
        step.num_tokens.append(K + 1)
        step.max_seq_lens.append(NUM_PROMPT + K)
    positions = torch.arange(NUM_PROMPT - 1, NUM_PROMPT + K).repeat(BATCH_SIZE)
    hidden = torch.zeros(len(positions), 1)
    counts = runner.state.counts[:, :BATCH_SIZE].clone()

    @torch.inference_mode()
    def verify() -> object:
        # What the call before committed is taken back.
        runner.state.token_pool[:BATCH_SIZE, NUM_PROMPT : NUM_PROMPT + K] = drafts
        runner.state.counts[:, :BATCH_SIZE] = counts
        batch = InputBatch.gather(step, runner.state, K)
        results = StepResults.empty(K, BATCH_SIZE, logits.device)
        kept = runner.stages.verify(Forwarded(batch, positions, TargetOutput(hidden, hidden)), results)
        return results, [rows.read() for rows in kept]

    return verify


def _request(row: int, params: dict) -> NewRequest:
    sampling = RequestSampling(SamplingParams(100, **params), row, NUM_PROMPT, (), ())
    return NewRequest(row=row, token_ids=list(range(NUM_PROMPT)), num_computed_tokens=0, sampling=sampling)


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    logits = torch.randn(BATCH_SIZE * (K + 1), arguments.vocab) * 3
    ratios = {}
    print(f"{'verify of ' + str(len(logits)) + ' rows':<28}{'ms':>9}{'argmax ms':>11}{'ratio':>8}")
    for name, (params, draft, method) in LINES.items():
        verify = make_step(logits, params, draft, method)
        verify(), logits.argmax(dim=-1)
        pairs = [(seconds(verify), seconds(lambda: logits.argmax(dim=-1))) for _ in range(arguments.repeats)]
        ratios[name] = statistics.median(cost / bare for cost, bare in pairs)
        cost_ms, bare_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:<28}{cost_ms:>9.2f}{bare_ms:>11.2f}{ratios[name]:>8.2f}")
    if ratios["greedy"] > MAX_GREEDY_RATIO:
        print(f"greedy verification costs {ratios['greedy']:.2f} times the argmax, more than {MAX_GREEDY_RATIO}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
