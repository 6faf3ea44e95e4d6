"""Two ranks in bf16: as near to fp32 as one rank is, and both route the same inputs to the same experts.

Belongs here: what rounding may do. Does not belong here: texts, which are compared in fp32 (test_parallel_engine.py).
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import Store

from specbench.engine.config import EngineConfig
from specbench.engine.engines import Engines
from specbench.engine.execution.rank_processes import RankProcesses
from specbench.engine.layers.moe import SharedExpertRouter
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.parallel_engine import ParallelEngine, serve_engine
from specbench.engine.shard import Shard
from tests.engine.harness import engine_config, make_engine, run, token_request
from tests.engine.tiny_inkling import build_tiny_inkling

NUM_IDS = 61
NUM_PROMPTS = 48
#: Of the error of two ranks in that of one. Parts of a sum are rounded before they are added.
MOST_TIMES_ERROR = 1.5
FIELDS = {"max_model_len": 64, "max_num_seqs": 16, "max_num_batched_tokens": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that bf16 holds as they are, so that arithmetic alone is rounded; few experts to choose among."""
    folder = build_tiny_inkling(
        tmp_path_factory.mktemp("tiny") / "inkling", num_modules=0, vocab_size=64, unpadded_vocab_size=NUM_IDS
    )
    file = folder / "model.safetensors"
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(rounded, file, metadata={"format": "pt"})
    return folder


def record_routing(record: Callable[[str], None]) -> Callable[[], None]:
    """Have what every router of this process reads and chooses recorded, call by call. Returns what ends that."""
    plain = SharedExpertRouter.__call__

    def route(router: SharedExpertRouter, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, weights = plain(router, x)
        digest = sha256()
        for tensor in (x, chosen, weights):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        record(digest.hexdigest())
        return chosen, weights

    SharedExpertRouter.__call__ = route  # type: ignore[method-assign]

    def end() -> None:
        SharedExpertRouter.__call__ = plain  # type: ignore[method-assign]

    return end


def serve_and_record(store: Store, name: str, config: EngineConfig) -> None:
    """What another rank does, which tells rank 0 what its routers did."""
    num_calls = 0

    def record(digest: str) -> None:
        nonlocal num_calls
        store.set(f"routed/{num_calls}", digest)
        num_calls += 1

    record_routing(record)
    serve_engine(store, name, config)


def first_logprobs(engine: LLMEngine) -> Tensor:
    """Of every id behind each prompt, [prompts, ids]."""
    rng = random.Random(0)
    prompts = [[rng.randrange(2, NUM_IDS) for _ in range(4 + index % 12)] for index in range(NUM_PROMPTS)]
    asked = [token_request(f"r{index}", prompt, 1, logprobs=NUM_IDS) for index, prompt in enumerate(prompts)]
    results = run(engine, asked)
    found = torch.empty(NUM_PROMPTS, NUM_IDS)
    for index in range(NUM_PROMPTS):
        logprobs = results[f"r{index}"].logprobs
        assert logprobs is not None
        for token_id, logprob in logprobs[0].top:
            found[index, token_id] = logprob
    return found


def median_error(found: Tensor, exact: Tensor) -> float:
    """Of prompts, so that the few whose experts are others count as any."""
    return statistics.median((found - exact).std(1).tolist())


def test_two_ranks_are_as_near_to_fp32_as_one_and_route_alike(folder: Path) -> None:
    exact = first_logprobs(make_engine(folder, **FIELDS))
    fields = FIELDS | {"dtype": "bfloat16"}
    alone = first_logprobs(make_engine(folder, **fields))
    engines = Engines()
    engines._processes = processes = RankProcesses(2, None, 60.0, serve_and_record)
    routed: list[str] = []
    end = record_routing(routed.append)
    try:
        config = engine_config(folder, **fields, shard=Shard(0, 2))
        engine = engines.start(config, time.perf_counter, lambda message: None)
        assert isinstance(engine, ParallelEngine)
        together = first_logprobs(engine)
        theirs = [processes.store.get(f"routed/{call}").decode() for call in range(len(routed))]
        engine.close()
    finally:
        end()
        engines.close()
    assert routed == theirs and len(routed) >= 5 * 3  # sparse layers, steps
    assert not torch.equal(together, alone)
    assert 0.0 < median_error(together, exact) < MOST_TIMES_ERROR * median_error(alone, exact)
