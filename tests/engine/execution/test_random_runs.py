"""Requests come, are aborted and preempted at random, for a long time: exact text, and nothing that grows.

The long form is many runs of other seeds and settings, so that they can run side by side (pytest -n) and add up.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from specbench.engine.execution.input_batch import step_indices
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposers import mtp_multi, row_indices
from specbench.generate import GenerateRequest, GenerateResult
from specbench.records import EngineStep
from tests.engine.content.prompts import AUDIO_TOKENS, audio_request, bins, draw, take_clips_for_bins
from tests.engine.devices import DEVICES
from tests.engine.execution.test_captured_steps import check_nothing_was_written_for_padding
from tests.engine.harness import make_engine, outputs, token_request
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

#: Output tokens of the longest request.
LONGEST = 40
#: Runs that the long form is made of, and steps of all of them together.
NUM_LONG_RUNS = 8
NUM_LONG_STEPS = int(os.environ.get("SPECBENCH_RANDOM_STEPS", 200_000))
#: When a run ends before its steps are done, in seconds since 1970.
END_S = float(os.environ.get("SPECBENCH_RANDOM_UNTIL", "inf"))
#: Steps between two looks at what is held, which take a quarter of a second.
PERIOD = 1000


@dataclass(frozen=True)
class World:
    """A tiny model, requests that run on it, and what plain decoding says to each."""

    folder: Path
    requests: Sequence[GenerateRequest]
    texts: dict[str, list[int]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Greedy requests, others at a temperature, and prompts with clips at their ends."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    folder = build_tiny_inkling(
        tmp_path_factory.mktemp("tiny"), num_modules=4, has_towers=True, num_hidden_layers=3, local_layer_ids=[0, 1]
    )
    requests = [
        token_request(f"{index}", prompt, LONGEST, seed=index, temperature=float(index % 3 == 2))
        for index, prompt in enumerate(ragged_prompts(12, seed=6))
    ]
    for index, num_after in enumerate((0, 2, 9), start=12):
        prompt = [*draw(index, 3), AUDIO_TOKENS.marker_id, *draw(index + 1, num_after)]
        requests.append(audio_request(f"{index}", prompt, [bins(index, 3 + 4 * num_after)], LONGEST))
    with pytest.MonkeyPatch.context() as patched:
        take_clips_for_bins(patched)
        return World(folder, requests, outputs(make_engine(folder), requests))


@pytest.fixture(autouse=True)
def clips_are_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    take_clips_for_bins(monkeypatch)


@DEVICES
@pytest.mark.parametrize("proposer", ["none", "mtp_multi", "ngram"])
def test_random_arrivals_and_aborts(world: World, proposer: str, device: dict) -> None:
    run_randomly(world, 200, seed=7, proposer=proposer, **device)


@DEVICES
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_LONG_RUNS))
def test_many_random_arrivals_and_aborts(world: World, seed: int, device: dict) -> None:
    """SPECBENCH_RANDOM_STEPS sets the number of steps of all runs together, SPECBENCH_RANDOM_UNTIL the time when they
    end, with every check of what was done; pytest -s shows how far each run is."""
    proposer = ("mtp_multi", "mtp_single")[seed % 4 == 3]
    run_randomly(
        world, NUM_LONG_STEPS // NUM_LONG_RUNS, seed, proposer=proposer, pipeline_depth=int(seed % 4 > 0), **device
    )


def run_randomly(world: World, num_steps: int, seed: int, proposer: str, **fields: object) -> None:
    settings = {"pipeline_depth": 1, "cuda_graphs": True, "prefix_caching": True}
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 96, "num_blocks": 36}
    k = 0 if proposer == "none" else 4
    engine = make_engine(world.folder, k, proposer=proposer, **(sizes | settings | fields))
    RandomRun(world, engine, random.Random(seed)).run(num_steps)


@dataclass
class RandomRun:
    """Whatever comes out is the plain text's beginning. Every so often all requests are let run out: then no block is
    held, neither the device's memory nor the host's objects are more than they were near the start, and a request that
    runs alone has the drafts accepted that it had then."""

    world: World
    engine: LLMEngine
    rng: random.Random
    num_added: int = 0
    num_aborted: int = 0
    num_preempted: int = 0
    #: Of the engine, those of requests that run out or run alone included.
    num_steps: int = 0
    #: request id -> the request that it repeats, output tokens asked for
    expected: dict[str, tuple[GenerateRequest, int]] = field(default_factory=dict)

    def run(self, num_steps: int) -> None:
        period, start_s = min(PERIOD, num_steps // 2), time.perf_counter()
        self.run_for(period)
        held_bytes, num_objects = self.held()
        accepted = self.accepted_alone()
        while self.num_steps < num_steps and time.time() < END_S:
            self.run_for(period)
            print(
                f"{self.num_steps} steps, {self.num_steps / (time.perf_counter() - start_s):.0f} a second; "
                f"{self.num_added} requests, {self.num_aborted} aborted, {self.num_preempted} preempted",
                flush=True,
            )
            bytes_now, objects_now = self.held()
            # Index tensors of shapes that had not come before are kept: a few numbers each.
            assert bytes_now <= held_bytes + (1 << 16)
            assert objects_now <= num_objects + 2_000
            assert self.accepted_alone() == accepted
        assert self.num_preempted > 0 and self.num_aborted > 0
        check_nothing_was_written_for_padding(self.engine)

    def run_for(self, num_steps: int) -> None:
        """So many steps, and those that are left to end what runs."""
        for _ in range(num_steps):
            self.step_at_random()
        while self.engine.has_requests:
            self.check(self.step()[0])
        assert not self.expected
        self.engine.reset_prefix_cache()
        assert self.engine.scheduler.kv_cache.num_blocks_used == 0

    def accepted_alone(self) -> list[tuple[int, int]]:
        """Drafted and accepted at each step of a few requests, one after the other."""
        steps: list[tuple[int, int]] = []
        for request in self.world.requests[::6]:
            self.add(request, LONGEST)
            while self.engine.has_requests:
                finished, _ = self.step()
                self.check(finished)
                steps += [(step.num_drafted, step.num_accepted) for one in finished for step in one.verify_steps]
            self.engine.reset_prefix_cache()
        return steps

    def held(self) -> tuple[int, int]:
        """Bytes on a GPU and objects on the host, without what is remembered of the newest few hundred shapes."""
        for remembered in (step_indices, mtp_multi._mixed_layout, row_indices._ragged_indices):
            remembered.cache_clear()
        gc.collect()
        is_cuda = self.engine.model.device.type == "cuda"
        return torch.cuda.memory_allocated() if is_cuda else 0, len(gc.get_objects())

    def step_at_random(self) -> None:
        if self.rng.random() < 0.3 and len(self.expected) < 12:
            self.add(self.rng.choice(self.world.requests), self.rng.randint(1, LONGEST))
        if self.expected and self.rng.random() < 0.02:
            result = self.engine.abort(self.rng.choice(list(self.expected)))
            self.check([result] if result is not None else [])
            self.num_aborted += 1
        if self.engine.has_requests:
            finished, step = self.step()
            self.check(finished)
            self.num_preempted += step.num_preempted if step else 0

    def step(self) -> tuple[list[GenerateResult], EngineStep | None]:
        finished, step = self.engine.step()
        self.num_steps += step is not None
        return finished, step

    def add(self, request: GenerateRequest, num_output: int) -> None:
        """The request again, under another id: its sample keeps its stream of random numbers."""
        name = f"again{self.num_added}"
        sampling = replace(request.sampling, max_output_tokens=num_output)
        self.engine.add_request(replace(request, request_id=name, sampling=sampling), 0.0)
        self.expected[name] = (request, num_output)
        self.num_added += 1

    def check(self, finished: Sequence[GenerateResult]) -> None:
        for result in finished:
            request, length = self.expected.pop(result.record.request_id)
            assert result.output_token_ids == self.world.texts[request.request_id][: len(result.output_token_ids)]
            assert result.record.finish_reason == "aborted" or result.record.num_output_tokens == length
