"""Two ranks say what one says, token for token: every family, every proposer, greedy and at a temperature, in fp32.

A sum over ranks is rounded in another order than a product, by a few 1e-6 of these logits. Where two logits were closer
than that the texts could part; with these seeds, which are fixed, none are.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench.engine.engines import Engines
from specbench.engine.execution.model_runner import ModelRunner
from specbench.engine.execution.rank_groups import RankGroups
from specbench.engine.execution.rank_processes import RankFailure, RankProcesses
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.parallel_engine import ParallelEngine
from specbench.engine.shard import Shard
from specbench.errors import UserError
from specbench.generate import GenerateRequest, GenerateResult
from tests.engine.checkpoints.quantised_decoders import build_quantised_qwen3
from tests.engine.checkpoints.test_quantised import build_inkling_in_codes, build_moe_in_fp8
from tests.engine.content.prompts import AUDIO_TOKENS, audio_request, clip, draw
from tests.engine.harness import engine_config, make_engine, run, token_request
from tests.engine.models.test_mimo import build_tiny_mimo
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

NUM_RANKS = 2
#: Ranks that have some experts whole.
WHOLE_EXPERTS = Shard(0, NUM_RANKS, whole_experts=True)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    """One pair of processes for all tests: starting them takes seconds."""
    started = Engines()
    yield started
    started.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    decoders = ("llama biases", "qwen3 tied and biased", "moe", "qwen3 windows")
    return {
        "inkling": build_tiny_inkling(parent / "inkling", vocab_size=64, unpadded_vocab_size=61),
        "mimo": build_tiny_mimo(parent / "mimo", 2),
        **{name: build_tiny_decoder(parent / name, name) for name in decoders},
    }


def mixed_requests(num_ids: int = 60, count: int = 6, length: int = 14, **sampling: Any) -> list[GenerateRequest]:
    """Greedy and tempered requests in turn, in one batch, some with filters and penalties."""
    rng = random.Random(0)
    asked: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "seed": 3},
        {"logprobs": 2},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    )
    prompts = [[rng.randrange(2, num_ids) for _ in range(4 + 5 * index)] for index in range(count)]
    return [
        token_request(f"r{index}", prompt, length, **asked[index % 4], **sampling)
        for index, prompt in enumerate(prompts)
    ]


def seen(results: dict[str, GenerateResult]) -> dict[str, Any]:
    """Everything that does not depend on time; log-probabilities to 1e-4."""
    return {
        name: (
            result.output_token_ids,
            [(step.num_drafted, step.num_accepted, step.num_emitted) for step in result.verify_steps],
            [(one.token_id, one.rank, round(one.logprob, 3)) for one in result.logprobs or ()],
            result.record.num_preemptions,
            result.record.num_cached_prompt_tokens,
        )
        for name, result in results.items()
    }


def start(engines: Engines, folder: Path, k: int, **fields: Any) -> ParallelEngine:
    config = engine_config(folder, k, **({"shard": Shard(0, NUM_RANKS)} | fields))
    engine = engines.start(config, time.perf_counter, lambda message: None)
    assert isinstance(engine, ParallelEngine)
    return engine


def check_same(engines: Engines, folder: Path, k: int, requests: list[GenerateRequest], **fields: Any) -> dict:
    """Run on one rank and on two; returns what both said."""
    alone = run(make_engine(folder, k, **(fields | {"shard": Shard()})), requests)
    engine = start(engines, folder, k, **fields)
    together = run(engine, requests)
    assert seen(together) == seen(alone)
    if not any(request.sampling.temperature for request in requests):
        assert engine.check_output(list(together.values()), len(together)).status == "identical"
    engine.close()
    return alone


@pytest.mark.parametrize(
    ("family", "proposer", "k"),
    [
        ("inkling", "none", 0),
        ("inkling", "mtp_multi", 3),
        ("inkling", "mtp_single", 2),
        ("inkling", "draft_model", 2),
        ("mimo", "mtp_multi", 2),
        ("mimo", "mtp_single", 2),
        ("llama biases", "ngram", 3),
        ("qwen3 tied and biased", "draft_model", 2),
        ("qwen3 windows", "ngram", 3),
        ("moe", "none", 0),
    ],
)
def test_every_family_and_proposer(
    engines: Engines, folders: dict[str, Path], family: str, proposer: str, k: int
) -> None:
    draft = str(folders["mimo" if family == "mimo" else family])
    found = check_same(
        engines, folders[family], k, mixed_requests(), proposer=proposer, draft_checkpoint=draft, ngram_min=1
    )
    if proposer in ("draft_model", "ngram"):  # others of random weights agree with nobody
        assert any(step.num_accepted for result in found.values() for step in result.verify_steps)


@pytest.mark.parametrize(
    ("family", "proposer", "k"), [("inkling", "mtp_multi", 3), ("inkling", "draft_model", 2), ("moe", "ngram", 3)]
)
def test_whole_experts(engines: Engines, folders: dict[str, Path], family: str, proposer: str, k: int) -> None:
    """One prompt is long enough to go the way of many tokens, sorted by expert."""
    fields: dict[str, Any] = {"proposer": proposer, "draft_checkpoint": str(folders[family]), "ngram_min": 1}
    long = token_request("long", [2 + place % 50 for place in range(150)], 8)
    fields |= {"max_model_len": 256, "shard": WHOLE_EXPERTS}
    check_same(engines, folders[family], k, [*mixed_requests(), long], **fields)


@pytest.mark.parametrize("quantisation", ["fp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_codes_that_stay(engines: Engines, tmp_path: Path, quantisation: str) -> None:
    """Slices of codes and scales, multiplied in Triton's interpreter; what is held is what was predicted."""
    folder = build_quantised_qwen3(tmp_path, quantisation)
    fields: dict[str, Any] = {"quantised_weights": "keep", "attention_backend": "triton"}
    requests = [token_request("0", [5, 9], 2)]
    check_same(engines, folder, 0, requests, **fields)
    engine = start(engines, folder, 0, **fields)
    one_rank = make_engine(folder, **fields)
    weights = engine.memory.fixed_bytes["target_weights"]
    assert engine.model.num_bytes == weights < 0.6 * one_rank.memory.fixed_bytes["target_weights"]
    engine.close()


