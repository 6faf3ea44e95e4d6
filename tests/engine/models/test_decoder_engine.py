"""Plain decoders in the whole engine: chunks, mixed batches, windows and drafts leave transformers' greedy text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.harness import make_engine, outputs, token_request
from tests.engine.models.test_inkling import random_ids
from tests.engine.tiny_decoders import build_tiny_decoder

LENGTHS, NUM_OUTPUT = (1, 7, 40, 23, 31), 30


def generated(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_OUTPUT, do_sample=False)
        texts.append(text[0, len(prompt) :].tolist())
    return texts


@pytest.mark.parametrize("name", ["llama tied", "qwen3 windows", "moe windows"])
def test_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    folder = build_tiny_decoder(tmp_path, name)
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    expected = generated(folder, prompts)
    requests = [token_request(str(index), prompt, NUM_OUTPUT) for index, prompt in enumerate(prompts)]
    drafted = {"k": 3, "proposer": "ngram", "ngram_min": 1}
    for fields in ({}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}, {"pipeline_depth": 1}, drafted):
        found = outputs(make_engine(folder, **fields), requests)
        assert [found[str(index)] for index in range(len(prompts))] == expected, fields


def test_a_decoder_drafts_for_another(tmp_path: Path) -> None:
    folder, draft = (build_tiny_decoder(tmp_path / name, name) for name in ("llama", "qwen3 windows"))
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    requests = [token_request(str(index), prompt, NUM_OUTPUT) for index, prompt in enumerate(prompts)]
    plain = outputs(make_engine(folder), requests)
    for checkpoint in (draft, folder):
        engine = make_engine(folder, k=3, proposer="draft_model", draft_checkpoint=str(checkpoint))
        assert outputs(engine, requests) == plain
