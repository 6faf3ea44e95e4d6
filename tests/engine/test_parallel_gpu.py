"""Two GPUs say what one says, in fp32, with both kinds of sums, with graphs and without: what ranks exchange is
recorded with the rest of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.engine.engines import Engines
from specbench.engine.execution.cuda_graphs import Recording
from specbench.engine.execution.peer_memory import PeerMemory
from specbench.engine.layers.metadata import HostRows
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.parallel_engine import ParallelEngine
from specbench.engine.shard import Shard
from specbench.generate import GenerateRequest
from tests.engine.checkpoints.quantised_decoders import build_quantised_qwen3
from tests.engine.harness import engine_config, make_engine, outputs, token_request
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
SETTINGS: dict[str, Any] = {"device": "cuda", "attention_backend": "triton", "pipeline_depth": 1, "ngram_min": 1}
CASES = [("inkling", "mtp_multi", 3), ("inkling", "mtp_single", 2), ("decoder", "none", 0), ("decoder", "ngram", 3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("tiny")
    return {
        "inkling": build_tiny_inkling(parent / "inkling", num_modules=3),
        "decoder": build_tiny_decoder(parent / "decoder", "qwen3 tied and biased"),
    }


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    started = Engines()
    yield started
    started.close()


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, str, int], dict[str, list[int]]]:
    """What one GPU says, by case."""
    return {}


def requests() -> list[GenerateRequest]:
    return [
        token_request(f"r{index}", prompt, 24, temperature=index % 2, seed=5)
        for index, prompt in enumerate(ragged_prompts(6, seed=0))
    ]


def start(engines: Engines, folder: Path, k: int, **fields: Any) -> ParallelEngine:
    config = engine_config(folder, k, shard=Shard(0, 2), **(SETTINGS | fields))
    engine: LLMEngine = engines.start(config, time.perf_counter, lambda message: None)
    assert isinstance(engine, ParallelEngine)
    return engine


@pytest.mark.parametrize(("model", "proposer", "k"), CASES, ids=str)
@pytest.mark.parametrize(
    ("sums", "has_graphs"), [("one_shot", True), ("nccl", True), ("one_shot", False), ("nccl", False)], ids=str
)
def test_fp32_output_on_two_equals_that_on_one(
    folders: dict[str, Path],
    engines: Engines,
    alone: dict[tuple[str, str, int], dict[str, list[int]]],
    model: str,
    proposer: str,
    k: int,
    sums: str,
    has_graphs: bool,
) -> None:
    case = (model, proposer, k)
    if case not in alone:
        alone[case] = outputs(make_engine(folders[model], k, **(SETTINGS | {"proposer": proposer})), requests())
    engine = start(engines, folders[model], k, proposer=proposer, cuda_graphs=has_graphs, rank_all_reduce=sums)
    together = outputs(engine, requests())
    has_memory = isinstance(engine._groups.peer_memory, PeerMemory)
    engine.close()
    assert together == alone[case]
    assert has_memory == (sums == "one_shot")


@pytest.mark.parametrize("has_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["inkling", "moe"])
def test_whole_experts(
    folders: dict[str, Path], engines: Engines, tmp_path: Path, family: str, has_graphs: bool
) -> None:
    checkpoint = folders["inkling"] if family == "inkling" else build_tiny_decoder(tmp_path, "moe")
    fields = SETTINGS | {"cuda_graphs": has_graphs}
    check_same(checkpoint, engines, 3 if family == "inkling" else 0, fields, Shard(0, 2, whole_experts=True))


@pytest.mark.parametrize("quantisation", ["fp8", "nvfp4"])
def test_codes_that_stay(engines: Engines, tmp_path: Path, quantisation: str) -> None:
    checkpoint = build_quantised_qwen3(tmp_path, quantisation)
    check_same(checkpoint, engines, 0, SETTINGS | {"quantised_weights": "keep", "cuda_graphs": True}, Shard(0, 2))


def check_same(folder: Path, engines: Engines, k: int, fields: dict[str, Any], shard: Shard) -> None:
    alone = outputs(make_engine(folder, k, **fields), requests())
    config = engine_config(folder, k, shard=shard, **fields)
    engine = engines.start(config, time.perf_counter, lambda message: None)
    together = outputs(engine, requests())
    engine.close()  # type: ignore[attr-defined]
    assert together == alone


def test_every_step_of_decoding_is_replayed(
    folders: dict[str, Path], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Recording[Any]] = []
    plain = Recording.replay

    def replay(recording: Recording[Any], rows: HostRows) -> Any:
        assert recording._graph is not None
        replayed.append(recording)
        return plain(recording, rows)

    monkeypatch.setattr(Recording, "replay", replay)
    engine = start(engines, folders["inkling"], 3, cuda_graphs=True)
    steps = 0
    for request in requests():
        engine.add_request(request, arrival_s=0.0)
    while engine.has_requests:
        _, step = engine.step()
        steps += step is not None and not step.num_prefill_tokens
    engine.close()
    assert steps > 5
    # Forward, verification and drafts; of steps with prompts the forward alone.
    assert len(replayed) >= 3 * steps
