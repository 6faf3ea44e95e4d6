"""What verification costs beside the bare argmax of the same rows, and beside greedy verification, where the vocabulary
is large.

    python tools/benchmarks/sampling_cost.py [--device cuda] [--batches 1 16 64] [--drafts 4 8] [--vocab 151936]

The runner's own verification and commit; the logits are there already, so no model is timed. On a GPU it is recorded in
a graph as a step has it, and graphs are replayed in turn; on a CPU calls are timed in turn, and what requests may ask
for beyond a temperature and filters is timed, too. Medians of times and of ratios are printed. Drafts are drawn from
the target's law with noise, so that some are rejected; `flat` logits have a standard deviation of 1, `peaked` ones
of 3.

Exits 1 when, on a GPU, a verification at a temperature without filters costs more than 2 times the greedy one, or one
with top_p more than 6 times the argmax; on a CPU, when the greedy one costs more than 1.5 times the argmax.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from specbench.engine.cache_group import CacheGroupSpec
from specbench.engine.config import EngineConfig
from specbench.engine.execution.input_batch import InputBatch, padded_indices
from specbench.engine.execution.request_state import RequestState
from specbench.engine.execution.stages import Forwarded, StepStages
from specbench.engine.execution.step_results import StepResults
from specbench.engine.layers.metadata import TargetOutput
from specbench.engine.layers.parallel import ALONE, Vocabulary
from specbench.engine.sampling.parameters import RequestSampling
from specbench.engine.scheduling.step import NewRequest, SchedulerOutput
from specbench.generate import SamplingParams

NUM_PROMPT = 64
#: How often a graph does what it does.
TIMES_A_GRAPH = 8
_MOVED = ("token_pool", "counts")
MAX_OF_GREEDY, MAX_OF_ARGMAX, MAX_OF_ARGMAX_ON_CPU = 2.0, 6.0, 1.5
SPREADS = {"flat": 1.0, "peaked": 3.0}
#: Name -> draft_sample_method, rejection_sample_method.
METHODS = {
    "matched": ("greedy", "standard"),
    "standard": ("probabilistic", "standard"),
    "block": ("probabilistic", "block"),
}
#: What requests at temperature 1 ask for.
SAMPLED: dict[str, dict[str, float]] = {"": {}, "top_p=0.95": {"top_p": 0.95}, "top_k=50": {"top_k": 50}}
#: What greedy ones do: no part of recorded steps.
GREEDY: dict[str, dict[str, float]] = {
    "greedy": {},
    "greedy, penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "greedy, logprobs=5": {"logprobs": 5},
}


@dataclass(frozen=True)
class NoAttention:
    needs_segments: bool = False
    is_capturable: bool = True


@dataclass(frozen=True)
class GivenLogits:
    """A target whose logits are there: what verification asks of a model, and no model."""

    # [R, vocab] fp32
    logits: torch.Tensor
    #: Whether verification changes them in place.
    is_copied: bool
    attention: NoAttention = NoAttention()
    relative_extents: dict[str, int] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[1]

    @property
    def device(self) -> torch.device:
        return self.logits.device

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.vocab_size, ALONE)

    def cache_groups(self) -> tuple[CacheGroupSpec, ...]:
        return (CacheGroupSpec("none", "target", "full_attention", (), (), element_size=4, window=None),)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.logits.clone() if self.is_copied else self.logits

    def compute_bests(self, hidden: torch.Tensor) -> object:
        from specbench.engine.kernels.sampling import best_of_chunks

        return best_of_chunks(self.logits)


@dataclass(frozen=True)
class Shape:
    num_requests: int
    k: int
    vocab: int
    device: torch.device

    def logits(self, spread: float) -> torch.Tensor:
        """[num_requests * (k + 1), vocab] fp32."""
        generator = torch.Generator(self.device).manual_seed(0)
        rows = self.num_requests * (self.k + 1)
        return torch.randn(rows, self.vocab, device=self.device, generator=generator) * spread

    def draft_laws(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_requests, k, vocab] fp32."""
        of_drafts = logits.view(self.num_requests, self.k + 1, -1)[:, : self.k]
        return (of_drafts + torch.randn_like(of_drafts) * 0.5).softmax(-1)


