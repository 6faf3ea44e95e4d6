"""Single-module drafting against an oracle that runs the module from scratch, and its output against plain decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specbench.engine.llm_engine import LLMEngine
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.proposers.draft_checks import run_and_check_drafts
from tests.engine.test_speculation import force_accepted, ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 250


@pytest.fixture(scope="module")
def one_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One module, whose attention sees everything."""
    return build_tiny_inkling(tmp_path_factory.mktemp("one"), num_modules=1, local_module_ids=())


def single(folder: Path, k: int, **fields: object) -> LLMEngine:
    return make_engine(folder, k, proposer="mtp_single", **fields)


def requests_of(lengths: tuple[int, ...], max_output_tokens: int, seed: int) -> list:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [token_request(f"r{i}", prompt, max_output_tokens) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("num_modules", [1, 3])
def test_every_draft_equals_the_oracle(
    one_module: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, k: int, num_modules: int
):
    """Of three modules the first one drafts; it is windowed, the only one of `one_module` is not."""
    folder = {1: one_module, 3: tiny_folder}[num_modules]
    every = range(k + 1)
    force_accepted(monkeypatch, [count for a in every for b in every for count in (a, b)] * 10, VOCAB)
    requests = requests_of((1, 2, 7, 13), 30, seed=k)
    assert run_and_check_drafts(single(folder, k, max_num_seqs=4), requests, Oracle(folder).single_module_drafts) > 50


@pytest.mark.parametrize("budget", [1, 3, 5, 9])
def test_chunks_of_any_length_leave_exact_entries(one_module: Path, monkeypatch: pytest.MonkeyPatch, budget: int):
    rng = random.Random(budget)
    force_accepted(monkeypatch, [rng.randint(0, 4) for _ in range(1000)], VOCAB)
    engine = single(one_module, 4, max_num_seqs=3, max_num_batched_tokens=budget)
    requests = requests_of((1, 3, 6, 11, 12), 8, seed=budget)
    assert run_and_check_drafts(engine, requests, Oracle(one_module).single_module_drafts) > 20


def test_the_context_end_is_drafted_for_exactly(one_module: Path, monkeypatch: pytest.MonkeyPatch):
    rng = random.Random(5)
    force_accepted(monkeypatch, [rng.randint(0, 8) for _ in range(1000)], VOCAB)
    engine = single(one_module, 8, max_model_len=24, trim_to_max_tokens=True)
    requests = requests_of((10, 11, 12), 30, seed=5)
    assert run_and_check_drafts(engine, requests, Oracle(one_module).single_module_drafts) > 20


@pytest.mark.parametrize(
    ("k", "depth"),
    [(1, 1), (2, 0), (3, 1), (8, 0), *(pytest.param(k, 1 - k % 2, marks=pytest.mark.slow) for k in (2, 8))],
)
def test_output_equals_plain_decoding(tiny_folder: Path, k: int, depth: int):
    prompts = ragged_prompts(8, seed=0)
    requests = [token_request(f"r{i}", prompt, 16) for i, prompt in enumerate(prompts[:4])]
    requests += [token_request(f"s{i}", p, 16, temperature=0.9, seed=1) for i, p in enumerate(prompts[4:6])]
    plain = outputs(make_engine(tiny_folder), requests)
    for budget, concurrency in ((256, 8), (11, 3)):
        engine = single(tiny_folder, k, pipeline_depth=depth, max_num_batched_tokens=budget, max_num_seqs=concurrency)
        assert outputs(engine, requests) == plain


def test_one_draft_of_one_module_is_what_multi_module_drafting_leaves(one_module: Path):
    requests = requests_of((5, 9), 20, seed=1)

    def accepted(proposer: str) -> list[list[int]]:
        results = run(make_engine(one_module, 1, proposer=proposer), requests).values()
        return [[step.num_accepted for step in result.verify_steps] for result in results]

    assert accepted("mtp_single") == accepted("mtp_multi")


def test_nothing_is_written_that_is_not_the_requests_own(one_module: Path, monkeypatch: pytest.MonkeyPatch):
    """Rows past the newest token land in blocks that the request holds: no null block, no other request's block."""
    rng = random.Random(3)
    force_accepted(monkeypatch, [rng.randint(0, 8) for _ in range(1000)], VOCAB)
    engine = single(one_module, 8, max_num_seqs=2, max_model_len=48)
    for request in requests_of((9, 10), 60, seed=3):
        engine.add_request(request, 0.0)
    while engine.has_requests:
        engine.step()
    for pool in engine.caches.values():
        for layer in pool.layers:
            for stream in layer:
                assert (stream[: engine.config.block_size] == 0).all(), "the null block stays zero"
