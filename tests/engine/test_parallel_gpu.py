"""Two GPUs say what one says, in fp32, with graphs: collectives are recorded with the rest of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.engine.engines import Engines
from specbench.engine.shard import Shard
from tests.engine.checkpoints.quantised_decoders import build_quantised_qwen3
from tests.engine.harness import engine_config, make_engine, run, token_request
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SETTINGS: dict[str, Any] = {"device": "cuda", "attention_backend": "triton", "pipeline_depth": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=3)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    started = Engines()
    yield started
    started.close()


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(("proposer", "k"), [("none", 0), ("mtp_multi", 3), ("mtp_single", 2), ("ngram", 3)])
def test_fp32_output_on_two_equals_that_on_one(
    folder: Path, engines: Engines, proposer: str, k: int, has_graphs: bool
) -> None:
    fields = SETTINGS | {"proposer": proposer, "cuda_graphs": has_graphs, "ngram_min": 1}
    check_same(folder, engines, k, fields, Shard(0, 2))


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["inkling", "moe"])
def test_whole_experts(folder: Path, engines: Engines, tmp_path: Path, family: str, has_graphs: bool) -> None:
    checkpoint = folder if family == "inkling" else build_tiny_decoder(tmp_path, "moe")
    fields = SETTINGS | {"cuda_graphs": has_graphs}
    check_same(checkpoint, engines, 3 if family == "inkling" else 0, fields, Shard(0, 2, whole_experts=True))


@pytest.mark.parametrize("quantisation", ["fp8", "nvfp4"])
def test_codes_that_stay(engines: Engines, tmp_path: Path, quantisation: str) -> None:
    checkpoint = build_quantised_qwen3(tmp_path, quantisation)
    check_same(checkpoint, engines, 0, SETTINGS | {"quantised_weights": "keep", "cuda_graphs": True}, Shard(0, 2))


def check_same(folder: Path, engines: Engines, k: int, fields: dict[str, Any], shard: Shard) -> None:
    requests = [
        token_request(f"r{index}", prompt, 24, temperature=index % 2, seed=5)
        for index, prompt in enumerate(ragged_prompts(6, seed=0))
    ]
    alone = run(make_engine(folder, k, **fields), requests)
    config = engine_config(folder, k, shard=shard, **fields)
    engine = engines.start(config, time.perf_counter, lambda message: None)
    together = run(engine, requests)
    engine.close()  # type: ignore[attr-defined]
    assert {name: result.output_token_ids for name, result in together.items()} == {
        name: result.output_token_ids for name, result in alone.items()
    }
