"""Whatever stands in a field of config.json or of a file's header, the checkpoint is taken or refused in one line."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specbench.engine.models.registry import check_checkpoint, load_model_config, open_checkpoint
from specbench.errors import UserError
from tests.engine.checkpoints.quantised_decoders import build_quantised_qwen3
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

OF_CONFIG = (None, -1, 0, 1, 1.5, 10**7, 2**70, 1e300, math.nan, "16", "", [], [1], {}, {"a": 1}, True)
OF_HEADER = {
    "dtype": ("F99", "U8", "F8_E4M3", "I64", 3, None),
    "shape": ([], [0], [1], [-1, 2], [1.5], [2**62, 2**62], "a", None),
    "data_offsets": ([0, 0], [5, 1], [-4, 4], [0], [0, 2**62], ["a", "b"], None),
}
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "inkling": build_tiny_inkling,
    "fp8": lambda folder: build_quantised_qwen3(folder, "fp8"),
    "nvfp4": lambda folder: build_quantised_qwen3(folder, "nvfp4"),
    "experts": lambda folder: build_tiny_decoder(folder, "moe among dense layers"),
    "yarn": lambda folder: build_tiny_decoder(folder, "llama yarn in full"),
}


def is_taken(folder: Path) -> bool:
    """Nothing but a UserError of one line says no."""
    try:
        checkpoint = open_checkpoint(folder, "checkpoint")
        config = load_model_config(checkpoint)
        check_checkpoint(checkpoint, config, num_modules=config.num_modules)
    except UserError as error:
        assert "\n" not in str(error)
        return False
    return True


def damaged_configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every field without its value and with others, those of objects inside included."""
    for key, value in config.items():
        yield {name: other for name, other in config.items() if name != key}
        for other in OF_CONFIG:
            yield config | {key: other}
        if isinstance(value, dict):
            for inner in damaged_configs(value):
                yield config | {key: inner}


@pytest.mark.parametrize("name", BUILDERS)
def test_any_value_of_config_json(name: str, tmp_path: Path) -> None:
    folder = BUILDERS[name](tmp_path)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    num_taken = num_refused = 0
    for damaged in damaged_configs(config):
        file.write_text(json.dumps(damaged))
        if is_taken(folder):
            num_taken += 1
        else:
            num_refused += 1
    assert num_taken >= 10 and num_refused > 50


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:start]), content[start:]


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
def test_any_value_of_a_header(name: str, tmp_path: Path) -> None:
    file = BUILDERS[name](tmp_path) / "model.safetensors"
    header, data = header_of(file)
    assert is_taken(tmp_path)
    for tensor in (one for one in header if ".layers.0." in one):
        for field, values in OF_HEADER.items():
            for value in values:
                if value == header[tensor][field] or (value == [1] and header[tensor][field] == []):
                    continue  # the same, or one number all the same
                damaged = copy.deepcopy(header)
                damaged[tensor][field] = value
                text = json.dumps(damaged).encode()
                file.write_bytes(struct.pack("<Q", len(text)) + text + data)
                assert not is_taken(tmp_path), (tensor, field, value)


def test_a_header_whose_sizes_do_not_fit_names_the_tensor(tmp_path: Path) -> None:
    file = build_quantised_qwen3(tmp_path, "fp8") / "model.safetensors"
    header, data = header_of(file)
    header["model.norm.weight"]["shape"] = [127]
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    with pytest.raises(UserError, match=r"tensor model.norm.weight .127. of F32 has 512 bytes by its header, not 508"):
        open_checkpoint(tmp_path, "checkpoint")


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}, {"a": ["b"]}])
def test_an_index_that_names_no_files(weight_map: object, tmp_path: Path) -> None:
    build_quantised_qwen3(tmp_path, "fp8")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="key 'weight_map' is missing, empty or no object of names"):
        open_checkpoint(tmp_path, "checkpoint")
