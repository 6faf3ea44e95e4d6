"""What a checkpoint's own sampling is, however much of it the file says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench.engine.checkpoints.generation_config import sampling_defaults
from specbench.errors import UserError

OFF = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20}, {"temperature": 0.6, "top_k": 20}),
        ({"temperature": 0.6, "min_p": 0.1}, {"temperature": 0.6, "min_p": 0.1}),
        ({"temperature": 0.0, "top_k": 5, "repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
    ],
)
def test_what_the_file_says(tmp_path: Path, values: dict, changes: dict) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values), encoding="utf-8")
    assert sampling_defaults(tmp_path) == OFF | changes


def test_no_file_is_greedy(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == OFF


def test_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"do_sample": true, "top_p": "high"}', encoding="utf-8")
    with pytest.raises(UserError, match="key top_p: expected a number, found 'high'"):
        sampling_defaults(tmp_path)
