"""A draft model's drafts against the draft recomputed from scratch, and its output against plain decoding."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch

from specbench.engine.llm_engine import LLMEngine
from specbench.errors import UserError
from tests.engine.harness import make_engine, outputs, run, token_request
from tests.engine.oracle import Oracle
from tests.engine.proposers.draft_checks import run_and_check_drafts
from tests.engine.test_speculation import force_accepted, ragged_prompts
from tests.engine.tiny_inkling import build_tiny_inkling

VOCAB = 250


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another shape than the target's, the vocabulary apart."""
    return build_tiny_inkling(
        tmp_path_factory.mktemp("draft"),
        num_modules=0,
        seed=7,
        num_hidden_layers=3,
        hidden_size=32,
        local_layer_ids=[1],
    )


def engine_with(draft: Path, target: Path, k: int, **fields: object) -> LLMEngine:
    return make_engine(target, k, proposer="draft_model", draft_checkpoint=str(draft), **fields)


def recomputed(folder: Path):
    oracle = Oracle(folder)

    def drafts(committed: list[int], num_drafts: int) -> list[torch.Tensor]:
        tokens, logits = list(committed), []
        for _ in range(num_drafts):
            logits.append(oracle.target_hidden_and_logits(tokens)[1][-1])
            tokens.append(int(logits[-1].argmax()))
        return logits

    return drafts


def requests_of(lengths: tuple[int, ...], max_output_tokens: int, seed: int) -> list:
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return [token_request(f"r{i}", prompt, max_output_tokens) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_every_draft_equals_the_recomputation(
    tiny_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch, k: int
):
    every = range(k + 1)
    force_accepted(monkeypatch, [count for a in every for b in every for count in (a, b)] * 10, VOCAB)
    engine = engine_with(draft_folder, tiny_folder, k, max_num_seqs=4)
    assert run_and_check_drafts(engine, requests_of((1, 2, 7, 13), 24, seed=k), recomputed(draft_folder)) > 50


@pytest.mark.parametrize("budget", [1, 3, 5, 9])
def test_chunks_of_any_length_leave_exact_entries(
    tiny_folder: Path, draft_folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int
):
    rng = random.Random(budget)
    force_accepted(monkeypatch, [rng.randint(0, 4) for _ in range(1000)], VOCAB)
    engine = engine_with(draft_folder, tiny_folder, 4, max_num_seqs=3, max_num_batched_tokens=budget)
    assert run_and_check_drafts(engine, requests_of((1, 3, 6, 11, 12), 8, seed=budget), recomputed(draft_folder)) > 20


def test_a_shorter_context_of_the_draft_ends_the_drafts_and_nothing_else(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No filler token is drafted behind it: the steps there have no draft."""
    short = build_tiny_inkling(tmp_path / "short", num_modules=0, seed=7, num_hidden_layers=2, model_max_length=20)
    requests = requests_of((5, 9, 19, 25), 12, seed=2)
    plain = outputs(make_engine(tiny_folder), requests)
    results = run(engine_with(short, tiny_folder, 4), requests)
    assert {name: result.output_token_ids for name, result in results.items()} == plain
    for result in results.values():
        num_tokens = len(result.prompt_token_ids) + 1
        for step in result.verify_steps:
            assert step.num_drafted == max(0, min(4, 20 - num_tokens + 1)), (num_tokens, step)
            num_tokens += step.num_emitted
    force_accepted(monkeypatch, [4] * 100, VOCAB)
    exact = recomputed(short)

    def up_to_the_limit(committed: list[int], num_drafts: int) -> list[torch.Tensor]:
        return exact(committed, min(num_drafts, max(0, 21 - len(committed))))

    assert run_and_check_drafts(engine_with(short, tiny_folder, 4), requests[:2], up_to_the_limit) > 10


@pytest.mark.parametrize(
    ("k", "depth"),
    [(1, 1), (2, 0), (3, 1), (8, 0), *(pytest.param(k, 1 - k % 2, marks=pytest.mark.slow) for k in (2, 8))],
)
def test_output_equals_plain_decoding(tiny_folder: Path, draft_folder: Path, k: int, depth: int):
    prompts = ragged_prompts(8, seed=0)
    requests = [token_request(f"r{i}", prompt, 16) for i, prompt in enumerate(prompts[:4])]
    requests += [token_request(f"s{i}", p, 16, temperature=0.9, seed=1) for i, p in enumerate(prompts[4:6])]
    plain = outputs(make_engine(tiny_folder), requests)
    for budget, concurrency in ((256, 8), (11, 3)):
        engine = engine_with(
            draft_folder,
            tiny_folder,
            k,
            pipeline_depth=depth,
            max_num_batched_tokens=budget,
            max_num_seqs=concurrency,
        )
        assert outputs(engine, requests) == plain


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_model_that_drafts_for_itself_is_always_right(tiny_folder: Path, k: int):
    requests = requests_of((3, 8, 20), 30, seed=4)
    results = run(engine_with(tiny_folder, tiny_folder, k), requests)
    assert {name: result.output_token_ids for name, result in results.items()} == outputs(
        make_engine(tiny_folder), requests
    )
    steps = [step for result in results.values() for step in result.verify_steps]
    assert all(step.num_accepted == step.num_drafted == k for step in steps)


def test_its_caches_are_declared(tiny_folder: Path, draft_folder: Path):
    engine = engine_with(draft_folder, tiny_folder, 5)
    requirements = engine.runner.proposer.requirements()
    assert {group.owner for group in requirements.cache_groups} == {"draft"}
    assert {group.num_draft_slots for group in requirements.cache_groups} == {5}
    assert {group.num_prompt_lookahead + group.num_provisional_rows for group in requirements.cache_groups} == {0}
    # Two global layers of 2 x 2 heads and a windowed one of 2 x 4, 16 wide each; three layers' convolution inputs.
    streams = 2 * (2 * 2 * 16) + 2 * 4 * 16 + 2 * (2 * 2 * 16) + 2 * 4 * 16 + 3 * 2 * 32
    assert sum(group.bytes_per_token for group in requirements.cache_groups) == 4 * streams
    assert requirements.weight_bytes == 4 * sum(tensor.numel() for tensor in Oracle(draft_folder).weights.values())


def test_another_vocabulary_is_refused(tiny_folder: Path, tmp_path: Path):
    other = build_tiny_inkling(tmp_path / "other", num_modules=0, num_hidden_layers=2, unpadded_vocab_size=249)
    with pytest.raises(UserError, match=r"spec\.checkpoint: .*other has 249 token ids and the target has 250"):
        engine_with(other, tiny_folder, 2)


def test_other_tokens_under_the_same_ids_are_refused(tiny_folder: Path, tmp_path: Path):
    from tokenizers import Tokenizer, models

    folders = []
    for name, tokens in (("target", "ab"), ("draft", "ba")):
        folder = Path(shutil.copytree(tiny_folder, tmp_path / name))
        Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, "a")).save(
            str(folder / "tokenizer.json")
        )
        folders.append(folder)
    engine_with(folders[0], folders[0], 2)
    with pytest.raises(UserError, match=r"spec\.checkpoint: .*draft has other tokens in its tokenizer\.json"):
        engine_with(folders[1], folders[0], 2)
