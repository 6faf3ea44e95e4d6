"""Two ranks on GPUs say what one says, in fp32, with both kinds of sums, with graphs and without: what ranks exchange
is recorded with the rest of a step. Where there is one GPU they share it, each in turn: all is slower and nothing else
is different, but that NCCL goes through sockets."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store

from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, read_json
from specbench.engine.config import EngineConfig
from specbench.engine.engines import Engines
from specbench.engine.execution.cuda_graphs import Recording
from specbench.engine.execution.peer_memory import PeerMemory
from specbench.engine.execution.rank_processes import RankFailure, RankProcesses
from specbench.engine.layers.metadata import HostRows
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.parallel_engine import ParallelEngine, serve_engine
from specbench.engine.shard import Shard
from specbench.generate import GenerateRequest
from specbench.model_choice import SHAPES_FOLDER
from tests.engine.checkpoints.quantised_decoders import build_quantised_qwen3
from tests.engine.harness import engine_config, make_engine, outputs, run, token_request
from tests.engine.models.test_mimo import build_tiny_mimo
from tests.engine.test_speculation import ragged_prompts
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: Of log-probabilities in bf16.
NEAR = 0.1
IS_SHARED = torch.cuda.device_count() < 2
NUM_TOKENS = 12 if IS_SHARED else 24
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "attention_backend": "triton",
    "pipeline_depth": 1,
    "ngram_min": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "ranks_per_gpu": 2 if IS_SHARED else 1,
}
CASES = [
    ("inkling", "mtp_multi", 3),
    ("qwen3 tied and biased", "ngram", 3),
    ("mimo", "mtp_multi", 2),
    ("moe", "none", 0),
    ("inkling", "mtp_single", 2),
    ("inkling", "draft_model", 2),
    ("llama biases", "none", 0),
    ("qwen3 windows", "draft_model", 2),
    ("mimo", "mtp_single", 2),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("tiny")
    decoders = ("llama biases", "qwen3 tied and biased", "moe", "qwen3 windows")
    return {
        "inkling": build_tiny_inkling(parent / "inkling", num_modules=3),
        "mimo": build_tiny_mimo(parent / "mimo", 2),
        **{name: build_tiny_decoder(parent / name, name) for name in decoders},
    }


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    started = Engines()
    yield started
    started.close()


def requests() -> list[GenerateRequest]:
    """Greedy and tempered ones in turn, more than run at once."""
    return [
        token_request(f"r{index}", prompt, NUM_TOKENS, temperature=index % 2, seed=5)
        for index, prompt in enumerate(ragged_prompts(6, seed=0))
    ]


def start(engines: Engines, folder: Path, k: int, **fields: Any) -> ParallelEngine:
    config = engine_config(folder, k, **({"shard": Shard(0, 2)} | SETTINGS | fields))
    engine: LLMEngine = engines.start(config, time.perf_counter, lambda message: None)
    assert isinstance(engine, ParallelEngine)
    return engine


def check_same(engines: Engines, folder: Path, k: int, **fields: Any) -> None:
    """fields: how ranks do it; graphs and sums differ from those of one rank."""
    fields.setdefault("rank_all_reduce", "one_shot")
    as_one = {"cuda_graphs": False, "shard": Shard()}
    alone = outputs(make_engine(folder, k, **(SETTINGS | fields | as_one)), requests())
    engine = start(engines, folder, k, **fields)
    together = outputs(engine, requests())
    has_memory = isinstance(engine._groups.peer_memory, PeerMemory)
    engine.close()
    assert together == alone
    assert has_memory == (fields["rank_all_reduce"] == "one_shot")


@pytest.mark.parametrize(("model", "proposer", "k"), CASES, ids=str)
def test_fp32_output_on_two_equals_that_on_one(
    folders: dict[str, Path], engines: Engines, model: str, proposer: str, k: int
) -> None:
    draft = str(folders[model])
    check_same(engines, folders[model], k, proposer=proposer, draft_checkpoint=draft, cuda_graphs=True)


@pytest.mark.parametrize(("sums", "has_graphs"), [("nccl", True), ("one_shot", False), ("nccl", False)], ids=str)
@pytest.mark.parametrize(("model", "k"), [("inkling", 3), ("moe", 0)], ids=str)
def test_the_same_with_other_sums_and_without_graphs(
    folders: dict[str, Path], engines: Engines, model: str, k: int, sums: str, has_graphs: bool
) -> None:
    check_same(engines, folders[model], k, cuda_graphs=has_graphs, rank_all_reduce=sums)


def few_layers(shape: str, num_layers: int, folder: Path) -> Path:
    """A shape of real widths, of which a few layers are left."""
    config = read_json(SHAPES_FOLDER / shape / CONFIG_FILE)
    text = config.get("text_config", config)
    text["num_hidden_layers"] = num_layers
    if "local_layer_ids" in text:
        text["local_layer_ids"] = [layer for layer in text["local_layer_ids"] if layer < num_layers]
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("shape", "num_layers", "k"), [("qwen3_8b", 3, 0), ("inkling_8b", 6, 2)], ids=str)
def test_real_widths(engines: Engines, tmp_path: Path, shape: str, num_layers: int, k: int) -> None:
    check_same(engines, few_layers(shape, num_layers, tmp_path), k, load="random", cuda_graphs=True)


def test_near_ties_alone_are_decided_otherwise_in_bf16(engines: Engines, tmp_path: Path) -> None:
    """Where products of few rows give partial sums. Not of experts: which of them run is a near tie, too."""
    folder = few_layers("qwen3_8b", 3, tmp_path)
    asked = [token_request(f"r{i}", ids, NUM_TOKENS, logprobs=5) for i, ids in enumerate(ragged_prompts(4, seed=1))]
    fields = SETTINGS | {"load": "random", "dtype": "bfloat16", "cuda_graphs": True}
    alone = run(make_engine(folder, **fields), asked)
    engine = start(engines, folder, 0, **fields, rank_all_reduce="one_shot")
    together = run(engine, asked)
    engine.close()
    for name, result in alone.items():
        first, other = result.logprobs, together[name].logprobs
        assert first is not None and other is not None
        assert abs(first[0].top[0][1] - other[0].top[0][1]) < NEAR
        at = next((i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a.token_id != b.token_id), None)
        if at is not None:
            likely = dict(first[at].top)
            assert likely[first[at].token_id] - likely[other[at].token_id] < NEAR


@pytest.mark.parametrize(("model", "k"), [("inkling", 3), ("moe", 0)], ids=str)
def test_whole_experts(folders: dict[str, Path], engines: Engines, model: str, k: int) -> None:
    check_same(engines, folders[model], k, cuda_graphs=True, shard=Shard(0, 2, whole_experts=True))


@pytest.mark.parametrize("quantisation", ["fp8", "nvfp4"])
def test_codes_that_stay(engines: Engines, tmp_path: Path, quantisation: str) -> None:
    folder = build_quantised_qwen3(tmp_path, quantisation)
    check_same(engines, folder, 0, quantised_weights="keep", cuda_graphs=True)


def test_as_much_is_replayed_as_on_one_rank(
    folders: dict[str, Path], engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[Recording[Any]] = []
    plain = Recording.replay

    def replay(recording: Recording[Any], rows: HostRows) -> Any:
        assert recording._graph is not None
        replayed.append(recording)
        return plain(recording, rows)

    monkeypatch.setattr(Recording, "replay", replay)
    alone = run_steps(make_engine(folders["inkling"], 3, **(SETTINGS | {"cuda_graphs": True})))
    num_alone = len(replayed)
    engine = start(engines, folders["inkling"], 3, cuda_graphs=True, rank_all_reduce="one_shot")
    together = run_steps(engine)
    engine.close()
    assert together == alone
    # Forward, verification and drafts.
    assert len(replayed) - num_alone == num_alone >= 3 * together > 15


def run_steps(engine: LLMEngine) -> int:
    """Steps of decoding that the requests took."""
    steps = 0
    for request in requests():
        engine.add_request(request, arrival_s=0.0)
    while engine.has_requests:
        _, step = engine.step()
        steps += step is not None and not step.num_prefill_tokens
    return steps


def serve_until_memory_is_full(store: Store, name: str, config: EngineConfig) -> None:
    """What another rank does, which takes all memory that it may have once it is told so."""

    def take_all() -> None:
        while not store.check(["take"]):
            time.sleep(0.02)
        device = torch.device(config.device)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
        taken = []
        for num_bytes in (1 << 24, 1 << 20, 1 << 16, 1 << 12, 1 << 9):
            try:
                while True:
                    taken.append(torch.empty(num_bytes, dtype=torch.uint8, device=device))
            except torch.OutOfMemoryError:
                pass
        store.set("taken", "1")
        while True:
            time.sleep(1.0)

    threading.Thread(target=take_all, daemon=True).start()
    serve_engine(store, name, config)


def test_a_rank_that_is_out_of_memory_ends_the_run(folders: dict[str, Path]) -> None:
    """In a step, while kernels of the other rank wait for it."""
    engines = Engines()
    engines._processes = processes = RankProcesses(2, None, 30.0, serve_until_memory_is_full)
    engine = start(engines, folders["moe"], 0, rank_all_reduce="one_shot")
    outputs(engine, requests())
    processes.store.set("take", "1")
    processes._wait_for(["taken"])
    for request in requests():
        engine.add_request(request, arrival_s=0.0)
    start_s = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 .*OutOfMemoryError"):
        while engine.has_requests:
            engine.step()
    assert time.monotonic() - start_s < 25.0  # before the step's own limit
    engines.close()
