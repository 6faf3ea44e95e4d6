"""Real weights on real prompts: greedy text in fp32 is that of transformers' own generate, token for token.

SPECBENCH_SMOLLM2=DIR pytest tests/engine/test_smollm2.py            (DIR as tools/convert_smollm2.py makes it)
SPECBENCH_SMOLLM2=DIR pytest -m slow tests/engine/test_smollm2.py    (20 prompts of each kind, in several minutes)
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specbench.engine.tokenizer import load_tokenizer
from specbench.generate import GenerateRequest
from tests.engine.harness import make_engine, outputs, token_request

#: (prompts of each kind, tokens a prompt)
SMALL, WHOLE = (2, 24), (20, 64)
#: What is drafted, and how.
DRAFTED: dict[str, dict] = {
    "plain": {},
    "ngram 4": {"k": 4, "proposer": "ngram"},
    "ngram 8": {"k": 8, "proposer": "ngram"},
    "stub": {"k": 4, "proposer": "stub", "accepted_counts": (0, 1, 2, 3, 4)},
}

Texts = tuple[list[GenerateRequest], dict[str, list[int]]]


@pytest.fixture(scope="module")
def folder() -> Path:
    name = os.environ.get("SPECBENCH_SMOLLM2")
    if name is None:
        pytest.skip("SPECBENCH_SMOLLM2 names no folder")
    return Path(name)


@pytest.fixture(scope="module")
def reference_texts(folder: Path, shared_data: Path) -> Callable[[tuple[int, int]], Texts]:
    """(prompts of each kind, tokens) -> requests, and what transformers generates for each."""
    from transformers import AutoModelForCausalLM

    known: dict[tuple[int, int], Texts] = {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def texts(size: tuple[int, int]) -> Texts:
        if size not in known:
            requests = chat_requests(folder, shared_data, *size)
            known[size] = requests, {request.request_id: generate(model, request) for request in requests}
        return known[size]

    return texts


def chat_requests(folder: Path, shared_data: Path, num_each: int, num_tokens: int) -> list[GenerateRequest]:
    """The first questions of GSM8K and the first turns of MT-Bench, as chats."""
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    questions = {
        "gsm8k": [row["question"] for row in read_rows(shared_data / "gsm8k" / "test.jsonl", num_each)],
        "mt_bench": [row["turns"][0] for row in read_rows(shared_data / "mt_bench" / "question.jsonl", num_each)],
    }
    return [
        token_request(
            f"{name} {index}",
            tokenizer.encode_chat([{"role": "user", "content": question}]).token_ids,
            num_tokens,
            ignore_eos=False,
        )
        for name, texts in questions.items()
        for index, question in enumerate(texts)
    ]


def read_rows(file: Path, count: int) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[:count]]


def generate(model: torch.nn.Module, request: GenerateRequest) -> list[int]:
    assert request.prompt_token_ids is not None
    prompt = torch.tensor([request.prompt_token_ids])
    with torch.no_grad():
        ids = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.sampling.max_output_tokens,
            do_sample=False,
        )
    return ids[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("size", [SMALL, pytest.param(WHOLE, marks=pytest.mark.slow)], ids=["small", "whole"])
@pytest.mark.parametrize("drafted", DRAFTED)
def test_text_is_that_of_transformers(
    folder: Path,
    reference_texts: Callable[[tuple[int, int]], Texts],
    size: tuple[int, int],
    drafted: str,
    tmp_path: Path,
) -> None:
    requests, expected = reference_texts(size)
    fields = dict(DRAFTED[drafted])
    if fields.get("proposer") == "stub":
        fields["drafts"] = record(tmp_path / "drafts.jsonl", requests, expected)
    engine = make_engine(folder, max_model_len=512, block_size=16, **fields)
    found = outputs(engine, requests)
    assert [name for name in expected if found[name] != expected[name]] == []


def record(file: Path, requests: list[GenerateRequest], texts: dict[str, list[int]]) -> str:
    rows = [
        {"prompt_token_ids": request.prompt_token_ids, "output_token_ids": texts[request.request_id]}
        for request in requests
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)
