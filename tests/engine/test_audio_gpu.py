"""Audio on a CUDA device, with graphs and without: the CPU's text in fp32, and the oracle's rows in every module."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specbench.engine.replay import check_output
from specbench.generate import GenerateRequest
from tests.engine.content.prompts import AUDIO_TOKENS, audio_request, bins, draw, take_clips_for_bins
from tests.engine.devices import gpu_settings
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.tiny_inkling import build_tiny_inkling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS = pytest.mark.parametrize(
    "settings",
    [fields | {"cuda_graphs": has_graphs} for fields in gpu_settings() for has_graphs in (False, True)],
    ids=lambda fields: f"{fields['attention_backend']}-{'graphs' if fields['cuda_graphs'] else 'eager'}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=8, has_towers=True)


@pytest.fixture(autouse=True)
def clips_are_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and features are the CPU's business: what the tower takes is given."""
    take_clips_for_bins(monkeypatch)


def requests() -> list[GenerateRequest]:
    """Clips at the start, in the middle and at the end of prompts, and text alone."""
    rng = random.Random(0)
    found = [token_request("text", draw(99, 11), 24)]
    for index in range(7):
        before, after = draw(2 * index, 5 * (index % 2)), draw(2 * index + 1, 4 * (index % 3))
        prompt = [*before, AUDIO_TOKENS.marker_id, *after]
        found.append(audio_request(f"r{index}", prompt, [bins(index, rng.randint(1, 30))], 24))
    return found


@SETTINGS
def test_fp32_output_equals_the_cpus(folder: Path, settings: dict) -> None:
    expected = outputs(make_engine(folder), requests())
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    for k, depth in [(0, 0), (8, 0), (8, 1)]:
        engine = make_engine(folder, k, **settings, max_num_batched_tokens=24, pipeline_depth=depth)
        assert outputs(engine, requests()) == expected


@SETTINGS
def test_drafts_are_accepted_as_on_the_cpu(folder: Path, settings: dict) -> None:
    """A lookahead that did not hear would change what is accepted, and no text."""
    fields = {"max_num_batched_tokens": 24, "pipeline_depth": 0}
    on_cpu, on_gpu = (run(make_engine(folder, 8, **chosen), requests()) for chosen in (fields, fields | settings))
    for name, result in on_gpu.items():
        assert [step.num_accepted for step in result.verify_steps] == [
            step.num_accepted for step in on_cpu[name].verify_steps
        ]


@SETTINGS
def test_bfloat16_output_differs_from_plain_decoding_at_near_ties_only(folder: Path, settings: dict) -> None:
    engine = make_engine(folder, 8, dtype="bfloat16", **settings)
    check = check_output(engine, list(run(engine, requests()).values()), limit=8)
    assert check.status in ("identical", "near_ties"), check
