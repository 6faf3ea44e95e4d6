"""Reading in pieces and in stages gives the bytes of the file; progress is told now and then."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specbench.engine.checkpoints import file_reader, load_progress
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.file_reader import FileReader
from specbench.engine.checkpoints.load_progress import LoadProgress
from specbench.errors import UserError


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    found = {
        "bf16": torch.randn(7, 33).bfloat16(),
        "fp32": torch.randn(50, 41),
        "fp16": torch.randn(5).half(),
        "one": torch.ones(()),
        "none": torch.ones(0, 4),
        "codes": torch.randint(0, 255, (9, 9), dtype=torch.uint8),
    }
    (tmp_path / "config.json").write_text("{}")
    save_file(found, tmp_path / "model.safetensors")
    return found


@pytest.mark.parametrize("piece", [1 << 23, 64])
def test_tensors_are_those_of_the_file(piece: int, tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "_PIECE_BYTES", piece)
    reader = FileReader(torch.device("cpu"))
    for name, entry in Checkpoint.open(tmp_path).tensors.items():
        found = reader.read(entry)
        assert found.dtype == tensors[name].dtype and torch.equal(found, tensors[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("piece", "stage"), [(1 << 23, 1 << 25), (64, 256), (100, 96)])
def test_stages_to_a_gpu(piece: int, stage: int, tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reader, "_PIECE_BYTES", piece)
    monkeypatch.setattr(file_reader, "_STAGED_BYTES", stage)
    reader = FileReader(torch.device("cuda"))
    found = {name: reader.read(entry) for name, entry in Checkpoint.open(tmp_path).tensors.items()}
    for name, tensor in found.items():
        assert tensor.is_cuda and torch.equal(tensor.cpu(), tensors[name])


def test_a_file_that_shrank_since_it_was_opened(tensors, tmp_path: Path) -> None:
    entry = Checkpoint.open(tmp_path).tensors["fp32"]
    os.truncate(entry.file, entry.offset + 100)
    with pytest.raises(UserError, match="before its last tensor does"):
        FileReader(torch.device("cpu")).read(entry)


def test_progress_is_told_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(load_progress.time, "monotonic", lambda: now_s[0])
    said: list[str] = []
    progress = LoadProgress(10_000_000_000, said.append)
    for passed_s in (1.0, 1.9, 2.0, 3.9, 5.0):
        now_s[0] = passed_s
        progress(1_000_000_000)
    assert said == ["loading weights: 3.0 of 10.0 GB, 1.5 GB/s", "loading weights: 5.0 of 10.0 GB, 1.0 GB/s"]
