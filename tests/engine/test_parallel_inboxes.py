"""Engines whose ranks exchange rows by kernels say what one rank says: on CPUs, in Triton's interpreter, over files
that two processes map."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store

from specbench.engine import parallel_engine
from specbench.engine.config import EngineConfig
from specbench.engine.execution.rank_groups import RankGroups
from specbench.engine.execution.rank_processes import RankProcesses
from specbench.engine.kernels.inboxes import BITS, EMPTY, NUM_PLACES, Inboxes, PeerInboxes
from specbench.engine.layers.parallel import TensorParallel
from specbench.engine.models.registry import load_model_config, open_checkpoint
from specbench.engine.shard import Shard
from tests.engine.harness import engine_config, make_engine, outputs, token_request
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU")
SIZE, MAX_ROWS = 2, 64
#: Environment variable with the folder of the inboxes.
FOLDER = "TEST_INBOXES"


def mapped_inboxes(shard: Shard, width: int) -> PeerInboxes:
    """Those of fp32 rows; keys are never asked for on a CPU."""
    shape = (MAX_ROWS, NUM_PLACES, SIZE, width)
    count = MAX_ROWS * NUM_PLACES * SIZE * width
    files = [str(Path(os.environ[FOLDER]) / f"rank{rank}") for rank in range(SIZE)]
    of_ranks = [torch.from_file(file, shared=True, size=count, dtype=BITS[4]).view(shape) for file in files]
    mapped_inboxes.kept = of_ranks  # type: ignore[attr-defined]
    rows = Inboxes(
        shard.rank,
        torch.tensor([each.data_ptr() for each in of_ranks]),
        of_ranks[shard.rank],
        torch.zeros(MAX_ROWS, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    return PeerInboxes(rows, rows)


_plain_join = parallel_engine._join


def join_with_inboxes(store: Store, name: str, config: EngineConfig) -> RankGroups:
    groups = _plain_join(store, name, config)
    width = load_model_config(open_checkpoint(config.checkpoint, config.load, config.quantised_weights)).hidden_size
    parallel = TensorParallel(config.shard, groups.data, mapped_inboxes(config.shard, width))
    return RankGroups(parallel, groups.control, groups.data, groups.peer_memory)


def serve(store: Store, name: str, config: EngineConfig) -> None:
    parallel_engine._join = join_with_inboxes
    parallel_engine.serve_engine(store, name, config)


@pytest.mark.parametrize(("model", "k"), [("inkling", 2), ("decoder", 0)])
def test_texts_are_those_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, k: int) -> None:
    if model == "inkling":
        folder = build_tiny_inkling(tmp_path / "model", num_modules=k, num_hidden_layers=2, local_layer_ids=[0])
    else:
        folder = build_tiny_decoder(tmp_path / "model", "qwen3 tied and biased")
    width = load_model_config(open_checkpoint(str(folder), "checkpoint", "dequantise")).hidden_size
    for rank in range(SIZE):
        empty = torch.full((MAX_ROWS * NUM_PLACES * SIZE * width,), EMPTY[4], dtype=BITS[4])
        (tmp_path / f"rank{rank}").write_bytes(empty.numpy().tobytes())
    requests = [token_request(f"r{index}", range(2 + index, 7 + 2 * index), 5) for index in range(3)]
    fields: dict[str, Any] = {"proposer": "mtp_multi" if k else "none"}
    alone = outputs(make_engine(folder, k, **fields), requests)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(parallel_engine, "_join", join_with_inboxes)
    processes = RankProcesses(SIZE, None, 60.0, serve)
    try:
        config = engine_config(folder, k, shard=Shard(0, SIZE), **fields)
        engine = parallel_engine.ParallelEngine(config, processes, time.perf_counter, lambda message: None)
        together = outputs(engine, requests)
        engine.close()
    finally:
        processes.close()
    assert together == alone
    assert int(engine._groups.parallel._inboxes.rows.counts.sum()) > 0  # type: ignore[union-attr]
