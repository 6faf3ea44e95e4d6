"""What verification at a temperature costs on a GPU beside the bare argmax of the same rows, and beside greedy
verification.

    python tools/benchmarks/sampling_cost.py [--batches 1 16 64] [--drafts 4 8] [--vocab 151936]

The runner's own verification and commit, recorded in a graph as a step has them; the logits are there already, so no
model is timed. Each line's graph is replayed in turn with those of the argmax and of greedy verification, and medians
of ratios are printed. Drafts are drawn from the target's law with noise, so that some are rejected; `flat` logits have
a standard deviation of 1, `peaked` ones of 3.

Exits 1 when a drawn verification without filters costs more than 2 times the greedy one, or one with top_p more than 6
times the argmax.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.config import EngineConfig
from specbench.engine.execution.input_batch import InputBatch, padded_indices
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.stages import Forwarded, StepStages
from specbench.engine.execution.step_results import StepResults
from specbench.engine.kernels.sampling import best_ids
from specbench.engine.layers.metadata import TargetOutput
from specbench.engine.layers.parallel import ALONE, Vocabulary
from specbench.engine.sampling.parameters import RequestSampling
from specbench.engine.scheduling.step import NewRequest, SchedulerOutput
from specbench.generate import SamplingParams

NUM_PROMPT = 64
#: How often a graph does what it does.
NUM_TIMES = 8
_MOVED = ("token_pool", "counts")
MAX_OF_GREEDY, MAX_OF_ARGMAX = 2.0, 6.0
SPREADS = {"flat": 1.0, "peaked": 3.0}
#: Name -> draft_sample_method, rejection_sample_method.
METHODS = {
    "matched": ("greedy", "standard"),
    "standard": ("probabilistic", "standard"),
    "block": ("probabilistic", "block"),
}
FILTERS: dict[str, dict[str, float]] = {"": {}, "top_p=0.95": {"top_p": 0.95}, "top_k=50": {"top_k": 50}}


@dataclass(frozen=True)
class NoAttention:
    needs_segments: bool = False
    is_capturable: bool = True


class GivenLogits:
    """A target whose logits are there: what verification asks of a model, and no model."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.vocab_size = logits.shape[1]
        self.device = logits.device
        self.vocabulary = Vocabulary(self.vocab_size, ALONE)
        self.attention = NoAttention()
        self.relative_extents: dict[str, int] = {}

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        return (CacheGroupSpec("none", "target", "full_attention", (), (), element_size=4, window=None),)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits


