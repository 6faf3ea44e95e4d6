"""Recorded steps whose rows read features of audio in place of token ids: chunks of prompts, and drafting right behind
a clip.

On a CPU the recorded functions are called again on the buffers that a graph would use, as in test_captured_steps.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.execution.cuda_graphs import CapturedMixed, CapturedStep
from specbench.engine.kernels.paged_attention import paged_attention_reference
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.scheduling.step import DECODE, SchedulerOutput
from specbench.generate import GenerateRequest
from tests.engine.cache_entries import EntryChecker
from tests.engine.content.prompts import AUDIO_TOKENS, audio_request, bins, draw, take_clips_for_bins, tell
from tests.engine.devices import DEVICES, ON_GPU
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.tiny_inkling import build_tiny_inkling

N = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=N, has_towers=True)


@pytest.fixture(autouse=True)
def clips_are_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    take_clips_for_bins(monkeypatch)


def around(num_before: int, num_tokens: int, num_after: int, seed: int, max_output_tokens: int = 24) -> GenerateRequest:
    """A clip with so many tokens before and behind it."""
    prompt = [*draw(2 * seed, num_before), AUDIO_TOKENS.marker_id, *draw(2 * seed + 1, num_after)]
    return audio_request(f"r{seed}", prompt, [bins(seed, num_tokens)], max_output_tokens)


class Replays:
    """Which steps with content were found among the recorded ones, by kind; and how many were not."""

    def __init__(self, engine: LLMEngine) -> None:
        self.steps: list[CapturedStep | CapturedMixed] = []
        self.num_eager = 0
        self._steps = engine.runner.captured_steps
        self._find, self._find_mixed = self._steps.find, self._steps.find_mixed
        self._steps.find, self._steps.find_mixed = self.find, self.find_mixed  # type: ignore[method-assign]

    def find(self, output: SchedulerOutput) -> CapturedStep | None:
        found = self._find(output)
        self._count(output, found, is_due=all(mode == DECODE for mode in output.modes))
        return found

    def find_mixed(self, output: SchedulerOutput) -> CapturedMixed | None:
        found = self._find_mixed(output)
        self._count(output, found, is_due=True)
        return found

    def _count(self, output: SchedulerOutput, found: CapturedStep | CapturedMixed | None, is_due: bool) -> None:
        if output.content and found is not None:
            self.steps.append(found)
        self.num_eager += is_due and found is None


@DEVICES
@pytest.mark.parametrize("depth", [0, 1])
def test_drafting_right_behind_a_clip_is_replayed(folder: Path, depth: int, device: dict) -> None:
    requests = [around(3 + seed, 5 + 3 * seed, num_after, seed) for seed, num_after in enumerate((0, 1, 5, 6, 7))]
    requests.append(token_request("text", draw(99, 9), 24))
    fields = {"max_num_seqs": 5, "max_num_batched_tokens": 54, "pipeline_depth": depth}
    eager = run(make_engine(folder, N, **fields), requests)
    engine = make_engine(folder, N, cuda_graphs=True, **fields, **device)
    replays = Replays(engine)
    results = run(engine, requests)
    for name, expected in outputs(make_engine(folder), requests).items():
        assert results[name].output_token_ids == expected
        accepted = [[step.num_accepted for step in one[name].verify_steps] for one in (eager, results)]
        assert accepted[0] == accepted[1]  # drafting that did not hear would change no text
    assert sum(isinstance(step, CapturedStep) for step in replays.steps) > 1


@DEVICES
@pytest.mark.parametrize("num_after", [0, 3, 5])
def test_every_entry_and_draft_behind_a_clip_equals_the_oracle(folder: Path, num_after: int, device: dict) -> None:
    """Behind every number of accepted drafts: coins decide, so that a graph can hold it."""
    rates = tuple((N - index) / (N + 3) for index in range(N))
    fields = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 30}
    num_checked = 0
    for seed in range(3):
        engine, oracle = make_engine(folder, N, cuda_graphs=True, **fields, **sizes, **device), Oracle(folder)
        checker, replays, request = EntryChecker(engine, oracle), Replays(engine), around(2, 9, num_after, seed, 30)
        tell(oracle, request)
        engine.add_request(request, 0.0)
        while engine.has_requests:
            engine.step()
            num_checked += checker.check_decoding_rows()
        assert any(isinstance(step, CapturedStep) for step in replays.steps)
    assert num_checked > 10


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("k", [0, N])
def test_chunks_with_clips_are_replayed(folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, k: int) -> None:
    if device == "cpu":
        place = "specbench.engine.layers.attention_backends.triton_backend.paged_attention"
        monkeypatch.setattr(place, paged_attention_reference)
    requests = [around(3, 7 + 4 * seed, seed, seed, 3) for seed in range(5)]
    requests.append(token_request("text", draw(99, 9), 3))
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "max_model_len": 48, "pipeline_depth": 1}
    engine = make_engine(folder, k, cuda_graphs=True, device=device, attention_backend="triton", **settings)
    replays = Replays(engine)
    results = run(engine, requests)
    for name, expected in run(make_engine(folder, k, **settings), requests).items():
        assert results[name].output_token_ids == expected.output_token_ids
        accepted = [[step.num_accepted for step in one.verify_steps] for one in (expected, results[name])]
        assert accepted[0] == accepted[1]  # drafting that did not hear would change no text
    assert sum(isinstance(step, CapturedMixed) for step in replays.steps) >= len(requests) - 1
    assert replays.num_eager == 0
