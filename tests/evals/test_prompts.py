"""Rows of the user's own: taken as they stand, or refused by line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.errors import UserError
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel
from specbench.run_config import EvalConfig

Build = Callable[..., EvalConfig]
Write = Callable[..., str]

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


def test_the_three_forms(prompts_config: Build, write_jsonl: Write) -> None:
    path = write_jsonl(
        [
            {"prompt": "Once upon a time"},
            {"messages": CHAT, "id": "greeting", "category": "chat", "max_output_tokens": 5},
            {"prompt_token_ids": [1, 2, 3], "id": 12, "reference": "4"},
        ]
    )
    task = load_task(prompts_config(data=path), EvalModel(is_packaged=False))
    first, second, third = task.samples
    assert (first.sample_id, first.prompt, first.max_output_tokens) == ("0", "Once upon a time", 64)
    assert (second.sample_id, second.category, second.max_output_tokens) == ("greeting", "chat", 5)
    assert second.messages == tuple(CHAT)
    assert (third.sample_id, third.prompt_token_ids, third.reference) == ("12", (1, 2, 3), "4")
    assert (task.name, task.data.name, task.data.path, task.data.packaged) == ("prompts", "prompts", path, False)
    assert (task.scorers, task.headline, task.stop, task.notices) == ((), None, (), ())


def test_num_samples(prompts_config: Build, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "a"}, {"prompt": "b"}])
    assert len(load_task(prompts_config(data=path, num_samples=1), EvalModel(is_packaged=True)).samples) == 1
    task = load_task(prompts_config(data=path, num_samples=9), EvalModel(is_packaged=True))
    assert task.data.num_samples == 2
    assert "the data has 2" in task.notices[0]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{}", "found none"),
        ({"prompt": "a", "messages": CHAT}, "found prompt and messages"),
        ({"prompt": "a", "promt": "b"}, "unknown key \"promt\": did you mean 'prompt'?"),
        ({"prompt": ""}, '"prompt" must be a text that is not blank'),
        ({"prompt": "a", "audio": "clip.wav"}, '"audio" must be a list of at least one file name'),
        ({"prompt": "a", "audio": []}, '"audio" must be a list of at least one file name'),
        ({"prompt": ["a"]}, '"prompt" must be a text'),
        ({"messages": []}, '"messages" must be a list'),
        ({"messages": "hello"}, '"messages" must be a list'),
        ({"messages": ["hello"]}, "each message must be"),
        ({"messages": [{"role": "user"}]}, "each message must be"),
        ({"messages": [{"role": "user", "content": "a", "name": "b"}]}, "each message must be"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "unknown role 'robot'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "must be a text"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "nothing to answer"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "half of a surrogate pair"),
        ({"prompt_token_ids": []}, '"prompt_token_ids" must be a list'),
        ({"prompt_token_ids": [1, -2]}, "none below 0"),
        ({"prompt_token_ids": [1, True]}, "whole number"),
        ({"prompt_token_ids": [1.5]}, "whole number"),
        ({"prompt": "a", "max_output_tokens": 0}, '"max_output_tokens" must be a whole number'),
        ({"prompt": "a", "max_output_tokens": "5"}, '"max_output_tokens" must be a whole number'),
        ({"prompt": "a", "id": ""}, '"id" must be a text'),
        ({"prompt": "a", "id": True}, '"id" must be a text'),
        ({"prompt": "a", "id": "0"}, "the id '0' is taken by"),
    ],
)
def test_a_bad_line_is_named(line: str | dict, complaint: str, prompts_config: Build, write_jsonl: Write) -> None:
    path = write_jsonl([{"prompt": "fine"}, line])
    with pytest.raises(UserError) as error:
        load_task(prompts_config(data=path), EvalModel(is_packaged=False))
    assert f"{path} line 2: " in str(error.value)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_line_number_counts_blank_lines(prompts_config: Build, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n" + json.dumps({"prompt": "a"}) + "\n\nbad\n")
    with pytest.raises(UserError, match="line 5: not JSON"):
        load_task(prompts_config(data=str(path)), EvalModel(is_packaged=False))


def test_data_is_needed_and_nothing_is_scored(prompts_config: Build, write_jsonl: Write) -> None:
    with pytest.raises(UserError, match=r"give eval\.data=FILE\.jsonl"):
        load_task(prompts_config(), EvalModel(is_packaged=True))
    with pytest.raises(UserError, match="not scored"):
        load_task(prompts_config(data=write_jsonl([{"prompt": "a"}]), scorer="robust"), EvalModel(is_packaged=True))


def test_unknown_names_get_the_nearest_known(eval_config: Build) -> None:
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        load_task(eval_config(name="gsm8"), EvalModel(is_packaged=True))
    with pytest.raises(UserError, match="did you mean 'robust'"):
        load_task(eval_config(scorer="robustt"), EvalModel(is_packaged=True))


def test_clips_lie_beside_the_rows_and_belong_to_the_data(
    prompts_config: Build, write_jsonl: Write, tmp_path: Path
) -> None:
    path = write_jsonl([{"turns": ["What is it?", "Sure?"], "audio": ["a.wav", str(tmp_path / "b.wav")]}])
    clip = Path(path).parent / "a.wav"
    clip.write_bytes(b"one")
    hashes = []
    for content in (b"one", b"two"):
        clip.write_bytes(content)
        task = load_task(prompts_config(data=path), EvalModel(is_packaged=False))
        first, second = task.samples
        assert first.audio == (clip, tmp_path / "b.wav") and second.audio == ()
        hashes.append(task.data.sha256)
    assert hashes[0] != hashes[1]
