"""Steps recorded once for each shape, and replayed: of decoding, and with few rows of prompts beside it.

Belongs here: which shapes there are, their buffers, recording and replaying. Does not belong here: what a part of a
step computes (stages.py), which parts of a step are replayed (model_runner.py).

A recorded step has a fixed number of requests with a fixed number of rows each. What is smaller is padded: a request of
padding has the scratch row of RequestState and no row that counts, a request with fewer drafts has dead rows. Neither
writes anything that is read. The host hands over which persistent rows run and how many rows of each count, and the
features of audio and images; everything else is computed on the device. On a CPU the same functions run on the same
buffers, called again instead of replayed.

What is left to run as it comes: steps of more rows than `token_sizes` names, whose kernels keep a device busy for
longer than the host takes to launch them, but for small models; verification where a request asks for penalties, token
rules or log-probabilities; drafting by a proposer that asks the host.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic, TypeVar

import numpy as np
import torch

from specbench.engine.config import EngineConfig
from specbench.engine.execution.features import FeatureBuffers
from specbench.engine.execution.input_batch import InputBatch, MixedInputs, padded_indices
from specbench.engine.execution.stages import Forwarded, StepStages, Verification
from specbench.engine.execution.step_results import StepResults
from specbench.engine.layers.attention_backends.backend import AttentionBackend
from specbench.engine.layers.features import StepFeatures
from specbench.engine.layers.metadata import HostRows
from specbench.engine.layers.to_device import copy_in
from specbench.engine.proposers.proposer import Proposer
from specbench.engine.scheduling.step import DECODE, FINAL_CHUNK, PARTIAL_CHUNK, SchedulerOutput

T = TypeVar("T")

#: Numbers of requests are powers of two up to the first of these, then multiples of it, and so on.
_STEPS = (8, 16, 32)
_FEW, _MANY = 64, 256
#: Numbers of rows of steps with chunks of prompts.
_TOKENS = (64, 128, 256, 384, 512)


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of requests that steps are padded to, ascending."""
    sizes = [1, 2, 4]
    sizes += range(8, _FEW, _STEPS[0])
    sizes += range(_FEW, _MANY, _STEPS[1])
    sizes += range(_MANY, max_num_seqs, _STEPS[2])
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def token_sizes(max_num_tokens: int) -> list[int]:
    """Numbers of rows that steps with chunks of prompts are padded to, ascending. Up to about a hundred rows cost what
    one does, the reading of the weights; steps of many more keep a device busy for longer than the host takes to launch
    them."""
    most = min(max_num_tokens, _TOKENS[-1])
    return [size for size in _TOKENS if size < most] + [most]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The most that a step can be."""

    max_num_seqs: int
    max_num_tokens: int
    max_seq_len: int
    #: Tokens beyond its own position that a drafter's row reads.
    num_lookahead: int
    #: Rows of a drafting pass behind a verification; 0: the verification's.
    num_draft_rows: int
    #: Rows that such a pass has more than the target behind the last chunk of a prompt.
    num_rows_behind_chunk: int

    @classmethod
    def of(cls, config: EngineConfig, proposer: Proposer | None) -> StepLimits:
        needs = None if proposer is None else proposer.requirements()
        return cls(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_model_len,
            num_lookahead=0 if needs is None else needs.num_prompt_lookahead,
            num_draft_rows=0 if needs is None else needs.num_draft_rows,
            num_rows_behind_chunk=0 if needs is None else needs.num_rows_behind_chunk,
        )

    def draft_rows(self, output: SchedulerOutput) -> list[int]:
        """Rows of each request in drafting's first pass, which is its widest."""
        behind = {DECODE: 0, FINAL_CHUNK: self.num_rows_behind_chunk, PARTIAL_CHUNK: 0}
        counts = zip(output.num_tokens, output.modes, strict=True)
        return [
            self.num_draft_rows if mode == DECODE and self.num_draft_rows else count + behind[mode]
            for count, mode in counts
        ]

    def most_requests(self, num_rows: int) -> int:
        """Requests with so many rows each."""
        return min(self.max_num_seqs, max(self.max_num_tokens // num_rows, 1))

    @property
    def num_decode_features(self) -> int:
        """Placeholders at the end of a prompt that drafting behind a verification reads again."""
        return max(0, self.num_lookahead - 2)

    @property
    def num_features(self) -> int:
        """Placeholders that the rows of a recorded step read."""
        return token_sizes(self.max_num_tokens)[-1] + self.num_lookahead * self.max_num_seqs


class Recording(Generic[T]):
    """One function of buffers, recorded. `outputs` are those of the last call."""

    def __init__(self, function: Callable[[], T], recorder: Recorder):
        self._function = function
        self._plans = recorder.attention.replay_plans(recorder.max_seq_len)
        # Once as it stands: kernels are compiled, and what is made once is made.
        self.outputs = self._call()
        self._graph: torch.cuda.CUDAGraph | None = None
        if recorder.stream is not None:
            self._graph, self.outputs = recorder.record(self._call)

    def _call(self) -> T:
        with nullcontext() if self._plans is None else self._plans.calls():
            return self._function()

    def replay(self, rows: HostRows) -> T:
        """rows: of the requests that run; what follows from them is planned before."""
        if self._plans is not None:
            self._plans.make(rows)
        if self._graph is None:
            self.outputs = self._call()
        else:
            self._graph.replay()
        return self.outputs


class Recorder:
    """What recordings share: the memory of their intermediate results, since no two run at the same time."""

    def __init__(self, device: torch.device, attention: AttentionBackend, max_seq_len: int):
        self.attention = attention
        #: Upper bound of all lengths that recorded functions are told.
        self.max_seq_len = max_seq_len
        is_cuda = device.type == "cuda"
        #: None on a CPU, where nothing is recorded.
        self.stream = _recording_stream(device) if is_cuda else None
        self._pool = torch.cuda.graph_pool_handle() if is_cuda else None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def pool_bytes(self) -> tuple[int, int]:
        """What the graphs' memory takes, and what of it is in use between replays."""
        segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == self._pool]
        return sum(one["total_size"] for one in segments), sum(one["allocated_size"] for one in segments)

    def record(self, function: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of what the function does, and its outputs, which every replay fills anew."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # What a collection would free in the middle belongs to no graph.
        gc.disable()
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    outputs = function()
                finally:
                    graph.capture_end()
        finally:
            gc.enable()
        torch.cuda.synchronize()
        self._graphs.append(graph)
        return graph, outputs

    def release(self) -> None:
        """Destroy the graphs: nothing is replayed any more. NCCL waits for that when it lets go of a group."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recorders: libraries keep a workspace for every stream."""
    return torch.cuda.Stream(device)


class CapturedStep:
    """The parts of steps of `num_requests` requests with `num_rows` rows each.

    A verification's rows are behind the prompt, so that the target reads no features of audio or images; drafting may,
    behind a prompt that ends in them. features: what it reads then; None where that is not recorded.
    """

    def __init__(
        self,
        stages: StepStages,
        recorder: Recorder,
        num_requests: int,
        num_rows: int,
        max_seq_len: int,
        features: StepFeatures | None,
    ):
        self.num_requests = num_requests
        self.num_rows = num_rows
        self._stages = stages
        self._k = stages.k
        self._max_seq_lens_np = (max_seq_len,) * num_requests
        device = stages.model.device
        # [2, num_requests] int64: persistent rows, and how many rows of each count; the same on the host
        self._inputs_np = np.zeros((2, num_requests), dtype=np.int64)
        self._inputs_np[0] = stages.state.scratch_row
        self._inputs = torch.tensor(self._inputs_np, device=device)
        self._starts_np = tuple(range(0, num_requests * num_rows + 1, num_rows))
        # of the requests that run, rows that do not count included
        self._rows = HostRows(self._starts_np, ())
        #: The last step's, requests of padding included.
        self.results = StepResults.empty(stages.k, num_requests, device)
        self._forward = Recording(self._run_forward, recorder)
        self._verify = {each: Recording(partial(self._run_verify, each), recorder) for each in Verification}
        self.reads_features = features is not None
        # whether drafts are drawn, whether any row reads features -> recording
        self._draft = {
            (is_drawn, of is not None): Recording(partial(self._run_draft, is_drawn, of), recorder)
            for is_drawn in ways_to_draft(stages, is_mixed=False)
            for of in ([None] if features is None else [None, features])
        }

    def _run_forward(self) -> Forwarded:
        indices = padded_indices(self._inputs, (), self.num_rows, self._k)
        return self._stages.forward(InputBatch.of(indices, self._stages.state, self._max_seq_lens_np))

    def _run_verify(self, verification: Verification) -> None:
        self._stages.verify_as(verification, self._forward.outputs, self.results)

    def _run_draft(self, is_sampled: bool, features: StepFeatures | None) -> None:
        self._stages.draft(self._forward.outputs, self.results, is_sampled=is_sampled, features=features)

    # ---- A step, in the order of its parts

    def set(self, output: SchedulerOutput) -> None:
        """Hand over which requests run."""
        inputs_np = np.zeros_like(self._inputs_np)
        inputs_np[0] = self._stages.state.scratch_row
        inputs_np[0, : output.num_requests] = output.rows
        inputs_np[1, : output.num_requests] = output.num_tokens
        if not np.array_equal(inputs_np, self._inputs_np):
            self._inputs_np = inputs_np
            copy_in(self._inputs, inputs_np)
        lengths = zip(output.max_seq_lens, output.num_tokens, strict=True)
        self._rows = HostRows(self._starts_np, [bound + self.num_rows - count for bound, count in lengths])

    def forward(self) -> None:
        self._forward.replay(self._rows)

    def verify(self, verification: Verification) -> None:
        self._verify[verification].replay(self._rows)

    def clear_padding(self, num_requests: int) -> None:
        """Of the results of a verification that filled the first columns only."""
        self.results.packed[:, num_requests:].zero_()

    @property
    def can_draft(self) -> bool:
        """Whether drafting is recorded."""
        return bool(self._draft)

    def draft(self, is_drawn: bool, has_features: bool) -> None:
        self._draft[is_drawn, has_features].replay(self._rows)

    def real_requests(self, output: SchedulerOutput) -> Forwarded:
        """What the target made of the requests that are no padding."""
        forwarded, n = self._forward.outputs, output.num_requests
        batch = forwarded.batch
        indices = padded_indices(self._inputs[:, :n], output.rows, self.num_rows, self._k)
        real = InputBatch(indices, batch.counts[:, :n], batch.block_tables[:, :n], self._max_seq_lens_np[:n])
        return Forwarded.of_rows(real, forwarded.positions, forwarded.hidden)


class CapturedMixed:
    """The parts of steps of any kind, chunks of prompts among them, in which neither forward nor drafting has more than
    `num_tokens` rows.

    What decides their shapes is that number alone: which request has how many rows, the device finds out.
    """

    def __init__(
        self,
        stages: StepStages,
        recorder: Recorder,
        num_tokens: int,
        limits: StepLimits,
        features: StepFeatures | None,
    ) -> None:
        self.num_tokens = num_tokens
        self._limits = limits
        self._stages = stages
        device, num_requests = stages.model.device, limits.max_num_seqs + 1
        self._inputs = MixedInputs(torch.zeros(4, num_requests, dtype=torch.int64, device=device))
        self._inputs.rows.fill_(stages.state.scratch_row)
        # of the requests that run
        self._rows = HostRows((), ())
        #: The last step's, requests of padding included.
        self.results = StepResults.empty(stages.k, num_requests, device)
        ways = [None] if features is None else [None, features]
        forward = partial(stages.forward_mixed, self._inputs, num_tokens, limits.max_seq_len)
        # whether any row reads features of audio or images -> recordings; the same of the last step
        self._forward = {of is not None: Recording(partial(forward, of), recorder) for of in ways}
        self._has_features = False
        # what is sampled, whether any row reads features -> recording
        self._verify = {
            (each, has_features): Recording(partial(self._run_verify, each, has_features), recorder)
            for each in Verification
            for has_features in self._forward
        }
        # whether drafts are drawn, whether any row reads features -> recording
        self._draft = {
            (is_drawn, of is not None): Recording(partial(self._run_draft, is_drawn, of), recorder)
            for is_drawn in ways_to_draft(stages, is_mixed=True)
            for of in ways
            if of is None or stages.proposer is None or not stages.proposer.encodes_content
        }

    def _run_verify(self, verification: Verification, has_features: bool) -> None:
        self._stages.verify_as(verification, self._forward[has_features].outputs.forwarded, self.results)

    def _run_draft(self, is_sampled: bool, features: StepFeatures | None) -> None:
        mixed = self._forward[features is not None].outputs
        self._stages.draft_mixed(mixed, self.results, is_sampled=is_sampled, features=features)

    # ---- A step, in the order of its parts

    def set(self, output: SchedulerOutput) -> None:
        """Hand over which requests run."""
        inputs_np, n = np.zeros(self._inputs.packed.shape, dtype=np.int64), output.num_requests
        inputs_np[0] = self._stages.state.scratch_row
        modes_np = np.asarray(output.modes)
        inputs_np[:, :n] = output.rows, output.num_tokens, modes_np != DECODE, modes_np != PARTIAL_CHUNK
        copy_in(self._inputs.packed, inputs_np)
        self._rows = self._host_rows(output.num_tokens, output.max_seq_lens)
        self._has_features = bool(output.content)

    def _host_rows(self, num_rows_np: Sequence[int], max_seq_lens_np: Sequence[int]) -> HostRows:
        """Of a pass with so many rows of each request; those that are left over are the last request's."""
        starts_np = np.full(self._inputs.packed.shape[1] + 1, sum(num_rows_np))
        starts_np[: len(num_rows_np) + 1] = np.concatenate([[0], np.cumsum(num_rows_np)])
        starts_np[-1] = self.num_tokens
        return HostRows(starts_np.tolist(), max_seq_lens_np)

    def forward(self) -> None:
        self._forward[self._has_features].replay(self._rows)

    def verify(self, verification: Verification) -> None:
        self._verify[verification, self._has_features].replay(self._rows)

    def clear_padding(self, num_requests: int) -> None:
        """Of the results of a verification that filled the first columns only."""
        self.results.packed[:, num_requests:].zero_()

    def can_draft(self, output: SchedulerOutput) -> bool:
        """Whether drafting behind this step is recorded."""
        is_held = sum(self._limits.draft_rows(output)) <= self.num_tokens
        return is_held and any(has_features == bool(output.content) for _, has_features in self._draft)

    def draft(self, output: SchedulerOutput, is_drawn: bool) -> None:
        num_rows_np = self._limits.draft_rows(output)
        # Rows that drafting adds lie before the target's or, dead, behind them.
        bounds = zip(output.max_seq_lens, num_rows_np, output.num_tokens, strict=True)
        rows = self._host_rows(num_rows_np, [bound + max(0, own - count) for bound, own, count in bounds])
        self._draft[is_drawn, self._has_features].replay(rows)

    def real_requests(self, batch: InputBatch) -> Forwarded:
        """What the target made of the requests that are no padding."""
        forwarded = self._forward[self._has_features].outputs.forwarded
        return Forwarded.of_rows(batch, forwarded.positions, forwarded.hidden)


def ways_to_draft(stages: StepStages, is_mixed: bool) -> tuple[bool, ...]:
    """Whether drafts are drawn, in each way of drafting that can be recorded."""
    proposer = stages.proposer
    if proposer is None or not (proposer.is_capturable_mixed if is_mixed else proposer.is_capturable):
        return ()
    return (False,) if stages.draft_probabilities is None else (False, True)


class CapturedSteps:
    """The shapes that are recorded."""

    def __init__(self) -> None:
        # ascending by their number of tokens
        self._mixed: list[CapturedMixed] = []
        # rows of each request -> shapes, ascending by their number of requests
        self._shapes: dict[int, list[CapturedStep]] = {}

    def capture(
        self,
        stages: StepStages,
        limits: StepLimits,
        feature_buffers: FeatureBuffers | None,
        on_progress: Callable[[str], None],
        *,
        is_trial: bool = False,
    ) -> Recorder:
        """Record every shape, the largest first, so that the smaller ones find its memory. In a trial the largest of
        each kind alone."""
        recorder = Recorder(stages.model.device, stages.model.attention, limits.max_seq_len)
        features = None if feature_buffers is None else feature_buffers.of_first(limits.max_num_seqs + 1)
        mixed, shapes = recorded_shapes(stages, limits)
        for num_tokens in mixed[:1] if is_trial else mixed:
            on_progress(f"recording graphs: steps of {num_tokens} tokens")
            self._mixed.insert(0, CapturedMixed(stages, recorder, num_tokens, limits, features))
        if is_trial:
            shapes = [(rows, size) for rows, size in shapes if size == limits.most_requests(rows)]
        for done, (num_rows, size) in enumerate(shapes):
            on_progress(f"recording graphs: {done} of {len(shapes)} shapes")
            reads_features = limits.num_decode_features > 0 and _reads_features(size, num_rows, stages.k, limits)
            of = feature_buffers.of_first(size) if feature_buffers is not None and reads_features else None
            captured = CapturedStep(stages, recorder, size, num_rows, limits.max_seq_len, of)
            self._shapes.setdefault(num_rows, []).insert(0, captured)
        num_bytes = 0 if recorder.stream is None else recorder.pool_bytes[0]
        on_progress(f"graphs of {len(self._mixed)} + {len(shapes)} shapes take {num_bytes / 2**20:,.0f} MiB")
        return recorder

    @property
    def num_shapes(self) -> int:
        return len(self._mixed) + sum(map(len, self._shapes.values()))

    def find(self, output: SchedulerOutput) -> CapturedStep | None:
        """The smallest shape that holds a step of verifications; None for any other step."""
        if any(mode != DECODE for mode in output.modes):
            return None
        most_rows, has_features = max(output.num_tokens), bool(output.content)
        for num_rows in sorted(self._shapes):
            for one in self._shapes[num_rows]:
                is_wide_enough = most_rows <= num_rows and output.num_requests <= one.num_requests
                if is_wide_enough and (one.reads_features or not has_features):
                    return one
        return None

    def find_mixed(self, output: SchedulerOutput) -> CapturedMixed | None:
        """The smallest that holds any other step, drafting included if one does; None where the step is too large."""
        fitting = [one for one in self._mixed if output.total_tokens <= one.num_tokens]
        return next((one for one in fitting if one.can_draft(output)), fitting[0] if fitting else None)


def recorded_shapes(stages: StepStages, limits: StepLimits) -> tuple[list[int], list[tuple[int, int]]]:
    """Rows of steps of any kind, and (rows of each request, requests) of verifications; of each kind the largest
    first."""
    needs_lengths = stages.model.attention.needs_segments
    mixed = [] if needs_lengths else token_sizes(limits.max_num_tokens)[::-1]
    return mixed, [
        (rows, size)
        for rows in sorted({1, stages.k + 1}, reverse=True)
        for size in reversed(capture_sizes(limits.most_requests(rows)))
    ]


def _reads_features(size: int, num_rows: int, k: int, limits: StepLimits) -> bool:
    """Whether drafting with features is recorded at this shape: it is rare, and others are padded to those that are."""
    is_one_of_few = size & (size - 1) == 0 or size == limits.most_requests(num_rows)
    return num_rows == k + 1 and is_one_of_few
