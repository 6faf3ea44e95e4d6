"""SPEED-Bench: every layout gives the same prompts, placeholders are refused, and prompts are cut to exact lengths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbench.errors import UserError
from specbench.evals import speed_bench
from specbench.evals.registry import load_task
from specbench.evals.task import EvalModel, Task, measured_requests
from specbench.run_config import EvalConfig, SamplingConfig
from tests.evals.letter_tokenizer import LetterTokenizer

Build = Callable[..., EvalConfig]
MODEL = EvalModel(is_packaged=False, max_model_len=4096, load_tokenizer=LetterTokenizer)


@pytest.fixture
def build(eval_config: Build) -> Build:
    defaults = {
        "name": "speed_bench",
        "scorer": None,
        "instruction": None,
        "source_config": "throughput_1k",
        "osl": 64,
        "isl": 20,
        "truncate": False,
    }
    return lambda **changes: eval_config(**(defaults | changes))


def row(number: int, category: str = "mixed", *, turns: list | None = None) -> dict:
    return {"question_id": f"{number:032x}", "category": category, "turns": turns or [f"Prompt {number}"]}


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        # Metadata that the datasets library writes, of a kind that it may not know.
        table = pa.Table.from_pylist(rows).replace_schema_metadata({"huggingface": '{"info": {"features": 1}}'})
        pq.write_table(table, path)
    else:
        path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def texts(task: Task) -> list[str]:
    return [sample.messages[0]["content"] for sample in task.samples if sample.messages is not None]


ROWS = [row(1, "low_entropy"), row(2, "mixed"), row(3, "high_entropy")]
LAYOUTS = (
    "throughput_1k/test.parquet",
    "speed/throughput_1k/test.parquet",
    "throughput_1k/test-00000-of-00001.parquet",
    "throughput_1k.jsonl",
    "throughput_1k/test.jsonl",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(build: Build, tmp_path: Path, layout: str) -> None:
    path = write(tmp_path / layout, ROWS)
    by_folder, by_file = (load_task(build(data=str(data)), MODEL) for data in (tmp_path, path))
    assert by_folder == by_file
    assert texts(by_folder) == ["Prompt 1", "Prompt 2", "Prompt 3"]
    assert [sample.category for sample in by_folder.samples] == ["low_entropy", "mixed", "high_entropy"]
    assert by_folder.data.name == "speed_bench_throughput_1k"
    assert by_folder.data.sha256 == speed_bench._content_sha256(speed_bench._read_prompts(path))


def test_the_folder_of_a_configuration_itself(build: Build, tmp_path: Path) -> None:
    path = write(tmp_path / "throughput_1k" / "test.parquet", ROWS)
    assert len(load_task(build(data=str(path.parent)), MODEL).samples) == 3


def test_content_hash_is_of_content_and_may_be_asked_for(build: Build, tmp_path: Path) -> None:
    parquet = write(tmp_path / "a" / "test.parquet", ROWS)
    messages = [
        {key: value for key, value in one.items() if key != "turns"}
        | {"messages": [{"role": "user", "content": one["turns"][0]}]}
        for one in ROWS
    ]
    lines = write(tmp_path / "b.jsonl", messages)
    hashes = {load_task(build(data=str(path)), MODEL).data.sha256 for path in (parquet, lines)}
    assert len(hashes) == 1
    known = hashes.pop()
    task = load_task(build(data=str(parquet), sha256=known), MODEL)
    assert task.notices[-1] == f"content of throughput_1k (3 rows): sha256 {known}"
    with pytest.raises(UserError, match=r"eval\.sha256: the content of .* has "):
        load_task(build(data=str(write(tmp_path / "c.jsonl", ROWS[:2])), sha256=known), MODEL)


def test_placeholders_are_refused(build: Build, tmp_path: Path) -> None:
    masked = row(7, turns=["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"])
    path = write(tmp_path / "x.jsonl", [*ROWS, masked])
    with pytest.raises(UserError, match=r"1 of 4 rows of .* are placeholders, such as 0+7: their text must be fetched"):
        load_task(build(data=str(path)), MODEL)


def test_the_whole_configuration_has_no_notice_of_its_shape(build: Build, tmp_path: Path) -> None:
    whole = [row(n, speed_bench.TIERS[n // 512]) for n in range(1536)]
    task = load_task(build(data=str(write(tmp_path / "x.parquet", whole)), num_samples=4), MODEL)
    assert [notice.split(":")[0] for notice in task.notices] == ["content of throughput_1k (1,536 rows)"]
    # The tiers in turn, though the file has one after the other.
    assert [sample.category for sample in task.samples] == ["low_entropy", "mixed", "high_entropy", "low_entropy"]
    part = load_task(build(data=str(write(tmp_path / "y.parquet", whole[:-1]))), MODEL)
    assert part.notices[0].startswith("not the whole of throughput_1k: 1,535 rows (high_entropy 511, low_entropy 512")


def test_one_tier(build: Build, tmp_path: Path) -> None:
    path = str(write(tmp_path / "x.jsonl", ROWS))
    assert texts(load_task(build(data=path, categories=("high_entropy",)), MODEL)) == ["Prompt 3"]
    with pytest.raises(UserError, match=r"unknown category 'low_entropie': did you mean 'low_entropy'"):
        load_task(build(data=path, categories=("low_entropie",)), MODEL)


def test_cut_to_exact_lengths(build: Build, tmp_path: Path, sampling: SamplingConfig) -> None:
    rows = [row(1, turns=["a" * 100]), row(2, turns=["b" * 3, "more"]), row(3, turns=["c" * 17])]
    config = build(data=str(write(tmp_path / "x.jsonl", rows)), truncate=True)
    task = load_task(config, MODEL)
    prompts = [request.prompt_token_ids for request in measured_requests(task, sampling)]
    assert [len(ids) for ids in prompts if ids is not None] == [20, 6, 20]
    frame = LetterTokenizer()
    assert prompts[0] == tuple(frame.encode_chat([{"role": "user", "content": "a" * 17}]).token_ids)
    assert task.notices[1].startswith("1 of 3 prompts are shorter than eval.isl=20 (the shortest has 6 tokens)")
    assert task.notices[2] == "1 prompts have further turns, which eval.truncate=true leaves out"
    assert all(sample.max_output_tokens == 64 for sample in task.samples)


def test_qualitative_prompts_have_all_their_turns(build: Build, tmp_path: Path) -> None:
    rows = [row(1, "coding", turns=["Write it.", "Shorten it."]), row(2, "qa")]
    task = load_task(build(data=str(write(tmp_path / "x.jsonl", rows)), source_config="qualitative"), MODEL)
    assert [(sample.turn, sample.category) for sample in task.samples] == [(0, "coding"), (1, "coding"), (0, "qa")]
    assert texts(task)[:2] == ["Write it.", "Shorten it."]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ([row(1), row(1)], "has the question_id '0{31}1' 2 times"),
        ([{"question_id": "x"}], 'row needs "turns", a list of texts, or "messages"'),
        ([{"turns": [" "]}], 'row needs "turns", a list of texts, or "messages"'),
        ([{"messages": [{"role": "assistant", "content": "a"}]}], 'row needs "turns"'),
        ([{"messages": "a"}], 'row needs "turns"'),
    ],
)
def test_bad_rows(build: Build, tmp_path: Path, content: list, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        load_task(build(data=str(write(tmp_path / "x.jsonl", content))), MODEL)


def test_bad_places(build: Build, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no throughput_1k: looked for throughput_1k/test"):
        load_task(build(data=str(tmp_path)), MODEL)
    with pytest.raises(UserError, match="does not exist"):
        load_task(build(data=str(tmp_path / "no")), MODEL)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        load_task(build(data=str(tmp_path / "x.parquet")), MODEL)
    with pytest.raises(UserError, match=r"say eval=fixed_length for home-made prompts"):
        load_task(build(), MODEL)


def test_the_packaged_model_takes_prompts_of_our_own_under_their_own_name(build: Build) -> None:
    packaged = EvalModel(is_packaged=True, max_model_len=4096, load_tokenizer=LetterTokenizer)
    task = load_task(build(isl=500, num_samples=3, truncate=True), packaged)
    assert (task.data.name, task.data.packaged) == ("fixed_length_500_64", True)
    assert "not SPEED-Bench" in task.notices[0]
    assert [len(sample.prompt_token_ids or ()) for sample in task.samples] == [500] * 3
    with pytest.raises(UserError, match="no qualitative prompts come with specbench"):
        load_task(build(source_config="qualitative"), packaged)
