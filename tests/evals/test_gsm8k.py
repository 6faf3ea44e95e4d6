"""GSM8K: where the problems come from, what is asked, and every way a file can be wrong."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from specbench.errors import UserError
from specbench.evals import gsm8k
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Task
from specbench.run_config import EvalConfig

Build = Callable[..., EvalConfig]
Write = Callable[..., str]


def row(number: int) -> dict[str, str]:
    return {"question": f"What is {number}?", "answer": f"It is <<{number}={number}>>{number}.\n#### {number}"}


def load(config: EvalConfig, packaged_model: bool = False) -> Task:
    return load_task(config, EvalModel(is_packaged=packaged_model))


def user_text(task: Task, index: int = 0) -> str:
    messages = task.samples[index].messages
    assert messages is not None
    return messages[-1]["content"]


def test_first_rows_of_a_file(eval_config: Build, write_jsonl: Write) -> None:
    path = write_jsonl([row(n) for n in range(5)])
    task = load(eval_config(data=path, num_samples=3))
    assert [sample.sample_id for sample in task.samples] == ["gsm8k-0000", "gsm8k-0001", "gsm8k-0002"]
    assert [sample.reference for sample in task.samples] == ["0", "1", "2"]
    assert task.data.name == "gsm8k"
    assert (task.data.path, task.data.packaged, task.data.num_samples) == (path, False, 3)
    assert task.data.sha256 == hashlib.sha256(Path(path).read_bytes()).hexdigest()
    assert task.scorers == ("official", "last_number", "boxed", "robust")
    assert (task.headline, task.notices, task.stop) == ("robust", (), ())


def test_more_samples_than_rows_takes_all_and_says_so(eval_config: Build, write_jsonl: Write) -> None:
    task = load(eval_config(data=write_jsonl([row(1), row(2)]), num_samples=10))
    assert len(task.samples) == task.data.num_samples == 2
    assert task.notices == ("eval.num_samples: 10 asked for, the data has 2: all of them run",)


def test_byte_order_mark_crlf_and_blank_lines(eval_config: Build, tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    lines = ['{"question": "a\u2028b?", "answer": "#### 1"}', "", "   ", '{"question": "c?", "answer": "#### 2"}']
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode() + b"\r\n")
    task = load(eval_config(data=str(path), instruction=None))
    assert [sample.reference for sample in task.samples] == ["1", "2"]
    assert user_text(task) == "a\u2028b?"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{not json", "line 2: not JSON"),
        ("[1, 2]", "line 2: not a JSON object"),
        ('"text"', "line 2: not a JSON object"),
        ("9" * 5000, "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ('{"question": "q"}', 'line 2: no "answer"'),
        ('{"answer": "#### 1"}', 'line 2: no "question"'),
        ('{"question": 3, "answer": "#### 1"}', 'line 2: "question" must be a text'),
        ('{"question": " ", "answer": "#### 1"}', 'line 2: "question" must be a text that is not blank'),
        ('{"question": "\\ud800", "answer": "#### 1"}', "line 2: the text holds half of a surrogate pair"),
        ('{"question": "q", "answer": "It is 5."}', 'line 2: "answer" does not end in "#### N"'),
        ('{"question": "q", "answer": "#### five"}', 'line 2: "answer" does not end in "#### N"'),
    ],
)
def test_a_bad_line_is_named(line: str, complaint: str, eval_config: Build, write_jsonl: Write) -> None:
    path = write_jsonl([row(1), line])
    with pytest.raises(UserError) as error:
        load(eval_config(data=path))
    assert path in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_bad_files(eval_config: Build, tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.jsonl", tmp_path / "latin.jsonl"
    empty.write_text("\n  \n")
    latin.write_bytes('{"question": "é", "answer": "#### 1"}'.encode("latin-1"))
    for path, complaint in [
        (empty, "holds no rows"),
        (latin, "line 1: not UTF-8"),
        (tmp_path / "missing.jsonl", "eval.data: .* does not exist"),
        (tmp_path, "eval.data: can't read"),
    ]:
        with pytest.raises(UserError, match=complaint):
            load(eval_config(data=str(path)))


def test_chat_asks_the_question_and_then_the_instruction(eval_config: Build, write_jsonl: Write) -> None:
    path = write_jsonl([row(1)])
    boxed = "Please reason step by step, and put your final answer within \\boxed{}."
    assert user_text(load(eval_config(data=path))) == f"What is 1?\n{boxed}"
    assert user_text(load(eval_config(data=path), packaged_model=True)) == "What is 1?"
    assert user_text(load(eval_config(data=path, instruction=None))) == "What is 1?"
    assert user_text(load(eval_config(data=path, instruction="Be brief."), packaged_model=True)) == (
        "What is 1?\nBe brief."
    )


def test_chat_shots_are_turns(eval_config: Build, write_jsonl: Write) -> None:
    data, train = write_jsonl([row(1)]), write_jsonl([row(n) for n in range(7, 10)], "train.jsonl")
    task = load(eval_config(data=data, fewshot_data=train, num_fewshot=2))
    assert task.samples[0].messages == (
        {"role": "user", "content": "What is 7?"},
        {"role": "assistant", "content": "It is <<7=7>>7.\n#### 7"},
        {"role": "user", "content": "What is 8?"},
        {"role": "assistant", "content": "It is <<8=8>>8.\n#### 8"},
        {"role": "user", "content": "What is 1?"},
    )


def test_completion_is_the_prompt_of_the_usual_scripts(eval_config: Build, write_jsonl: Write) -> None:
    data, train = write_jsonl([row(1)]), write_jsonl([row(7)], "train.jsonl")
    config = eval_config(data=data, fewshot_data=train, num_fewshot=1, protocol="completion")
    task = load(config)
    assert task.samples[0].prompt == (
        "Question: What is 7?\nAnswer: It is <<7=7>>7.\n#### 7\n\nQuestion: What is 1?\nAnswer:"
    )
    assert task.samples[0].messages is None
    assert task.stop == ("Question", "Assistant:", "<|separator|>")
    assert load(eval_config(data=data, protocol="completion", stop=("END",))).stop == ("END",)
    assert load(eval_config(data=data, protocol="completion", stop=())).stop == ()
    with pytest.raises(UserError, match=r"eval\.instruction"):
        load(eval_config(data=data, protocol="completion", instruction="Be brief."))


def test_shots_never_come_from_the_test_file(eval_config: Build, write_jsonl: Write) -> None:
    data = write_jsonl([row(1), row(2)])
    with pytest.raises(UserError, match=r"give eval\.fewshot_data=FILE\.jsonl"):
        load(eval_config(data=data, num_fewshot=1))
    with pytest.raises(UserError, match="has problems of the test data"):
        load(eval_config(data=data, num_fewshot=1, fewshot_data=data))
    with pytest.raises(UserError, match="has problems of the test data"):
        load(eval_config(data=data, num_samples=1, num_fewshot=1, fewshot_data=write_jsonl([row(2)], "t.jsonl")))
    with pytest.raises(UserError, match="2 shots asked for, the training rows are 1"):
        load(eval_config(data=data, num_fewshot=2, fewshot_data=write_jsonl([row(7)], "t.jsonl")))


def test_packaged_problems_are_called_what_they_are(
    eval_config: Build, tmp_path: Path, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gsm8k, "PACKAGED_PROBLEMS", tmp_path)
    test = write_jsonl([row(1), row(2)], "test.jsonl")
    write_jsonl([row(7)], "train.jsonl")
    task = load(eval_config(num_samples=1), packaged_model=True)
    assert (task.data.name, task.data.packaged, task.data.path) == ("nano_problems", True, test)
    assert task.samples[0].sample_id == "nano_problems-0000"
    assert any("not GSM8K" in notice for notice in task.notices)
    assert user_text(task) == "What is 1?"
    with_shots = load(eval_config(num_fewshot=1), packaged_model=True)
    assert with_shots.samples[0].messages is not None
    assert with_shots.samples[0].messages[0]["content"] == "What is 7?"
    assert load(eval_config(data=test)).data.name == "nano_problems"


def fake_hub(monkeypatch: pytest.MonkeyPatch, load_dataset: Callable) -> None:
    module = ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_a_real_model_without_a_file_takes_the_hub(eval_config: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = {"test": [row(1), row(2)], "train": [row(7)]}
    fake_hub(monkeypatch, lambda name, config, split: splits[split] if name == "openai/gsm8k" else None)
    task = load(eval_config(num_fewshot=1))
    assert (task.data.name, task.data.path, task.data.packaged) == ("gsm8k", None, False)
    assert task.data.sha256 is not None
    assert user_text(task, 1) == "What is 2?"


def test_an_unreachable_hub_says_to_give_a_file(
    eval_config: Build, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **options: object) -> None:
        logging.getLogger("huggingface_hub.utils").warning("Retrying in 1s [Retry 1/5].")
        raise ConnectionError("Couldn't reach\nthe hub")

    fake_hub(monkeypatch, fail)
    with pytest.raises(UserError, match=r"give eval\.data=FILE\.jsonl") as error:
        load(eval_config())
    assert "\n" not in str(error.value) and not caplog.records


def test_the_real_files_load(eval_config: Build, gsm8k_folder: Path) -> None:
    data, train = gsm8k_folder / "test.jsonl", gsm8k_folder / "train_first1500.jsonl"
    task = load(eval_config(data=str(data), fewshot_data=str(train), num_fewshot=5, protocol="completion"))
    assert len(task.samples) == 1319
    assert task.data.sha256 == "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
    references = [sample.reference for sample in task.samples]
    assert (references[489], references[1113]) == ("-10", "-3")
    assert "2880000" in references
    assert sum("," in (reference or "") for reference in references) == 14
    prompt = task.samples[0].prompt
    assert prompt is not None
    assert prompt.startswith("Question: Natalia sold clips to 48 of her friends")
    assert prompt.count("\nAnswer:") == 6