class VerifyStep:
    """Verification of one step's windows, several times over, each on request rows of its own: counts and drafts of all
    are put back at once, which is too little to count."""

    def __init__(
        self, shape: Shape, logits: torch.Tensor, laws: torch.Tensor, method: str, params: dict, times: int
    ) -> None:
        num, k, self.times = shape.num_requests, shape.k, times
        self.is_recorded = shape.device.type == "cuda"
        config = _config(shape, *METHODS[method])
        states = [RequestState.of(config, 1, shape.vocab, shape.device) for _ in range(times)]
        is_copied = not self.is_recorded and params != {"temperature": 0.0}
        self.stages = StepStages(config, GivenLogits(logits, is_copied), None, {}, states[0])  # type: ignore[arg-type]
        if self.stages.draft_probabilities is not None:
            self.stages.draft_probabilities[:num] = laws
        for state in states:
            state.apply(SchedulerOutput(step=0, new_requests=[_request(row, params) for row in range(num)]))
            state.counts[1] = NUM_PROMPT - 1
            state.token_pool[:num, NUM_PROMPT : NUM_PROMPT + k] = laws.flatten(0, 1).multinomial(1).view(num, k)
        # [times, ...]: as they are before and after
        self.pools, self.counts = (torch.stack([getattr(each, name) for each in states]) for name in _MOVED)
        self.old_pools, self.old_counts = self.pools.clone(), self.counts.clone()
        device = shape.device
        live = torch.stack([torch.arange(num, device=device), torch.full((num,), k + 1, device=device)])
        indices = padded_indices(live, range(num), k + 1, k)
        positions = torch.arange(NUM_PROMPT - 1, NUM_PROMPT + k, device=device).repeat(num)
        hidden = torch.zeros(len(positions), 1, device=device)
        self.steps: list[tuple[RequestState, Forwarded]] = []
        for index, state in enumerate(states):
            state.token_pool, state.counts = self.pools[index], self.counts[index]
            batch = InputBatch.of(indices, state, (NUM_PROMPT + k,) * num)
            self.steps.append((state, Forwarded(batch, positions, TargetOutput(hidden, hidden))))
        self.results = StepResults.empty(k, num, device)
        self.verification = self.stages.verification(range(num))

    def reset(self) -> None:
        self.pools.copy_(self.old_pools)
        self.counts.copy_(self.old_counts)

    def _each(self, verify: Callable[[Forwarded, StepResults], object]) -> None:
        self.reset()
        for state, forwarded in self.steps:
            self.stages.state = state
            verify(forwarded, self.results)

    def verify(self) -> None:
        self._each(self._verify_recorded if self.is_recorded else self._verify_and_read)

    def _verify_recorded(self, forwarded: Forwarded, results: StepResults) -> None:
        assert self.verification is not None
        self.stages.verify_as(self.verification, forwarded, results)

    def _verify_and_read(self, forwarded: Forwarded, results: StepResults) -> None:
        for rows in self.stages.verify(forwarded, results):
            rows.read()

    def verify_greedily(self) -> None:
        self._each(self.stages.verify_greedy)

    def argmax(self) -> None:
        logits = self.stages.model.logits  # type: ignore[attr-defined]
        self._each(lambda forwarded, results: _argmax(logits))

    def acceptance_length(self) -> float:
        """Of the last time it was timed. The row behind the requests' is one of padding."""
        return float((self.counts - self.old_counts)[:, 0, :-1].double().mean())


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    if not logits.is_cuda:
        return logits.argmax(dim=-1)
    from specbench.engine.kernels.sampling import best_ids

    return best_ids(logits)


def _config(shape: Shape, draft: str, rejection: str) -> EngineConfig:
    return EngineConfig(
        checkpoint="",
        dtype="float32",
        device=shape.device.type,
        max_model_len=256,
        max_num_seqs=shape.num_requests,
        max_num_batched_tokens=1024,
        block_size=16,
        num_blocks=None,
        num_speculative_tokens=shape.k,
        proposer="none",
        draft_sample_method=draft,
        rejection_sample_method=rejection,
    )


def _request(row: int, params: dict) -> NewRequest:
    sampling = RequestSampling(SamplingParams(100, **params), row + 1, NUM_PROMPT, (), ())
    return NewRequest(row=row, token_ids=list(range(NUM_PROMPT)), num_computed_tokens=0, sampling=sampling)


