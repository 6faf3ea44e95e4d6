"""Prompts of random ids: of the lengths that were asked for, within the vocabulary, the same each time."""

from __future__ import annotations

import dataclasses

import pytest

from specbench.errors import UserError
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel
from specbench.run_config import EvalConfig

CONFIG = EvalConfig(
    name="random_ids",
    data=None,
    protocol=None,
    num_samples=40,
    num_fewshot=0,
    fewshot_data=None,
    instruction=None,
    max_output_tokens=4,
    scorer=None,
    stop=None,
    isl=30,
    osl=4,
)
MODEL = EvalModel(is_packaged=False, max_model_len=64, vocab_size=50)


def test_lengths_and_ids():
    task = load_task(CONFIG, MODEL)
    prompts = [sample.prompt_token_ids for sample in task.samples]
    assert len(set(prompts)) == 40 and {len(prompt) for prompt in prompts} == {30}
    assert {token for prompt in prompts for token in prompt} == set(range(50))
    assert {sample.max_output_tokens for sample in task.samples} == {4} and not task.scorers
    assert load_task(CONFIG, MODEL) == task
    assert "random" in task.data.name  # which is what reports go by


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"isl": 61}, "61 tokens and 4 of output"), ({"osl": None}, "need eval.isl and eval.osl")],
)
def test_lengths_that_cannot_be(changes: dict, message: str):
    with pytest.raises(UserError, match=message):
        load_task(dataclasses.replace(CONFIG, **changes), MODEL)
