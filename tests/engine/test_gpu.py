"""The same engine on a CUDA device, with each attention backend, with graphs and without: same tokens as on the CPU in
fp32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specbench.engine.replay import check_output
from specbench.generate import GenerateRequest, SamplingParams
from specbench.model_choice import PACKAGED_CHECKPOINT
from tests.engine.devices import gpu_settings
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=8)


SETTINGS = pytest.mark.parametrize(
    "settings",
    [fields | {"cuda_graphs": has_graphs} for fields in gpu_settings() for has_graphs in (False, True)],
    ids=lambda fields: f"{fields['attention_backend']}-{'graphs' if fields['cuda_graphs'] else 'eager'}",
)


@SETTINGS
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_fp32_output_equals_the_cpus(folder: Path, temperature: float, settings: dict):
    requests = [
        token_request(f"r{i}", prompt, 24, temperature=temperature, seed=5)
        for i, prompt in enumerate(ragged_prompts(8, seed=0))
    ]
    expected = outputs(make_engine(folder), requests)
    for k, depth in [(0, 0), (1, 0), (8, 0), (8, 1)]:
        engine = make_engine(folder, k, **settings, max_num_batched_tokens=16, pipeline_depth=depth)
        assert outputs(engine, requests) == expected


@SETTINGS
def test_bfloat16_output_differs_from_plain_decoding_at_near_ties_only(folder: Path, settings: dict):
    requests = [token_request(f"r{i}", prompt, 24) for i, prompt in enumerate(ragged_prompts(8, seed=0))]
    engine = make_engine(folder, 8, dtype="bfloat16", max_num_batched_tokens=48, **settings)
    results = list(run(engine, requests).values())
    check = check_output(engine, results, limit=8)
    assert check.status in ("identical", "near_ties"), check


def packaged_requests() -> list[GenerateRequest]:
    lines = (PACKAGED_CHECKPOINT.parent / "nano_problems" / "test.jsonl").read_text().splitlines()[:6]
    questions = [json.loads(line)["question"] for line in lines]
    return [
        GenerateRequest(f"r{i}", f"r{i}", SamplingParams(48), prompt=question) for i, question in enumerate(questions)
    ]


@SETTINGS
def test_fp32_text_of_the_packaged_model_equals_the_cpus(settings: dict):
    requests = packaged_requests()
    expected = outputs(make_engine(PACKAGED_CHECKPOINT, max_model_len=512), requests)
    for k, depth in ((0, 1), (8, 0), (8, 1)):
        sizes = {"max_model_len": 512, "block_size": 16, "max_num_batched_tokens": 64}
        engine = make_engine(PACKAGED_CHECKPOINT, k, pipeline_depth=depth, **sizes, **settings)
        assert outputs(engine, requests) == expected


@SETTINGS
def test_bfloat16_text_of_the_packaged_model_differs_from_plain_decoding_at_near_ties_only(settings: dict):
    sizes = {"max_model_len": 512, "block_size": 16, "max_num_batched_tokens": 64, "pipeline_depth": 1}
    engine = make_engine(PACKAGED_CHECKPOINT, 8, dtype="bfloat16", **sizes, **settings)
    check = check_output(engine, list(run(engine, packaged_requests()).values()), limit=6)
    assert check.status in ("identical", "near_ties"), check
