"""Which folder runs: shapes for random weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specbench.errors import UserError
from specbench.model_choice import SHAPES_FOLDER, choose_draft, choose_model
from specbench.run_config import SHAPES, ModelConfig

NAMED = ModelConfig("hf", "mimo_7b", None, "auto", None, None, None, trust_remote_code=False, load="random")


def test_every_shape_is_there_and_says_that_it_is_random():
    assert sorted(folder.name for folder in SHAPES_FOLDER.iterdir()) == sorted(SHAPES)
    choice = choose_model(NAMED)
    assert (choice.path, choice.ran, choice.packaged) == (SHAPES_FOLDER / "mimo_7b", "mimo_7b-random-weights", False)
    assert choose_draft("qwen3_8b", "random").ran == "qwen3_8b-random-weights"


def test_a_folder_of_the_users_own_goes_before_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mimo_7b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert choose_model(NAMED).path == tmp_path / "mimo_7b"


def test_neither_a_folder_nor_a_shape():
    with pytest.raises(UserError, match="no folder, and no shape of specbench; did you mean 'mimo_7b'"):
        choose_model(dataclasses.replace(NAMED, checkpoint="mimo7b"))


def test_a_shape_has_no_weights_to_load():
    with pytest.raises(UserError, match=r"mimo_7b is a shape of specbench, without weights; say model\.load=random"):
        choose_model(dataclasses.replace(NAMED, load="checkpoint"))


@pytest.mark.parametrize("checkpoint", [None, "mimo_7b", "folder"])
def test_only_the_hub_has_revisions(checkpoint: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    name, load = ("inkling", "checkpoint") if checkpoint is None else ("hf", "random")
    named = dataclasses.replace(NAMED, name=name, checkpoint=checkpoint, load=load, revision="main")
    with pytest.raises(UserError, match=r"^model\.revision: .*, and only a repository on the hub has revisions"):
        choose_model(named)
