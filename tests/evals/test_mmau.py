"""MMAU: where questions and clips come from, what is asked, what is grouped, and every way the data can be wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specbench.arrivals import ClosedLoad
from specbench.errors import UserError
from specbench.evals import mmau
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Task, measured_requests, rescore, score_result
from specbench.generate import GenerateListener, GenerateRequest, GenerateResult
from specbench.model_choice import PACKAGED_CHECKPOINT
from specbench.records import RequestRecord, SampleRecord
from specbench.reports.accuracy import accuracy_metrics
from specbench.run_config import EvalConfig, SamplingConfig
from tests.engine.harness import make_engine

Build = Callable[..., EvalConfig]


@pytest.fixture
def build(eval_config: Build) -> Build:
    defaults = {"name": "mmau", "scorer": "choice_parse", "instruction": None, "prompt": "official"}
    return lambda **changes: eval_config(**(defaults | changes))


def row(number: int, **changes: object) -> dict:
    fields = {
        "id": f"q{number}",
        "audio_id": f"./test-mini-audios/q{number}.wav",
        "question": "Who speaks?",
        "choices": ["Man", "Woman"],
        "answer": "Man",
        "task": ("music", "sound", "speech")[number % 3],
        "category": ["Reasoning"] if number == 0 else "Reasoning",
        "sub-category": "Speaker Count",
        "difficulty": "easy",
    }
    return {key: value for key, value in (fields | changes).items() if value is not None}


def write(folder: Path, rows: list, *, clips: bool = True, as_lines: bool = False) -> str:
    path = folder / ("questions.jsonl" if as_lines else "questions.json")
    path.write_text("\n".join(map(json.dumps, rows)) if as_lines else json.dumps(rows), encoding="utf-8")
    if clips:
        (folder / "test-mini-audios").mkdir(exist_ok=True)
        for one in rows:
            (folder / one["audio_id"]).write_bytes(one["id"].encode())
    return str(path)


def load(config: EvalConfig, packaged_model: bool = False) -> Task:
    return load_task(config, EvalModel(is_packaged=packaged_model))


def asked(task: Task, index: int = 0) -> str:
    messages = task.samples[index].messages
    assert messages is not None
    return messages[-1]["content"]


def test_questions_and_their_clips(build: Build, tmp_path: Path) -> None:
    task = load(build(data=write(tmp_path, [row(0), row(1), row(2)]), num_samples=2))
    first = task.samples[0]
    assert [sample.sample_id for sample in task.samples] == ["q0", "q1"]
    assert first.audio == (tmp_path / "test-mini-audios" / "q0.wav",)
    assert first.choices == ("Man", "Woman") and first.reference == "Man" and first.category == "music"
    assert first.groups == {
        "task": "music",
        "difficulty": "easy",
        "category": "Reasoning",
        "sub_category": "Speaker Count",
    }
    assert (task.data.name, task.data.revision, task.data.num_samples) == ("mmau", None, 2)
    assert task.scorers == ("official_string_match", "choice_parse") and task.notices == ()
    assert asked(task) == "Who speaks?  Select one option from the provided choices.\n['Man', 'Woman']."


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("options", "Who speaks? Please choose the answer from the following options: ['Man', 'Woman']."),
        ("letters", "Who speaks?\n(A) Man\n(B) Woman\nAnswer with one of the choices."),
        ("{question} {x}\\n{choices}", "Who speaks? {x}\n['Man', 'Woman']"),
    ],
)
def test_prompts(build: Build, tmp_path: Path, prompt: str, text: str) -> None:
    assert asked(load(build(data=write(tmp_path, [row(0)]), prompt=prompt))) == text


@pytest.mark.parametrize(
    ("prompt", "complaint"),
    [
        ("offical", "eval.prompt: unknown prompt 'offical': did you mean 'official'?"),
        ("{question}", "eval.prompt: a text of your own needs {question} and {choices}"),
    ],
)
def test_bad_prompts(build: Build, tmp_path: Path, prompt: str, complaint: str) -> None:
    with pytest.raises(UserError) as error:
        load(build(data=write(tmp_path, [row(0)]), prompt=prompt))
    assert str(error.value).startswith(complaint)


def test_a_folder_of_clips_by_name_and_json_lines(build: Build, tmp_path: Path) -> None:
    clips = tmp_path / "clips"
    clips.mkdir()
    (clips / "q0.wav").write_bytes(b"RIFF")
    data = write(tmp_path, [row(0)], clips=False, as_lines=True)
    assert load(build(data=data, audio=str(clips))).samples[0].audio == (clips / "q0.wav",)


def test_missing_clips_are_said_and_stay(build: Build, tmp_path: Path) -> None:
    data = write(tmp_path, [row(0), row(1), row(2)])
    (tmp_path / "test-mini-audios" / "q1.wav").unlink()
    task = load(build(data=data))
    assert len(task.samples) == 3
    gone = tmp_path / "test-mini-audios" / "q1.wav"
    assert task.notices == (f"1 of 3 clips are missing; their answers count as wrong: {gone}",)


def test_hash_covers_questions_and_clips(build: Build, tmp_path: Path) -> None:
    data = write(tmp_path, [row(0), row(1)])
    hashes = {load(build(data=data)).data.sha256}
    (tmp_path / "test-mini-audios" / "q1.wav").write_bytes(b"other")
    hashes.add(load(build(data=data)).data.sha256)
    Path(data).write_text(json.dumps([row(0), row(1, question="Who sings?")]), encoding="utf-8")
    hashes.add(load(build(data=data)).data.sha256)
    assert len(hashes) == 3


def test_answers_outside_the_choices_and_none_are_said(build: Build, tmp_path: Path) -> None:
    task = load(build(data=write(tmp_path, [row(0, answer="Dog"), row(1, answer=None), row(2)])))
    assert [sample.reference for sample in task.samples] == ["Dog", None, "Man"]
    assert task.notices == (
        "1 answers are none of their choices, which no answer can match: an older MMAU?",
        "1 questions come without an answer and are not scored",
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"choices": "Man"}, '"choices" must be a list of at least two texts'),
        ({"choices": ["Man"]}, '"choices" must be a list of at least two texts'),
        ({"choices": [str(n) for n in range(27)]}, '"choices" has 27 entries'),
        ({"question": " "}, '"question" must be a text that is not blank'),
        ({"id": "q1"}, "the id 'q1' is taken by"),
    ],
)
def test_bad_rows(build: Build, tmp_path: Path, changes: dict, complaint: str) -> None:
    with pytest.raises(UserError, match="row 2") as error:
        load(build(data=write(tmp_path, [row(1), row(2, **changes)])))
    assert complaint in str(error.value)


def test_bad_files_and_folders(build: Build, tmp_path: Path) -> None:
    data = write(tmp_path, [row(0)], clips=False)
    with pytest.raises(UserError, match=r"eval\.audio: none of the 1 clips"):
        load(build(data=data))
    with pytest.raises(UserError, match=r"eval\.audio: .*nowhere is not a folder"):
        load(build(data=data, audio=str(tmp_path / "nowhere")))
    with pytest.raises(UserError, match=r"give eval\.data=FILE, too"):
        load(build(audio=str(tmp_path)))
    for content, complaint in (("[1]", "row 1: not a JSON object"), ("[{", "is not JSON"), ("[]", "holds no rows")):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(UserError, match=complaint):
            load(build(data=str(tmp_path / "bad.json")))
    with pytest.raises(UserError, match=r"eval\.data: .*gone\.json does not exist"):
        load(build(data=str(tmp_path / "gone.json")))


def test_some_tasks_alone(build: Build, tmp_path: Path) -> None:
    data = write(tmp_path, [row(number) for number in range(6)])
    assert [sample.sample_id for sample in load(build(data=data, tasks=("speech", "music"))).samples] == [
        "q0",
        "q2",
        "q3",
        "q5",
    ]
    with pytest.raises(UserError, match=r"eval\.tasks: unknown task 'sond': did you mean 'sound'"):
        load(build(data=data, tasks=("sond",)))


def test_scorers_of_numbers_are_refused(build: Build, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"eval\.scorer: robust does not judge such answers; say one of official_string"
    ):
        load(build(data=write(tmp_path, [row(0)]), scorer="robust"))


def result(request: GenerateRequest, text: str, error: str | None = None) -> GenerateResult:
    record = RequestRecord(
        request.request_id, request.sample_id, 0, 0, False, request.category, 3, 0, 1, "error" if error else "stop",
        0.0, 0.0, 0.1, 0.2, 0, error,
    )  # fmt: skip
    return GenerateResult(record, [], [1], [2], text)


def accuracy(task: Task, results: list[GenerateResult], scorer: str) -> tuple[dict, list[SampleRecord]]:
    samples = [score_result(task, one) for one in results]
    return accuracy_metrics("mmau", scorer, [one.record for one in results], samples), samples


def test_failed_and_missing_answers_are_wrong_and_counted(
    build: Build, tmp_path: Path, sampling: SamplingConfig
) -> None:
    task = load(build(data=write(tmp_path, [row(number) for number in range(6)])))
    requests = measured_requests(task, sampling)
    assert requests[0].audio == task.samples[0].audio
    texts = ["Man", "(A)", "", "Woman", "The answer is Man."]
    results = [result(one, text) for one, text in zip(requests, texts, strict=False)]
    results.append(result(requests[5], "", error="no clip"))
    metrics, samples = accuracy(task, results, "choice_parse")
    assert (metrics["correct"], metrics["total"], metrics["invalid"]) == (3, 6, 2)
    assert metrics["scorers"]["official_string_match"]["correct"] == 2
    assert list(metrics["by"]) == ["task", "difficulty", "category", "sub_category"]
    assert {name: (one["correct"], one["total"]) for name, one in metrics["by"]["task"].items()} == {
        "music": (1, 2),
        "sound": (2, 2),
        "speech": (0, 2),
    }
    again = rescore(samples, "official_string_match")
    assert [one.score for one in again] == [one.score for one in samples]
    with pytest.raises(UserError, match="boxed does not judge such answers"):
        rescore(samples, "boxed")


def test_real_questions(build: Build, mmau_file: Path, tmp_path: Path, sampling: SamplingConfig) -> None:
    """The real file, with one clip of its thousand."""
    (tmp_path / "3fe64f3d-282c-4bc8-a753-68f8f6c35652.wav").write_bytes(b"RIFF")
    task = load(build(data=str(mmau_file), audio=str(tmp_path)))
    assert len(task.samples) == 1000 and task.data.revision == "v05.15.25"
    assert task.notices[0].startswith("999 of 1000 clips are missing")
    assert Counter(sample.groups["task"] for sample in task.samples) == {"music": 334, "sound": 333, "speech": 333}
    assert Counter(sample.groups["difficulty"] for sample in task.samples) == {"medium": 540, "hard": 236, "easy": 224}
    assert {sample.groups["category"] for sample in task.samples} == {"Reasoning", "Information Extraction"}
    assert len({sample.groups["sub_category"] for sample in task.samples}) == 27
    few = load(build(data=str(mmau_file), audio=str(tmp_path), num_samples=200)).samples
    assert Counter(sample.groups["task"] for sample in few) == {"sound": 67, "speech": 67, "music": 66}
    requests = measured_requests(task, sampling)
    first_choice = [result(one, task.sample_by_key[one.sample_id, 0].choices[0]) for one in requests]
    metrics, _ = accuracy(task, first_choice, "choice_parse")
    assert {name: entry["correct"] for name, entry in metrics["scorers"].items()} == {
        "choice_parse": 395,
        "official_string_match": 398,
    }


def test_the_hub(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {
            "context": {"bytes": b"RIFF", "path": None},
            "instruction": "Who speaks?",
            "choices": ["(A) Man", "(B) Woman"],
            "answer": "(B) Woman",
            "other_attributes": json.dumps({"id": "x", "task": "speech", "category": ["Reasoning"]}),
        }
    ]

    class Table(list):
        def cast_column(self, name: str, feature: object) -> Table:
            assert name == "context"
            return self

    def load_dataset(path: str, split: str, revision: str | None) -> Table:
        assert (path, split, revision) == (mmau.HUB_DATASET, "test", "ccd9696")
        return Table(rows)

    fake = SimpleNamespace(load_dataset=load_dataset, Audio=lambda decode: None)
    monkeypatch.setitem(sys.modules, "datasets", fake)
    task = load(build(revision="ccd9696"))
    sample = task.samples[0]
    assert (sample.choices, sample.reference, sample.audio) == (("Man", "Woman"), "Woman", (b"RIFF",))
    assert sample.groups == {"task": "speech", "category": "Reasoning"}
    assert (task.data.path, task.data.revision) == (None, "ccd9696")
    monkeypatch.delattr(fake, "load_dataset")
    with pytest.raises(UserError, match=r"give eval\.data=FILE and eval\.audio=DIR"):
        load(build())


def test_the_packaged_model_hears_its_questions(build: Build, tmp_path: Path, sampling: SamplingConfig) -> None:
    """With drafts, and with a clip of its ten that is no sound and one that is not there: each fails alone."""
    shutil.copytree(mmau.PACKAGED_QUESTIONS.parent, tmp_path / "nano", dirs_exist_ok=True)
    rows = json.loads((tmp_path / "nano" / "questions.json").read_text(encoding="utf-8"))[:10]
    (tmp_path / "nano" / rows[2]["audio_id"]).write_bytes(b"fLaC")
    (tmp_path / "nano" / rows[7]["audio_id"]).unlink()
    data = tmp_path / "nano" / "ten.json"
    data.write_text(json.dumps(rows), encoding="utf-8")
    task = load(build(data=str(data), max_output_tokens=96))
    greedy = replace(sampling, temperature=0.0, frequency_penalty=0.0, min_tokens=0, bad_words=(), stop_token_ids=())
    engine = make_engine(PACKAGED_CHECKPOINT, k=8, max_model_len=512, max_num_batched_tokens=128, block_size=16)
    results: list[GenerateResult] = []
    engine.generate(measured_requests(task, greedy), ClosedLoad(4), GenerateListener(results.append))
    failed = [one.record.sample_id for one in results if one.record.error is not None]
    assert sorted(failed) == sorted(rows[index]["id"] for index in (2, 7))
    metrics, _ = accuracy(task, results, "choice_parse")
    assert metrics["total"] == 10 and metrics["correct"] >= 7 and metrics["invalid"] == 2
    assert sum(step.num_accepted for one in results for step in one.verify_steps) > 0


def test_the_packaged_questions_with_the_packaged_model(build: Build) -> None:
    task = load(build(num_samples=30), packaged_model=True)
    assert (task.data.name, task.data.packaged, len(task.samples)) == ("nano_audio", True, 30)
    assert task.notices == ("nano_audio: made-up sounds and questions that come with specbench, not MMAU",)
    assert Counter(sample.groups["task"] for sample in task.samples) == {"music": 10, "sound": 10, "speech": 10}


def test_known_version_is_that_of_the_file(mmau_file: Path) -> None:
    assert hashlib.sha256(mmau_file.read_bytes()).hexdigest() in mmau.KNOWN_VERSIONS
