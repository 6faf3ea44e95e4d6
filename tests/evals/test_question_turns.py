"""MT-Bench, Spec-Bench and conversations of one's own: rows become turns that follow each other, or are refused."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from specbench.errors import UserError
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Task, measured_requests, warmup_requests
from specbench.run_config import EvalConfig, SamplingConfig

Build = Callable[..., EvalConfig]
Write = Callable[..., str]
MODEL = EvalModel(is_packaged=False)


@pytest.fixture
def load(eval_config: Build) -> Callable[..., Task]:
    def build(name: str, **changes: object) -> Task:
        return load_task(eval_config(**{"name": name, "instruction": None, "scorer": None} | changes), MODEL)

    return build


def row(number: object, category: str = "math", turns: object = ("first", "then"), **more: object) -> dict:
    return {"question_id": number, "category": category, "turns": list(turns)} | more  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["mt_bench", "spec_bench"])
def test_turns_are_samples_of_one_conversation(name: str, load: Callable[..., Task], write_jsonl: Write) -> None:
    path = write_jsonl([row(81, reference=["one", "two"]), row("x", turns=["only"], reference=[["a", "b"]])])
    task = load(name, data=path)
    assert [(one.sample_id, one.turn, one.reference) for one in task.samples] == [
        (f"{name}-81", 0, "one"),
        (f"{name}-81", 1, "two"),
        (f"{name}-x", 0, '["a", "b"]'),
    ]
    assert task.samples[1].messages == ({"role": "user", "content": "then"},)
    assert (task.scorers, task.headline, task.data.name, task.data.num_samples) == ((), None, name, 2)


def test_requests_of_later_turns_follow_those_before(
    load: Callable[..., Task], write_jsonl: Write, sampling: SamplingConfig
) -> None:
    task = load("mt_bench", data=write_jsonl([row(1), row(2, turns=["a", "b", "c"])]))
    requests = measured_requests(task, sampling, repeats=2)
    follows = {request.request_id: request.follows for request in requests}
    assert follows["mt_bench-2-t2-r1"] == "mt_bench-2-t1-r1" and follows["mt_bench-1-t1-r0"] == "mt_bench-1-t0-r0"
    assert sum(one is None for one in follows.values()) == 4
    warmup = warmup_requests(task, sampling, 3)
    assert [request.turn for request in warmup] == [0, 0, 0] and all(one.follows is None for one in warmup)


def test_categories_come_in_turn_and_can_be_chosen(load: Callable[..., Task], write_jsonl: Write) -> None:
    path = write_jsonl([row(number, "ab"[number // 3], ["q"]) for number in range(6)])
    assert [one.sample_id[-1] for one in load("mt_bench", data=path, num_samples=4).samples] == ["0", "3", "1", "4"]
    assert [one.category for one in load("mt_bench", data=path, categories=("b",)).samples] == ["b"] * 3
    with pytest.raises(UserError, match="unknown category 'c'"):
        load("mt_bench", data=path, categories=("c",))
    assert "the data has 6" in load("mt_bench", data=path, num_samples=9).notices[0]


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (row(None), '"question_id" must be a number or a text'),
        (row(1, turns=[]), '"turns" must be a list of at least one text'),
        (row(1, turns=["a", " "]), '"turns" must be a list of at least one text'),
        ({"question_id": 1, "turns": ["a"]}, 'no "category"'),
    ],
)
def test_a_bad_row_is_refused_by_its_line(
    bad: dict, complaint: str, load: Callable[..., Task], write_jsonl: Write
) -> None:
    with pytest.raises(UserError) as error:
        load("spec_bench", data=write_jsonl([row(7), bad]))
    assert "line 2" in str(error.value) and complaint in str(error.value)


def test_an_id_that_is_there_twice(load: Callable[..., Task], write_jsonl: Write) -> None:
    with pytest.raises(UserError, match=r"line 2: the id '7' is taken by .* line 1"):
        load("spec_bench", data=write_jsonl([row(7), row("7")]))


def test_spec_bench_without_a_file_says_where_to_get_it(load: Callable[..., Task]) -> None:
    with pytest.raises(UserError, match=r"give data/spec_bench/question\.jsonl of the repository hemingkx/Spec-Bench"):
        load("spec_bench")


def test_mt_bench_from_the_hub(load: Callable[..., Task], monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("datasets")
    rows = [{"prompt_id": 81, "prompt": ["a", "b"], "category": "math", "reference": []}]
    module.load_dataset = lambda *args, **options: rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    task = load("mt_bench")
    assert [one.messages[0]["content"] for one in task.samples if one.messages] == ["a", "b"]
    assert task.samples[0].reference is None and task.data.path is None


def test_prompts_may_be_conversations(load: Callable[..., Task], write_jsonl: Write) -> None:
    path = write_jsonl([{"turns": ["a", "b"], "timestamp": 3.5}, {"prompt": "c"}])
    task = load("prompts", data=path, protocol=None)
    assert [(one.sample_id, one.turn) for one in task.samples] == [("0", 0), ("0", 1), ("1", 0)]
    assert task.samples[1].messages == ({"role": "user", "content": "b"},)
    assert len(load("prompts", data=path, protocol=None, num_samples=1).samples) == 2
    with pytest.raises(UserError, match='"turns" must be a list'):
        load("prompts", data=write_jsonl([{"turns": "a"}], "bad.jsonl"), protocol=None)


def test_the_real_mt_bench(load: Callable[..., Task], shared_data: Path) -> None:
    task = load("mt_bench", data=str(shared_data / "mt_bench" / "question.jsonl"))
    assert (len(task.samples), task.data.num_samples) == (160, 80)
    assert set(Counter(one.category for one in task.samples).values()) == {20}
    assert sum(one.reference is not None for one in task.samples) >= 60


def test_the_real_spec_bench(load: Callable[..., Task], shared_data: Path) -> None:
    task = load("spec_bench", data=str(shared_data / "spec_bench" / "question.jsonl"))
    by_category = Counter(one.category for one in task.samples)
    assert (task.data.num_samples, len(task.samples), len(by_category)) == (480, 560, 13)
    assert by_category["rag"] == 80 and by_category["writing"] == 20
    assert task.data.sha256 == "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