def microseconds_of(function: Callable[[], object], is_recorded: bool) -> Callable[[], float]:
    """What times a function: calls of it, or replays of a graph of it for about 10 ms."""
    function()
    if not is_recorded:
        return lambda: _microseconds_called(function)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    repeats = max(2, min(50, int(1e4 / _microseconds_replayed(graph, 2))))
    return lambda: _microseconds_replayed(graph, repeats)


def _microseconds_called(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return 1e6 * (time.perf_counter() - start)


def _microseconds_replayed(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / repeats


@dataclass(frozen=True)
class Cost:
    """Medians of rounds in which everything is timed in turn."""

    verify_us: float
    argmax_us: float
    greedy_us: float
    of_argmax: float
    of_greedy: float


@torch.inference_mode()
def measure(step: VerifyStep, rounds: int) -> Cost:
    functions = (step.reset, step.argmax, step.verify_greedily, step.verify)
    timers = [microseconds_of(function, step.is_recorded) for function in functions]
    taken = []
    for _ in range(rounds):
        reset, *costs = (timer() for timer in timers)
        argmax, greedy, verify = ((cost - reset) / step.times for cost in costs)
        taken.append((verify, argmax, greedy, verify / argmax, verify / greedy))
    return Cost(*(statistics.median(column) for column in zip(*taken, strict=True)))


def missed(asked: str, cost: Cost, is_on_gpu: bool) -> str:
    """Which goal a line does not reach; nothing where it does."""
    if not is_on_gpu:
        is_slow = asked == "greedy" and cost.of_argmax > MAX_OF_ARGMAX_ON_CPU
        return f"more than {MAX_OF_ARGMAX_ON_CPU:g} x argmax" if is_slow else ""
    if not asked and cost.of_greedy > MAX_OF_GREEDY:
        return f"more than {MAX_OF_GREEDY:g} x greedy"
    if asked.startswith("top_p") and cost.of_argmax > MAX_OF_ARGMAX:
        return f"more than {MAX_OF_ARGMAX:g} x argmax"
    return ""


def measure_shape(shape: Shape, rounds: int) -> int:
    """Print a line for everything that is asked of a shape; how many of them miss their goal."""
    is_on_gpu = shape.device.type == "cuda"
    num_missed = 0
    for law, spread in SPREADS.items():
        logits = shape.logits(spread)
        laws = shape.draft_laws(logits)
        lines = [(asked, method, {"temperature": 1.0} | SAMPLED[asked]) for asked in SAMPLED for method in METHODS]
        if not is_on_gpu:
            lines = [(asked, "matched", {"temperature": 0.0} | GREEDY[asked]) for asked in GREEDY] + lines
        for asked, method, params in lines:
            step = VerifyStep(shape, logits, laws, method, params, times=TIMES_A_GRAPH if is_on_gpu else 1)
            cost = measure(step, rounds)
            reason = missed(asked, cost, is_on_gpu)
            num_missed += bool(reason)
            print(
                f"{shape.num_requests:>3}{shape.k:>3} {law:<7}{method:<9}{asked:<19}{cost.verify_us:>11.1f}"
                f"{cost.argmax_us:>10.1f}{cost.greedy_us:>10.1f}{cost.of_argmax:>10.2f}{cost.of_greedy:>10.2f}"
                f"{step.acceptance_length():>8.2f}  {reason}",
                flush=True,
            )
    return num_missed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batches", type=int, nargs="+", help="by default 1, 16 and 64 on a GPU, 8 on a CPU")
    parser.add_argument("--drafts", type=int, nargs="+", help="by default 4 and 8 on a GPU, 8 on a CPU")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device: nothing is measured")
        return 2
    is_on_gpu = options.device == "cuda"
    batches = options.batches or ([1, 16, 64] if is_on_gpu else [8])
    drafts = options.drafts or ([4, 8] if is_on_gpu else [8])
    print(
        f"{'B':>3}{'k':>3} {'law':<7}{'method':<9}{'asked':<19}{'us':>11}{'argmax':>10}{'greedy':>10}"
        f"{'x argmax':>10}{'x greedy':>10}{'length':>8}"
    )
    num_missed = 0
    for num_requests in batches:
        for k in drafts:
            shape = Shape(num_requests, k, options.vocab, torch.device(options.device))
            num_missed += measure_shape(shape, options.rounds)
    print(f"{num_missed} lines miss their goal")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
