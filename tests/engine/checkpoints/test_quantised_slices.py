"""Ranks read their slices of codes and scales alone, and these mean what the slice of the whole means."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.quantised import FP8, NVFP4, keep_in_codes, kept_bytes
from specbench.engine.checkpoints.quantised_slices import check_kept_slices, stored_slices
from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.execution.engine_memory import plan_engine_memory
from specbench.engine.kernels.fp8_linear import converted
from specbench.engine.kernels.nvfp4_linear import converted_nvfp4
from specbench.engine.layers.linear import Fp8Matrix
from specbench.engine.layers.parallel import ALONE
from specbench.engine.shard import Part, Shard
from specbench.errors import UserError
from tests.engine.checkpoints.test_quantised import (
    PROJECTION,
    TINY_QWEN3,
    quantise_nvfp4,
    randn,
    random_fp8,
    write_projection,
)
from tests.engine.harness import engine_config

CPU = torch.device("cpu")
SCALES = {"all": torch.tensor(0.5), "row": randn(512, 1).abs() + 0.1, "block": randn(4, 4).abs() + 0.1}


def fp8_folder(folder: Path, kind: str) -> Path:
    end = "weight_scale_inv" if kind == "block" else "weight_scale"
    return write_projection(folder, {"weight": random_fp8(512, 512), end: SCALES[kind]})


def nvfp4_folder(folder: Path) -> Path:
    codes, block_scale, scale = quantise_nvfp4(randn(1, 512, 512))
    return write_projection(folder, {"weight": codes[0], "weight_scale": block_scale[0], "weight_scale_2": scale})


def reader(checkpoint: Checkpoint, parts: dict[str, Part] | None = None) -> WeightReader:
    return WeightReader(checkpoint, torch.float32, CPU, ALONE, parts)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", ["all", "row", "block", "nvfp4"])
def test_a_slice_is_that_of_the_whole(layout: str, dim: int, tmp_path: Path) -> None:
    folder = nvfp4_folder(tmp_path) if layout == "nvfp4" else fp8_folder(tmp_path, layout)
    plain = Checkpoint.open(folder)
    kept = replace(plain, tensors=keep_in_codes(plain.tensors))
    whole = reader(plain).read(PROJECTION)
    for start in (0, 128, 384):
        part = Part(dim, start, start + 128)
        read: list[int] = []
        sliced = reader(replace(plain, on_read=read.append), {PROJECTION: part}).read(PROJECTION)
        assert torch.equal(sliced, whole[part.index])
        if dim == 0:  # of columns whole rows are read, a few at a time
            assert sum(read) <= plain.num_bytes // 4 + 4
        matrix = reader(kept, {PROJECTION: part}).read_matrix([PROJECTION])
        if isinstance(matrix, Fp8Matrix):
            assert torch.equal(converted(matrix.codes, matrix.scale), sliced)
        else:
            assert not isinstance(matrix, Tensor)
            meant = converted_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale)
            torch.testing.assert_close(meant, sliced, rtol=1e-6, atol=0)
        of_codes = reader(kept, {PROJECTION: part})
        of_codes.read_matrix([PROJECTION])
        assert of_codes.num_bytes == kept_bytes(plain.tensors[PROJECTION].dtype, tuple(sliced.shape))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_a_slice_of_a_stack(dim: int, tmp_path: Path) -> None:
    """Inkling's experts: some of them, some rows, some columns."""
    codes, block_scale, scale = quantise_nvfp4(randn(4, 64, 96))
    (tmp_path / "config.json").write_text("{}")
    save_file({"w": codes, "w.scale": block_scale, "w.scale2": scale}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    whole = reader(checkpoint).read("w")
    for part in (Part(dim, 0, whole.shape[dim] // 2), Part(dim, whole.shape[dim] // 2, whole.shape[dim])):
        assert torch.equal(reader(checkpoint, {"w": part}).read("w"), whole[part.index])
    one = Part(0, 2, 3)
    assert torch.equal(reader(checkpoint, {"w": one}).read("w"), whole[2:3])


@pytest.mark.parametrize("part", [Part(1, 100, 200), Part(0, 64, 192)], ids=str)
def test_a_slice_that_ends_inside_a_block_is_read_with_the_whole(part: Part, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(fp8_folder(tmp_path, "block"))
    assert stored_slices(checkpoint.tensors[PROJECTION], part) is None
    whole = reader(checkpoint).read(PROJECTION)
    assert torch.equal(reader(checkpoint, {PROJECTION: part}).read(PROJECTION), whole[part.index])


def test_the_last_slice_may_end_inside_the_last_block(tmp_path: Path) -> None:
    parts = {"weight": random_fp8(300, 128), "weight_scale_inv": randn(3, 1).abs() + 0.1}
    checkpoint = Checkpoint.open(write_projection(tmp_path, parts))
    part = Part(0, 256, 300)
    slices = stored_slices(checkpoint.tensors[PROJECTION], part)
    assert slices == {"codes": Part(0, 256, 300), "scale": Part(0, 2, 3)}
    whole = reader(checkpoint).read(PROJECTION)
    assert torch.equal(reader(checkpoint, {PROJECTION: part}).read(PROJECTION), whole[part.index])


def test_codes_that_cannot_be_shared_are_refused_with_the_layer_and_the_numbers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = TINY_QWEN3 | sizes
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def planned(size: int) -> int:
        fields = {"load": "random", "quantised_weights": "keep", "shard": Shard(0, size)}
        return plan_engine_memory(engine_config(tmp_path, **fields)).total_bytes

    assert planned(2) < planned(1)
    with pytest.raises(
        UserError,
        match=r"model\.quantised_weights: 4 ranks cannot share the FP8 codes of model\.layers\.0\.self_attn\.o_proj\."
        r"weight \[128, 256\]: the 64 columns of a rank are no whole blocks of 128; say dequantise",
    ):
        planned(4)


def test_rows_are_shared_between_blocks_of_scales(tmp_path: Path) -> None:
    tensors = keep_in_codes(Checkpoint.open(fp8_folder(tmp_path, "block")).tensors)
    check_kept_slices(tensors, {PROJECTION: Part(0, 128, 256)}, Shard(1, 4))
    with pytest.raises(UserError, match=r"8 ranks cannot .*\.o_proj\.weight \[512, 512\]: the 64 rows of a rank"):
        check_kept_slices(tensors, {PROJECTION: Part(0, 64, 128)}, Shard(1, 8))
    by_row = keep_in_codes(Checkpoint.open(fp8_folder(tmp_path, "row")).tensors)
    check_kept_slices(by_row, {PROJECTION: Part(0, 64, 128)}, Shard(1, 8))


def test_nvfp4_bytes_of_a_slice() -> None:
    entry = TensorEntry("a", Path(), NVFP4, (64, 256))
    assert kept_bytes(NVFP4, entry.shape) == 2 * kept_bytes(NVFP4, (32, 256)) == 64 * (128 + 16 + 4)
    assert kept_bytes(FP8, (64, 128)) == 64 * (128 + 4)
