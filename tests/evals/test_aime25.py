"""AIME 2025: both prompts, answers that are whole numbers, and the real file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.errors import UserError
from specbench.evals.registry import load_task
from specbench.evals.scorers import score_text
from specbench.evals.task import EvalModel, Task
from specbench.run_config import EvalConfig

Write = Callable[..., str]


@pytest.fixture
def load(eval_config: Callable[..., EvalConfig]) -> Callable[..., Task]:
    def build(**changes: object) -> Task:
        config = eval_config(**{"name": "aime25", "scorer": "boxed"} | changes)
        return load_task(config, EvalModel(is_packaged=False))

    return build


def test_both_prompts(load: Callable[..., Task], write_jsonl: Write) -> None:
    path = write_jsonl([{"problem": "What is 7?", "answer": "7"}, {"problem": "And 70?", "answer": 70}])
    chat = load(data=path)
    assert chat.samples[0].messages is not None and chat.samples[0].messages[0]["content"] == (
        "What is 7?\nPlease reason step by step, and put your final answer within \\boxed{}."
    )
    assert [one.reference for one in chat.samples] == ["7", "70"] and chat.stop == ()
    plain = load(data=path, protocol="completion", num_samples=1)
    assert plain.samples[0].prompt == "Question: What is 7?\nAnswer:" and "Question" in plain.stop
    assert load(data=path, instruction=None).samples[0].messages[0]["content"] == "What is 7?"  # type: ignore[index]


@pytest.mark.parametrize("answer", ["", "1000", "-1", "7.0", None, True, "\u0667"])
def test_an_answer_that_is_no_whole_number(answer: object, load: Callable[..., Task], write_jsonl: Write) -> None:
    with pytest.raises(UserError, match=r'line 1: "answer" must be a whole number of 0 \.\. 999'):
        load(data=write_jsonl([{"problem": "p", "answer": answer}]))


def test_the_real_problems(load: Callable[..., Task], shared_data: Path) -> None:
    task = load(data=str(shared_data / "aime25" / "test.jsonl"))
    assert len(task.samples) == 30 and task.headline == "boxed"
    right = [score_text("boxed", f"So it is \\boxed{{{one.reference}}}.", one.reference) for one in task.samples]
    assert all(score == 1.0 for _, score in right)
    assert score_text("boxed", "\\boxed{016}", "16")[1] == 1.0