@pytest.mark.parametrize("whole_experts", [False, True])
def test_experts_that_stay_in_codes(engines: Engines, tmp_path: Path, whole_experts: bool) -> None:
    folder = build_inkling_in_codes(tmp_path)
    shard = Shard(0, NUM_RANKS, whole_experts)
    check_same(engines, folder, 3, mixed_requests(), quantised_weights="keep", shard=shard)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which takes the CPU's tensors")
@pytest.mark.parametrize("whole_experts", [False, True])
def test_experts_in_fp8_that_stay_in_codes(engines: Engines, tmp_path: Path, whole_experts: bool) -> None:
    folder = build_moe_in_fp8(tmp_path)
    shard = Shard(0, NUM_RANKS, whole_experts)
    requests = [token_request("0", [5, 9], 2)]
    check_same(engines, folder, 0, requests, quantised_weights="keep", attention_backend="triton", shard=shard)


def test_padded_steps_and_one_ahead(engines: Engines, folders: dict[str, Path]) -> None:
    """What is recorded in graphs on a GPU, and the next step scheduled while one runs."""
    check_same(engines, folders["inkling"], 3, mixed_requests(), cuda_graphs=True, pipeline_depth=1)


def test_recorded_drafts_and_the_output_check(engines: Engines, folders: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(1)
    requests = [token_request(f"g{index}", [rng.randrange(2, 60) for _ in range(9)], 12) for index in range(3)]
    plain = run(make_engine(folders["inkling"]), requests)
    rows = [
        {"prompt_token_ids": result.prompt_token_ids, "output_token_ids": result.output_token_ids}
        for result in plain.values()
    ]
    drafts = tmp_path / "drafts.jsonl"
    drafts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = check_same(
        engines, folders["inkling"], 3, requests, proposer="stub", drafts=str(drafts), accepted_counts=(3, 1, 0)
    )
    assert {step.num_accepted for result in found.values() for step in result.verify_steps} == {0, 1, 3}


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drafts_with_probabilities(engines: Engines, folders: dict[str, Path], method: str) -> None:
    """The same windows, coins and laws: the same tokens."""
    requests = [token_request(f"p{index}", [5 + index, 9, 30], 10, temperature=1.0, seed=index) for index in range(4)]
    found = check_same(
        engines,
        folders["inkling"],
        2,
        requests,
        proposer="draft_model",
        draft_checkpoint=str(folders["inkling"]),
        draft_sample_method="probabilistic",
        rejection_sample_method=method,
    )
    assert any(step.num_accepted for result in found.values() for step in result.verify_steps)


def test_preemption_and_prefix_caching(engines: Engines, folders: dict[str, Path]) -> None:
    """Too few blocks for all requests at once, whose prompts begin alike."""
    rng = random.Random(2)
    common = [rng.randrange(2, 60) for _ in range(20)]
    requests = [
        token_request(f"c{index}", [*common, 3 + index], 30, temperature=index % 2, seed=index) for index in range(4)
    ]
    found = check_same(
        engines, folders["inkling"], 3, requests, num_blocks=24, max_model_len=80, prefix_caching=True, max_num_seqs=3
    )
    assert any(result.record.num_preemptions for result in found.values())
    assert any(result.record.num_cached_prompt_tokens for result in found.values())


def test_memory_that_decides_about_blocks(engines: Engines, folders: dict[str, Path]) -> None:
    """Ranks take as many as the one with the fewest."""
    fields: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 80}
    engine = start(engines, folders["inkling"], 3, **fields)
    most, limit = engine.memory.num_full_blocks, engine.memory.total_bytes - (1 << 14)
    engine.close()
    engine = start(engines, folders["inkling"], 3, **fields, memory_limit=limit)
    assert engine.memory.total_bytes <= limit and engine.memory.num_full_blocks < most
    assert seen(run(engine, mixed_requests())) == seen(run(make_engine(folders["inkling"], 3), mixed_requests()))
    engine.close()