@dataclass(frozen=True)
class Shape:
    num_requests: int
    k: int
    vocab: int
    spread: float

    def logits(self) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(0)
        rows = self.num_requests * (self.k + 1)
        return torch.randn(rows, self.vocab, device="cuda", generator=generator) * self.spread

    def draft_laws(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_requests, k, vocab] fp32."""
        of_drafts = logits.view(self.num_requests, self.k + 1, -1)[:, : self.k]
        return (of_drafts + torch.randn_like(of_drafts) * 0.5).softmax(-1)


class VerifyStep:
    """Verification of one step's windows, several times over, each on request rows of its own: counts and drafts of all
    are put back at once, which is too little to count."""

    def __init__(self, shape: Shape, logits: torch.Tensor, laws: torch.Tensor, method: str, params: dict) -> None:
        draft, rejection = METHODS[method]
        num, k = shape.num_requests, shape.k
        config = _config(num, k, draft, rejection)
        states = [RequestState.of(config, 1, shape.vocab, logits.device) for _ in range(NUM_TIMES)]
        self.stages = StepStages(config, GivenLogits(logits), None, {}, states[0])  # type: ignore[arg-type]
        if self.stages.draft_probabilities is not None:
            self.stages.draft_probabilities[:num] = laws
        for state in states:
            state.apply(SchedulerOutput(step=0, new_requests=[_request(row, params) for row in range(num)]))
            state.counts[1] = NUM_PROMPT - 1
            state.token_pool[:num, NUM_PROMPT : NUM_PROMPT + k] = laws.flatten(0, 1).multinomial(1).view(num, k)
        # [NUM_TIMES, ...]: as they are before and after
        self.pools, self.counts = (torch.stack([getattr(each, name) for each in states]) for name in _MOVED)
        self.old_pools, self.old_counts = self.pools.clone(), self.counts.clone()
        live = torch.stack([torch.arange(num, device="cuda"), torch.full((num,), k + 1, device="cuda")])
        indices = padded_indices(live, range(num), k + 1, k)
        positions = torch.arange(NUM_PROMPT - 1, NUM_PROMPT + k, device="cuda").repeat(num)
        hidden = torch.zeros(len(positions), 1, device="cuda")
        self.steps: list[tuple[RequestState, Forwarded]] = []
        for index, state in enumerate(states):
            state.token_pool, state.counts = self.pools[index], self.counts[index]
            batch = InputBatch.of(indices, state, (NUM_PROMPT + k,) * num)
            self.steps.append((state, Forwarded(batch, positions, TargetOutput(hidden, hidden))))
        self.results = StepResults.empty(k, num, logits.device)
        has_filters = states[0].sampling.needs_filters(range(num))
        self._verify = self.stages.verify_filtered if has_filters else self.stages.verify_tempered

    def reset(self) -> None:
        self.pools.copy_(self.old_pools)
        self.counts.copy_(self.old_counts)

    def _each(self, verify: Callable[[Forwarded, StepResults], object]) -> None:
        self.reset()
        for state, forwarded in self.steps:
            self.stages.state = state
            verify(forwarded, self.results)

    def verify(self) -> None:
        self._each(self._verify)

    def verify_greedily(self) -> None:
        self._each(self.stages.verify_greedy)

    def argmax(self) -> None:
        self._each(
            lambda forwarded, results: best_ids(self.stages.model.compute_logits(forwarded.hidden.hidden_states))
        )


def _config(num: int, k: int, draft: str, rejection: str) -> EngineConfig:
    return EngineConfig(
        checkpoint="",
        dtype="float32",
        device="cuda",
        max_model_len=256,
        max_num_seqs=num,
        max_num_batched_tokens=1024,
        block_size=16,
        num_blocks=None,
        num_speculative_tokens=k,
        proposer="none",
        draft_sample_method=draft,
        rejection_sample_method=rejection,
    )


def _request(row: int, params: dict) -> NewRequest:
    sampling = RequestSampling(SamplingParams(100, temperature=1.0, **params), row + 1, NUM_PROMPT, (), ())
    return NewRequest(row=row, token_ids=list(range(NUM_PROMPT)), num_computed_tokens=0, sampling=sampling)


def recorded(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


@dataclass(frozen=True)
class Line:
    """Medians of rounds in which everything is timed in turn."""

    cost_us: float
    argmax_us: float
    greedy_us: float
    of_argmax: float
    of_greedy: float
    acceptance_length: float


@torch.inference_mode()
def measure(step: VerifyStep, rounds: int) -> Line:
    functions = (step.reset, step.argmax, step.verify_greedily, step.verify)
    graphs = [recorded(function) for function in functions]
    repeats = max(2, min(50, int(1e4 / microseconds(graphs[-1], 2))))
    taken = []
    for _ in range(rounds):
        reset, *costs = (microseconds(graph, repeats) for graph in graphs)
        argmax, greedy, verify = ((cost - reset) / NUM_TIMES for cost in costs)
        taken.append((verify, argmax, greedy, verify / argmax, verify / greedy))
    # The row behind the requests' is one of padding.
    length = float((step.counts - step.old_counts)[:, 0, :-1].double().mean())
    return Line(*(statistics.median(column) for column in zip(*taken, strict=True)), acceptance_length=length)


def missed(filters: str, line: Line) -> str:
    """Which goal a line does not reach; nothing where it does."""
    if not filters and line.of_greedy > MAX_OF_GREEDY:
        return f"more than {MAX_OF_GREEDY:g} x greedy"
    if filters.startswith("top_p") and line.of_argmax > MAX_OF_ARGMAX:
        return f"more than {MAX_OF_ARGMAX:g} x argmax"
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device: nothing is measured")
        return 2
    print(
        f"{'B':>3}{'k':>3} {'law':<7}{'method':<9}{'filters':<11}{'us':>8}{'x argmax':>10}{'x greedy':>10}{'length':>8}"
    )
    num_missed = 0
    for num_requests in options.batches:
        for k in options.drafts:
            for law, spread in SPREADS.items():
                shape = Shape(num_requests, k, options.vocab, spread)
                logits = shape.logits()
                laws = shape.draft_laws(logits)
                for filters, params in FILTERS.items():
                    for method in METHODS:
                        line = measure(VerifyStep(shape, logits, laws, method, params), options.rounds)
                        reason = missed(filters, line)
                        num_missed += bool(reason)
                        print(
                            f"{num_requests:>3}{k:>3} {law:<7}{method:<9}{filters:<11}{line.cost_us:>8.1f}"
                            f"{line.argmax_us:>8.1f}{line.greedy_us:>8.1f}{line.of_argmax:>10.2f}"
                            f"{line.of_greedy:>10.2f}{line.acceptance_length:>8.2f}  {reason}",
                            flush=True,
                        )
    print(f"{num_missed} lines miss their goal")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
