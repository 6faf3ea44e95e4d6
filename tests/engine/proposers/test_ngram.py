"""Prompt lookup against a search written out, and its output against plain decoding."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from specbench.engine.proposers.ngram import look_up
from tests.engine.harness import make_engine, outputs, run, token_request


def written_out(text: list[int], ngram_min: int, ngram_max: int, k: int) -> list[int]:
    """The convention, one comparison at a time: longest first, then earliest, then what is known behind it."""
    for length in range(min(ngram_max, len(text) - 1), ngram_min - 1, -1):
        for start in range(len(text) - length):
            if text[start : start + length] == text[-length:]:
                return text[start + length : start + length + k]
    return []


@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_the_one_written_out(seed: int):
    rng = random.Random(seed)
    num_found = 0
    for _ in range(60):
        ngram_min = rng.randint(1, 3)
        ngram_max, k = ngram_min + rng.randint(0, 3), rng.randint(1, 6)
        texts = [[rng.randrange(3) for _ in range(rng.randint(1, 20))] for _ in range(5)]
        pool = torch.full((5, 24), -1)
        for row, text in zip(pool, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
            row[len(text) : len(text) + 2] = torch.tensor(text[-2:])[: 24 - len(text)]  # drafts of the step before
        found = look_up(pool, torch.tensor([len(text) for text in texts]), ngram_min, ngram_max, k)
        for drafts, text in zip(found.tolist(), texts, strict=True):
            expected = written_out(text, ngram_min, ngram_max, k)
            assert drafts == expected + [-1] * (k - len(expected))
            num_found += bool(expected)
    assert num_found > 100


def test_no_longer_match_is_looked_for_than_there_are_tokens():
    pool = torch.tensor([[5, 6, 7, 5, 6, -1, -1]])
    assert look_up(pool, torch.tensor([5]), 1, 10**9, 2).tolist() == [[7, 5]]


def repetitive_prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    phrases = [[rng.randrange(250) for _ in range(6)] for _ in range(3)]
    return [[token for _ in range(rng.randint(1, 6)) for token in rng.choice(phrases)] for _ in range(count)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_output_equals_plain_decoding(tiny_folder: Path, k: int, depth: int):
    requests = [token_request(f"r{i}", prompt, 24) for i, prompt in enumerate(repetitive_prompts(6))]
    requests += [token_request("sampled", repetitive_prompts(1)[0], 24, temperature=0.8, seed=3)]
    plain = outputs(make_engine(tiny_folder), requests)
    for budget, concurrency in ((256, 8), (9, 3)):
        engine = make_engine(
            tiny_folder,
            k,
            proposer="ngram",
            ngram_min=1,
            pipeline_depth=depth,
            max_num_batched_tokens=budget,
            max_num_seqs=concurrency,
        )
        results = run(engine, requests)
        assert {name: result.output_token_ids for name, result in results.items()} == plain
        steps = [step for result in results.values() for step in result.verify_steps]
        assert {step.num_drafted for step in steps} >= {0, 1}, "a step may have no draft"
        assert max(step.num_accepted for step in steps) >= 1