def test_what_cannot_be_split_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = build_tiny_inkling(tmp_path, swa_num_attention_heads=3, swa_num_key_value_heads=3)
    engines = Engines()
    with pytest.raises(UserError, match="2 ranks cannot share 3 heads of local attention"):
        start(engines, folder, 0)
    engines.close()


@pytest.mark.slow
def test_four_ranks(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks than key-value heads: two hold the same one."""
    monkeypatch.setattr("tests.engine.test_parallel_engine.NUM_RANKS", 4)
    engines = Engines()
    check_same(engines, folders["inkling"], 3, mixed_requests())
    check_same(engines, folders["mimo"], 2, mixed_requests(), proposer="mtp_multi")
    check_same(engines, folders["llama biases"], 3, mixed_requests(), proposer="ngram", ngram_min=1)
    check_same(engines, folders["moe"], 0, mixed_requests())
    for family, k in (("inkling", 3), ("moe", 0)):
        check_same(engines, folders[family], k, mixed_requests(), shard=Shard(0, 4, whole_experts=True))
    engines.close()


@pytest.mark.slow
def test_three_ranks(tmp_path: Path) -> None:
    """No power of two; the last rank has fewer ids of the vocabulary than the others."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    widths = {"hidden_size": 96, "dense_intermediate_size": 96, "intermediate_size": 48, "n_routed_experts": 6}
    local = {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3}
    folder = build_tiny_inkling(tmp_path, vocab_size=64, unpadded_vocab_size=61, **heads, **local, **widths)
    engines = Engines()
    for whole_experts in (False, True):
        shard = Shard(0, 3, whole_experts)
        check_same(engines, folder, 3, mixed_requests(), shard=shard)
        check_same(engines, folder, 2, mixed_requests(), proposer="mtp_single", prefix_caching=True, shard=shard)
    engines.close()


def test_a_killed_rank_ends_the_run(folders: dict[str, Path]) -> None:
    engines = Engines()
    engine = start(engines, folders["llama biases"], 0)
    for request in mixed_requests():
        engine.add_request(request, arrival_s=0.0)
    engine.step()
    child = engines._processes.peers[0].process  # type: ignore[union-attr]
    child.kill()
    with pytest.raises(RankFailure, match=rf"rank 1 \(process {child.pid}\) was ended by SIGKILL"):
        while engine.has_requests:
            engine.step()
    engines.close()
    assert not child.is_alive()


def test_two_ranks_hear_as_one(engines: Engines, tmp_path: Path):
    """Clips travel to every rank, those of the output check, too."""
    folder = build_tiny_inkling(tmp_path, has_towers=True)
    requests = [
        audio_request(f"r{seed}", [*draw(seed, 5), AUDIO_TOKENS.marker_id, *draw(9, seed)], [clip(seed, 12)], 10)
        for seed in range(3)
    ]
    check_same(engines, folder, 3, requests, max_num_batched_tokens=16, prefix_caching=True)


@pytest.mark.parametrize("has_failed", [False, True])
def test_groups_go_behind_the_graphs_that_record_their_collectives(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, has_failed: bool
) -> None:
    """On a GPU whoever drops a group waits for such graphs, and a process never ended."""
    events: list[str] = []
    monkeypatch.setattr(ModelRunner, "release_graphs", lambda runner: events.append("graphs"))
    monkeypatch.setattr(RankGroups, "abort", lambda groups: events.append("groups"))
    engines = Engines()
    engine = start(engines, folders["inkling"], 0)
    store = engine._processes.store
    processes = engine._processes
    if has_failed:
        heard: list[bool] = []
        processes.call_on_failure(lambda: heard.append(processes._has_failed.is_set()))
        processes._fail("for this test")
        assert events == ["groups"]  # whoever waits for a rank that has gone
        assert heard == [True], "what groups may wait for is let go by whoever waits for the failure"
        events.clear()
    engine.close()
    assert events == ["graphs", "groups"]
    assert store.check([f"{engine._name}/closed/1"]) != has_failed
    engine.close()
    processes._fail("when nothing is open any more")
    engines.close()
    assert events == ["graphs", "groups"]


def test_a_step_that_is_broken_off_is_not_waited_for(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(engine: LLMEngine) -> None:
        raise KeyboardInterrupt

    engines = Engines()
    engine = start(engines, folders["inkling"], 0)
    monkeypatch.setattr(LLMEngine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(RankProcesses, "wait_until_closed", lambda processes, name: pytest.fail("waits"))
    engines.close()


def test_closing_that_is_interrupted_lets_go_all_the_same(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(processes: RankProcesses, name: str) -> None:
        raise KeyboardInterrupt

    engines = Engines()
    engine = start(engines, folders["inkling"], 0)
    released = []
    monkeypatch.setattr(ModelRunner, "release_graphs", lambda runner: released.append(runner))
    monkeypatch.setattr(RankProcesses, "wait_until_closed", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engines.close()
    assert released == [engine.runner] and not engine._processes.peers


def test_the_end_closes_what_is_open(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    engines = Engines()
    engine = start(engines, folders["inkling"], 0)
    released = []
    monkeypatch.setattr(ModelRunner, "release_graphs", lambda runner: released.append(runner))
    engines.close()
    assert released == [engine.runner]
