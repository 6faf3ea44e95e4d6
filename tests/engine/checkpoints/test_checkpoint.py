"""What is wrong with a checkpoint folder is said in one line with file, tensor and shapes, before weights are read."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.layers.attention_backends.choose import make_backend
from specbench.engine.models.registry import build_model, check_checkpoint, load_model_config
from specbench.errors import UserError
from tests.engine.tiny_inkling import build_tiny_inkling

Change = Callable[[Path], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_tiny_inkling(tmp_path, num_hidden_layers=2, local_layer_ids=[0])


def change_tensors(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def change_config(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def problem_of(folder: Path, num_modules: int = 3) -> str:
    """The message of the UserError that opening and checking raises."""
    with pytest.raises(UserError) as raised:
        checkpoint = Checkpoint.open(folder)
        check_checkpoint(checkpoint, load_model_config(checkpoint), num_modules)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_whole_checkpoint_passes_and_is_indexed_from_headers(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    check_checkpoint(checkpoint, load_model_config(checkpoint), 3)
    entry = checkpoint.tensors["model.mtp.layers.1.input_proj.weight"]
    assert (entry.file.name, entry.dtype, entry.shape) == ("mtp.safetensors", "F32", (64, 128))
    assert [file.name for file in checkpoint.files] == ["model.safetensors", "mtp.safetensors"]


def test_no_folder(tmp_path: Path) -> None:
    assert "no such folder" in problem_of(tmp_path / "absent")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json: no such file" in problem_of(folder)


@pytest.mark.parametrize("text", ["{", "\xff\x00", "[1]", ""])
def test_config_that_is_not_a_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    message = problem_of(folder)
    assert "config.json" in message and "JSON" in message


def test_no_safetensors(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    assert "no *.safetensors file" in problem_of(folder)


def test_truncated_data(folder: Path) -> None:
    file = folder / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as stream:
        stream.truncate(size - 1)
    message = problem_of(folder)
    assert "model.safetensors: truncated" in message and f"{size} bytes" in message and f"holds {size - 1}" in message


@pytest.mark.parametrize("num_bytes", [0, 5, 200])
def test_truncated_header(folder: Path, num_bytes: int) -> None:
    with (folder / "mtp.safetensors").open("r+b") as stream:
        stream.truncate(num_bytes)
    assert "mtp.safetensors: truncated in its header" in problem_of(folder)


@pytest.mark.parametrize("header", [b"no json!", b"[1,2]   ", b'{"a": 1}', b'{"a":{"dtype":"F32","shape":[1]}}'])
def test_a_header_that_is_none(folder: Path, header: bytes) -> None:
    (folder / "mtp.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "mtp.safetensors: its header is not a safetensors header" in problem_of(folder)


def test_a_weight_that_is_not_finite(folder: Path) -> None:
    def spoil(tensors: dict) -> None:
        tensors["model.llm.norm.weight"][3] = float("nan")

    change_tensors(folder, "model.safetensors", spoil)
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(UserError, match=r"model\.safetensors: tensor model\.llm\.norm\.weight: .* not finite"):
        build_model(
            checkpoint, load_model_config(checkpoint), torch.float32, torch.device("cpu"), make_backend("torch")
        )


def test_missing_tensor(folder: Path) -> None:
    name = "model.llm.layers.1.mlp.experts.w2_weight"
    change_tensors(folder, "model.safetensors", lambda tensors: tensors.pop(name))
    message = problem_of(folder)
    assert f"tensor {name} [8, 64, 32] is missing" in message and str(folder) in message


def test_missing_module_matters_only_when_asked_for(folder: Path) -> None:
    name = "model.mtp.layers.2.input_proj.weight"
    change_tensors(folder, "mtp.safetensors", lambda tensors: tensors.pop(name))
    assert name in problem_of(folder, num_modules=3)
    checkpoint = Checkpoint.open(folder)
    check_checkpoint(checkpoint, load_model_config(checkpoint), 2)


def test_wrong_shape(folder: Path) -> None:
    name = "model.llm.layers.0.attn.wk_dv.weight"
    change_tensors(folder, "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(32, 64)}))
    message = problem_of(folder)
    assert f"model.safetensors: tensor {name} has shape [32, 64]" in message and "[64, 64]" in message


def test_quantised_tensor(folder: Path) -> None:
    name = "model.llm.unembed.weight"
    quantised = torch.zeros(256, 64, dtype=torch.uint8)
    change_tensors(folder, "model.safetensors", lambda tensors: tensors.update({name: quantised}))
    message = problem_of(folder)
    assert name in message and "U8" in message and "not quantised" in message


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("mtp.safetensors", "model.mtp.layers.0.surprise.weight"),
        ("mtp.safetensors", "model.mtp.layers.3.input_proj.weight"),
        ("model.safetensors", "model.llm.layers.0.attn.wq_du.bias"),
    ],
)
def test_unknown_tensor(folder: Path, file: str, name: str) -> None:
    change_tensors(folder, file, lambda tensors: tensors.update({name: torch.zeros(2, 3)}))
    message = problem_of(folder, num_modules=1)
    assert f"{file}: tensor {name} [2, 3] is unknown" in message and "did you mean" in message


def test_tensors_of_a_tower_that_is_not_run_are_ignored(folder: Path) -> None:
    towers = {"model.depth.final_norm.weight": torch.zeros(3)}
    change_tensors(folder, "model.safetensors", lambda tensors: tensors.update(towers))
    checkpoint = Checkpoint.open(folder)
    check_checkpoint(checkpoint, load_model_config(checkpoint), 3)


def test_chain_norm_while_disabled(folder: Path) -> None:
    name = "model.mtp.chain_norm.weight"
    change_tensors(folder, "mtp.safetensors", lambda tensors: tensors.update({name: torch.ones(64)}))
    message = problem_of(folder)
    assert f"tensor {name} [64]" in message and "chain_hidden_post_norm is false" in message


def test_chain_norm_missing_while_enabled(folder: Path) -> None:
    change_config(folder, lambda config: config["mtp_config"].update(chain_hidden_post_norm=True))
    assert "model.mtp.chain_norm.weight [64] is missing" in problem_of(folder)


def test_more_modules_than_there_are(folder: Path) -> None:
    message = problem_of(folder, num_modules=4)
    assert "has 3 MTP modules, 4 were asked for" in message


def test_the_same_tensor_twice(folder: Path) -> None:
    save_file({"model.llm.norm.weight": torch.ones(64)}, folder / "extra.safetensors")
    message = problem_of(folder)
    assert "model.llm.norm.weight is also in extra.safetensors" in message


def test_an_index_says_which_files_to_read(folder: Path) -> None:
    names = {file.name: list(load_file(file)) for file in sorted(folder.glob("*.safetensors"))}
    weight_map = {name: file for file, tensors in names.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    save_file({"model.llm.norm.weight": torch.ones(64)}, folder / "extra.safetensors")
    checkpoint = Checkpoint.open(folder)
    check_checkpoint(checkpoint, load_model_config(checkpoint), 3)
    (folder / "mtp.safetensors").unlink()
    assert "mtp.safetensors: named in model.safetensors.index.json but not there" in problem_of(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "key 'weight_map' is missing" in problem_of(folder)


def test_sha256_changes_with_config_and_weights(folder: Path) -> None:
    first = Checkpoint.open(folder).sha256()
    assert first == Checkpoint.open(folder).sha256()
    change_tensors(folder, "mtp.safetensors", lambda tensors: tensors["model.mtp.layers.0.input_proj.weight"].add_(1))
    second = Checkpoint.open(folder).sha256()
    change_config(folder, lambda config: config.update(eos_token_id=7))
    third = Checkpoint.open(folder).sha256()
    assert len({first, second, third}) == 3 and len(first) == 64


def test_reader_stacks_rows_casts_and_counts(folder: Path) -> None:
    reader = WeightReader(Checkpoint.open(folder), torch.bfloat16, torch.device("cpu"))
    prefix = "model.llm.layers.0.attn."
    stacked = reader.read_rows([prefix + "wq_du.weight", prefix + "wr_du.weight"])
    stored = load_file(folder / "model.safetensors")
    expected = torch.cat((stored[prefix + "wq_du.weight"], stored[prefix + "wr_du.weight"]))
    assert torch.equal(stacked, expected.bfloat16())
    assert reader.num_bytes == stacked.nbytes
    scale = reader.read("model.llm.layers.0.mlp.global_scale", torch.float32)
    assert scale.dtype == torch.float32 and reader.num_bytes == stacked.nbytes + 4


def test_checking_comes_without_torch() -> None:
    code = "import sys, specbench.engine.models.registry; print('torch' in sys.modules)"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "False"
