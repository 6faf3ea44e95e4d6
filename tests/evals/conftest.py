"""Data and configurations that the evals' tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.run_config import EvalConfig, SamplingConfig

REAL_DATA = Path(__file__).parents[2].parent / "shared" / "data"


@pytest.fixture(scope="session")
def gsm8k_folder() -> Path:
    """The real GSM8K files, where they are kept beside the repository."""
    folder = REAL_DATA / "gsm8k"
    if not folder.is_dir():
        pytest.skip("the real GSM8K is not here")
    return folder


@pytest.fixture(scope="session")
def gsm8k_labels(gsm8k_folder: Path) -> list[str]:
    """The text behind "#### " in every test row."""
    lines = (gsm8k_folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"].split("#### ")[1] for line in lines]


@pytest.fixture(scope="session")
def mmau_file() -> Path:
    """The real questions of MMAU test-mini, without clips."""
    file = REAL_DATA / "mmau" / "mmau-test-mini.json"
    if not file.is_file():
        pytest.skip("the real MMAU is not here")
    return file


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    """write_jsonl(rows, name) -> path of a file with these rows; a text is written as it stands."""

    def write(rows: list, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def eval_config() -> Callable[..., EvalConfig]:
    def build(**changes: object) -> EvalConfig:
        values: dict = {
            "name": "gsm8k",
            "data": None,
            "protocol": "chat",
            "num_samples": None,
            "num_fewshot": 0,
            "fewshot_data": None,
            "instruction": "auto",
            "max_output_tokens": 64,
            "scorer": "robust",
            "stop": None,
        }
        return EvalConfig(**(values | changes))

    return build


@pytest.fixture
def prompts_config(eval_config: Callable[..., EvalConfig]) -> Callable[..., EvalConfig]:
    def build(**changes: object) -> EvalConfig:
        defaults = {"name": "prompts", "protocol": None, "scorer": None, "instruction": None}
        return eval_config(**(defaults | changes))

    return build


@pytest.fixture
def sampling() -> SamplingConfig:
    return SamplingConfig(
        name="temperature1",
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.5,
        min_tokens=2,
        stop_token_ids=(9,),
        bad_words=("bad",),
        seed=7,
        ignore_eos=False,
    )
