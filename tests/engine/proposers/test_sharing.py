"""Every proposer where blocks are shared and taken away: prefix hits and preemption change no text and no draft."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from specbench.engine.llm_engine import LLMEngine
from specbench.engine.proposer_table import PROPOSERS
from specbench.generate import GenerateRequest, GenerateResult
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.proposers.draft_checks import run_and_check_drafts
from tests.engine.proposers.test_draft_model import recomputed
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 250


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("draft"), num_modules=0, seed=7, num_hidden_layers=2)


def sharing_requests(seed: int, count: int = 8, max_output_tokens: int = 24) -> list[GenerateRequest]:
    """Prompts that begin alike for some blocks and go on differently."""
    rng = random.Random(seed)
    stem = [rng.randrange(VOCAB) for _ in range(23)]
    prompts = [stem[: rng.choice((8, 13, 16, 23))] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]]
    prompts += [
        rng.choice((stem, prompts[0]))[: rng.choice((9, 16, 23))] + [rng.randrange(VOCAB) for _ in range(4)]
        for _ in range(count - 1)
    ]
    return [token_request(f"r{index}", prompt, max_output_tokens) for index, prompt in enumerate(prompts)]


def engine_of(proposer: str, target: Path, draft: Path, drafts: str, k: int, **fields: object) -> LLMEngine:
    return make_engine(
        target,
        k,
        proposer=proposer,
        draft_checkpoint=str(draft),
        drafts=drafts,
        accepted_counts=tuple(range(k + 1)),
        ngram_min=1,
        **fields,
    )


def recorded(file: Path, requests: list[GenerateRequest], plain: dict[str, list[int]]) -> str:
    rows = [(request.prompt_token_ids, plain[request.request_id]) for request in requests]
    lines = [json.dumps({"prompt_token_ids": prompt, "output_token_ids": output}) for prompt, output in rows]
    file.write_text("\n".join(lines) + "\n")
    return str(file)


def num_cached(results: dict[str, GenerateResult]) -> int:
    return sum(result.record.num_cached_prompt_tokens for result in results.values())


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize(
    ("k", "depth", "budget"),
    [(3, 1, 11), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 0, 256), (2, 1, 7), (3, 0, 256)])],
)
def test_hits_and_preemption_change_no_text(
    tiny_folder: Path, draft_folder: Path, tmp_path: Path, proposer: str, k: int, depth: int, budget: int
):
    requests = sharing_requests(seed=k + budget)
    plain = outputs(make_engine(tiny_folder), requests)
    drafts = recorded(tmp_path / "drafts.jsonl", requests, plain)
    engine = engine_of(
        proposer,
        tiny_folder,
        draft_folder,
        drafts,
        k,
        pipeline_depth=depth,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        max_model_len=60,
        num_blocks=19,
        prefix_caching=True,
    )
    first = run(engine, requests)
    again = run(engine, requests)
    for results in (first, again):
        assert {name: result.output_token_ids for name, result in results.items()} == plain
    assert num_cached(again) > 0
    assert sum(result.record.num_preemptions for result in (first | again).values()) > 0


@pytest.mark.parametrize("proposer", ["mtp_single", "draft_model"])
@pytest.mark.parametrize("budget", [7, pytest.param(256, marks=pytest.mark.slow)])
def test_hits_and_preemption_change_no_draft(tiny_folder: Path, draft_folder: Path, proposer: str, budget: int):
    """A hit's entries were written by another request, a resumed request's are written anew: both draft alike."""
    oracle = {"mtp_single": Oracle(tiny_folder).single_module_drafts, "draft_model": recomputed(draft_folder)}[proposer]
    engine = engine_of(
        proposer,
        tiny_folder,
        draft_folder,
        "",
        3,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        max_model_len=60,
        num_blocks=19,
        prefix_caching=True,
    )
    run(engine, sharing_requests(seed=3))
    requests = sharing_requests(seed=3, count=5, max_output_tokens=12)
    assert run_and_check_drafts(engine, requests, oracle) > 30
