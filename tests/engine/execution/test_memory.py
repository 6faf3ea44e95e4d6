"""The budget's predictions are what is allocated, to the byte; its limit is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench.engine.cache_group import CacheGroupSpec, StreamSpec
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.config import EngineConfig
from specbench.engine.execution.engine_memory import plan_engine_memory
from specbench.engine.execution.memory import MemoryPlan, plan_memory
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.shard import Shard
from specbench.errors import UserError
from tests.engine.harness import engine_config, run, token_request
from tests.engine.ranks import rank_alone
from tests.engine.tiny_inkling import build_tiny_inkling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), num_modules=8)


def tensor_bytes(owner: object) -> int:
    """Of all its tensors; views of one count once."""
    storages = [value.untyped_storage() for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def kept_readers(monkeypatch: pytest.MonkeyPatch) -> list[WeightReader]:
    """Fills with every reader that is made."""
    readers: list[WeightReader] = []
    initialise = WeightReader.__init__

    def kept(self: WeightReader, *arguments: object) -> None:
        initialise(self, *arguments)
        readers.append(self)

    monkeypatch.setattr(WeightReader, "__init__", kept)
    return readers


CASES = [
    {"k": 0},
    {"k": 0, "dtype": "bfloat16"},
    {"k": 1},
    {"k": 8, "dtype": "bfloat16", "prefix_caching": True},
    {"k": 8, "block_size": 16, "num_blocks": 40},
    {"k": 3, "draft_sample_method": "probabilistic"},
    {"k": 3, "proposer": "mtp_single"},
    {"k": 4, "proposer": "ngram"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_predicted_bytes_are_the_allocated_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch, case: dict):
    readers = kept_readers(monkeypatch)
    config = engine_config(folder, **case, max_num_seqs=3, max_num_batched_tokens=64)
    predicted = plan_engine_memory(config)
    assert not readers, "a prediction reads no weight"
    engine = LLMEngine(config)
    assert predicted == engine.memory
    lines = predicted.lines
    assert lines["target_weights"] == readers[0].num_bytes
    assert lines["draft_weights"] == sum(reader.num_bytes for reader in readers[1:])
    for owner in ("target", "draft"):
        pools = [pool for pool in engine.caches.values() if pool.spec.owner == owner]
        streams = [(pool.spec.kind, stream) for pool in pools for layer in pool.layers for stream in layer]
        conv = sum(stream.nbytes for kind, stream in streams if kind == "short_conv")
        assert lines[f"{owner}_conv"] == conv
        assert lines[f"{owner}_kv"] == sum(stream.nbytes for _, stream in streams) - conv
    state = engine.runner.state
    assert lines["request_rows"] == tensor_bytes(state) + tensor_bytes(state.sampling)
    proposer_bytes = 0 if engine.runner.proposer is None else tensor_bytes(engine.runner.proposer)
    assert lines["proposer_buffers"] == proposer_bytes
    assert lines["logits"] == most_logits_bytes(engine, monkeypatch)
    assert predicted.total_bytes == sum(lines.values())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_predicted_bytes_of_a_rank_are_the_allocated_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, whole_experts: bool
):
    """Loading has no collectives: one rank loads by itself."""
    readers = kept_readers(monkeypatch)
    config = engine_config(folder, 3, shard=Shard(rank, 2, whole_experts), max_num_seqs=3)
    predicted = plan_engine_memory(config)
    engine = LLMEngine(config, parallel=rank_alone(config.shard))
    assert predicted == engine.memory
    lines = predicted.lines
    assert lines["target_weights"] == readers[0].num_bytes
    assert lines["draft_weights"] == readers[1].num_bytes
    assert lines["target_weights"] < plan_engine_memory(engine_config(folder, 3)).lines["target_weights"] * 0.6
    streams = [stream for pool in engine.caches.values() for layer in pool.layers for stream in layer]
    cache_lines = [lines[f"{owner}_{kind}"] for owner in ("target", "draft") for kind in ("kv", "conv")]
    assert sum(cache_lines) == sum(stream.nbytes for stream in streams)
    state = engine.runner.state
    assert lines["request_rows"] == tensor_bytes(state) + tensor_bytes(state.sampling)
    assert lines["proposer_buffers"] == tensor_bytes(engine.runner.proposer)


def most_logits_bytes(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes of the largest logits of a full batch whose requests all verify k drafts."""
    sizes: list[int] = []
    compute_logits = engine.model.compute_logits

    def measured(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute_logits(hidden)
        sizes.append(logits.nbytes)
        return logits

    monkeypatch.setattr(engine.model, "compute_logits", measured)
    # Text that repeats, so that prompt lookup has drafts for every request.
    run(engine, [token_request(f"r{i}", [5, 6, 7] * 3, 24, logit_bias=((5, 50.0),)) for i in range(3)])
    return max(sizes)


def group(name: str, window: int | None, num_elements: int = 8) -> CacheGroupSpec:
    kind = "full_attention" if window is None else "sliding_window"
    return CacheGroupSpec(name, "target", kind, ("0",), ((StreamSpec("kv", (num_elements,)),),), 4, window)


def plan(limit: int | None, fixed: int = 0, **fields: object) -> MemoryPlan:
    config = EngineConfig(
        checkpoint="", dtype="float32", device="cpu", max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32,
        block_size=4, num_speculative_tokens=0, proposer="none",
        **({"num_blocks": None, "memory_limit": limit} | fields),
    )  # fmt: skip
    return plan_memory(config, (group("full", None), group("window", 8)), {"target_weights": fixed})


def test_without_a_limit_every_request_can_be_as_long_as_the_context():
    assert plan(None).num_blocks == (1 + 4 * 16, 1 + 4 * (2 + 2 + 1) + 8)


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_the_limit_is_kept_and_used_up(prefix_caching: bool):
    block_bytes = 4 * 8 * 4 * (1 + prefix_caching)
    for limit in range(20_000, 26_000, 313):
        found = plan(limit, fixed=9_000, prefix_caching=prefix_caching)
        assert found.total_bytes <= limit
        is_all = found.num_blocks[0] == 65
        assert is_all or limit - found.total_bytes < block_bytes + block_bytes


def test_a_window_is_kept_for_as_many_prefixes_as_requests_run():
    assert plan(None, prefix_caching=True, num_blocks=200).num_blocks == (200, 58)
    assert plan(None, prefix_caching=True, num_blocks=50).num_blocks == (50, 50)
    assert plan(None, prefix_caching=True, num_blocks=20).num_blocks == (20, 29)


def test_a_limit_for_less_than_one_request_says_where_it_went():
    message = r"cache.memory_fraction: 13 blocks of 4 tokens hold less than one .*=64 tokens \(17 blocks\) in 0.0 MiB"
    with pytest.raises(UserError, match=message) as raised:
        plan(14_500, fixed=9_000)
    assert "target weights 0.0" in str(raised.value) and "raise it, or lower model.max_model_len" in str(raised.value)


def test_weights_that_do_not_fit_by_themselves_are_named():
    message = (
        r"cache.memory_fraction: no cache fits in 0.0 MiB beside .*target weights 0.0.*: what is not cache takes more"
    )
    with pytest.raises(UserError, match=message):
        plan(8_000, fixed=9_000)


def test_more_blocks_than_the_limit_allows_are_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"cache.num_blocks: with 1000 blocks the run takes 0.\d MiB.* allows 0.0 MiB"):
        plan(20_000, num_blocks=1000)
