"""Quantised checkpoints: every layout is dequantised to what its numbers mean, and the model runs on it unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbench.engine.checkpoints import dequantise as dequantise_module
from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.quantised import FP8, NVFP4, keep_in_codes, kept_bytes
from specbench.engine.checkpoints.random_weights import fill_at_random
from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.kernels.fp8_linear import converted
from specbench.engine.kernels.nvfp4_linear import converted_nvfp4
from specbench.engine.layers.linear import Fp8Matrix, Nvfp4Matrix
from specbench.engine.models.registry import num_parameters, open_checkpoint
from specbench.errors import UserError
from tests.engine.harness import make_engine, outputs, token_request
from tests.engine.models.test_inkling import random_ids
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

TINY_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 256,
    "num_hidden_layers": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
Tensors = dict[str, Tensor]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def random_fp8(*shape: int) -> Tensor:
    return (8 * randn(*shape)).to(torch.float8_e4m3fn)


def read(folder: Path, tensors: Tensors, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return WeightReader(Checkpoint.open(folder), dtype, torch.device("cpu")).read(name)


@pytest.mark.parametrize("elements", [1, 1 << 25])
@pytest.mark.parametrize("shape", [(300, 200), (128, 256)], ids=str)
def test_fp8_in_blocks(shape: tuple[int, int], elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dequantise_module, "_SLICE_ELEMENTS", elements)
    codes = random_fp8(*shape)
    scale = randn((shape[0] + 127) // 128, (shape[1] + 127) // 128).abs() + 0.1
    found = read(tmp_path, {"a.weight": codes, "a.weight_scale_inv": scale}, "a.weight")
    for row, column in ((0, 0), (127, 127), (shape[0] - 1, shape[1] - 1), (shape[0] - 1, 5)):
        expected = codes[row, column].float() * scale[row // 128, column // 128]
        assert found[row, column] == expected


@pytest.mark.parametrize("scale_shape", [(), (1,), (40,), (40, 1)], ids=str)
def test_fp8_by_row_and_by_one_number(scale_shape: tuple[int, ...], tmp_path: Path) -> None:
    codes, scale = random_fp8(40, 24), randn(*scale_shape).abs() + 0.1
    tensors = {"a.weight": codes, "a.weight_scale": scale, "a.input_scale": torch.ones(1)}
    expected = codes.float() * (scale.view(-1, 1) if scale.numel() > 1 else scale.view(()))
    torch.testing.assert_close(read(tmp_path, tensors, "a.weight"), expected, rtol=0, atol=0)
    assert list(Checkpoint.open(tmp_path).tensors) == ["a.weight"]


def test_nvfp4_by_hand(tmp_path: Path) -> None:
    """The byte 0x71 is 0.5, then 6; each 16 have a scale, and all have one."""
    codes = torch.tensor([[0x71, 0x9F] + [0] * 6 + [0x32] * 8], dtype=torch.uint8)
    block_scale = torch.tensor([[2.0, 0.25]]).to(torch.float8_e4m3fn)
    found = read(
        tmp_path, {"a.weight": codes, "a.weight_scale": block_scale, "a.weight_scale_2": torch.tensor(0.5)}, "a.weight"
    )
    assert found[0, :5].tolist() == [0.5, 6.0, -6.0, -0.5, 0.0]
    assert found[0, 16:20].tolist() == [0.125, 0.1875, 0.125, 0.1875]
    assert Checkpoint.open(tmp_path).tensors["a.weight"].shape == (1, 32)


def test_the_compressed_layout_divides_by_its_scale(tmp_path: Path) -> None:
    codes = torch.full((2, 8), 0x22, dtype=torch.uint8)
    parts = {
        "a.weight_packed": codes,
        "a.weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
        "a.weight_global_scale": torch.tensor([4.0]),
        "a.input_global_scale": torch.tensor([4.0]),
    }
    assert read(tmp_path, parts, "a.weight").eq(0.25).all()


def quantise_nvfp4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, block scales and one scale for each of the first dimension."""
    scale = weight.abs().amax((1, 2)) / (6 * 448)
    blocks = weight.unflatten(-1, (-1, 16)) / scale[:, None, None, None]
    block_scale = (blocks.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    scaled = blocks / block_scale.float().unsqueeze(-1).clamp_min(1e-9)
    magnitude = (scaled.abs().unsqueeze(-1) - torch.tensor(E2M1)).abs().argmin(-1)
    codes = (magnitude + 8 * (scaled < 0)).flatten(-2).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, block_scale, scale


def dequantised(codes: Tensor, block_scale: Tensor, scale: Tensor) -> Tensor:
    """The formula, a code at a time."""
    table = torch.tensor(E2M1 + [-value for value in E2M1])
    values = torch.empty(*codes.shape[:-1], 2 * codes.shape[-1])
    values[..., ::2], values[..., 1::2] = table[(codes % 16).long()], table[(codes // 16).long()]
    return values * block_scale.float().repeat_interleave(16, -1) * scale[:, None, None]


def test_inklings_experts(tmp_path: Path) -> None:
    """The layout of Inkling's own quantised checkpoints; the plain model of the same numbers says the same."""
    shape = {"hidden_size": 64, "intermediate_size": 32}
    plain, quantised = (build_tiny_inkling(tmp_path / name, **shape) for name in ("plain", "quantised"))
    stored, meant = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith(("experts.w13_weight", "experts.w2_weight"))]:
        if "shared" not in name:
            parts = quantise_nvfp4(stored[name])
            meant[name] = dequantised(*parts)
            stored |= dict(zip((name, f"{name}.scale", f"{name}.scale2"), parts, strict=True))
            stored[f"{name}.input_amax"] = torch.ones(1, dtype=torch.bfloat16)
            stored[f"{name}.original_shape"] = torch.tensor(meant[name].shape)
    assert any(name.endswith(".scale2") for name in stored)
    save_file(stored, quantised / "model.safetensors")
    save_file(meant, plain / "model.safetensors")
    assert num_parameters(Checkpoint.open(quantised)) == num_parameters(Checkpoint.open(plain))
    same_text(plain, quantised, k=2)


def test_experts_that_stay_in_codes_say_what_dequantised_ones_say(tmp_path: Path) -> None:
    folder = build_inkling_in_codes(tmp_path)
    engines = {way: make_engine(folder, 2, quantised_weights=way) for way in ("keep", "dequantise")}
    kept, dequantised = engines["keep"], engines["dequantise"]
    assert kept.memory.fixed_bytes["target_weights"] == kept.model.num_bytes < dequantised.model.num_bytes
    requests = [token_request("0", random_ids(20), 12), token_request("1", random_ids(7, seed=1), 12)]
    assert outputs(kept, requests) == outputs(dequantised, requests)


def build_inkling_in_codes(folder: Path) -> Path:
    """Its routed experts in NVFP4, those of the first sparse layer left out, in shapes that two ranks can share."""
    build_tiny_inkling(folder, hidden_size=128, intermediate_size=256)
    stored = load_file(folder / "model.safetensors")
    names = [name for name in stored if name.endswith((".experts.w13_weight", ".experts.w2_weight"))]
    for name in names:
        if ".layers.1." not in name:
            parts = quantise_nvfp4(stored.pop(name))
            stored |= dict(zip((name, f"{name}.scale", f"{name}.scale2"), parts, strict=True))
    save_file(stored, folder / "model.safetensors")
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which takes the CPU's tensors")
def test_experts_in_fp8_stay_in_codes_where_all_of_a_layer_are(tmp_path: Path) -> None:
    folder = build_moe_in_fp8(tmp_path)
    tensors = Checkpoint.open(folder).tensors
    kept = [name for name, entry in keep_in_codes(tensors).items() if entry.is_kept]
    assert sum(".experts." in name for name in kept) == 2 * 4 * 3
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    fewer = [name for name, entry in keep_in_codes(tensors).items() if entry.is_kept]
    assert {name.split(".")[2] for name in fewer if ".experts." in name} == {"0"}
    engines = {
        way: make_engine(folder, quantised_weights=way, attention_backend="triton") for way in ("keep", "dequantise")
    }
    kept_engine, dequantised = engines["keep"], engines["dequantise"]
    assert kept_engine.memory.fixed_bytes["target_weights"] == kept_engine.model.num_bytes
    assert kept_engine.model.num_bytes < 0.5 * dequantised.model.num_bytes
    requests = [token_request("0", random_ids(5), 2)]
    assert outputs(kept_engine, requests) == outputs(dequantised, requests)


def build_moe_in_fp8(folder: Path) -> Path:
    """Every projection of a tiny Qwen3 mixture of experts in FP8, in shapes that two ranks can share."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    config = TINY_QWEN3 | sizes | experts
    config |= {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    tensors: Tensors = {}
    for name, entry in open_checkpoint(folder, "random").tensors.items():
        weight = fill_at_random(torch.empty(entry.shape), name)
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    quantised = config | {"quantization_config": {"quant_method": "compressed-tensors"}}
    (folder / "config.json").write_text(json.dumps(quantised))
    return folder


def test_a_decoder_in_fp8(tmp_path: Path) -> None:
    """Qwen3's own FP8 layout: projections in blocks, all else as it was."""

    def to_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.full(((weight.shape[0] + 127) // 128, (weight.shape[1] + 127) // 128), 0.01)
        return (weight / 0.01).to(torch.float8_e4m3fn), scale

    plain, quantised = quantised_decoder(tmp_path, to_blocks, ".weight_scale_inv", lambda c, s: c.float() * 0.01)
    config = json.loads((quantised / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (quantised / "config.json").write_text(json.dumps(config))
    same_text(plain, quantised, k=0)


def quantised_decoder(
    folder: Path,
    quantise: Callable[[Tensor], tuple[Tensor, Tensor]],
    scale_end: str,
    meaning: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Path, Path]:
    """The same tiny Qwen3 twice: projections as codes, and as what the codes mean."""
    plain, quantised = (build_tiny_decoder(folder / name, "qwen3") for name in ("plain", "quantised"))
    stored, meant = load_file(plain / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        codes, scale = quantise(stored[name])
        meant[name] = meaning(codes, scale)
        stored |= {name: codes, name.removesuffix(".weight") + scale_end: scale}
    save_file(stored, quantised / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, plain / "model.safetensors", metadata={"format": "pt"})
    return plain, quantised


def same_text(plain: Path, quantised: Path, k: int) -> None:
    requests = [token_request(str(seed), random_ids(20, seed)) for seed in range(2)]
    assert outputs(make_engine(quantised, k), requests) == outputs(make_engine(plain, k), requests)


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3, 1), r"tensor a.weight \[40, 24\] does not fit its scales, a.weight_scale \[3, 1\]"),
        (None, None),
    ],
)
def test_scales_that_do_not_fit_and_codes_without_any(
    scale: Tensor | None, message: str | None, tmp_path: Path
) -> None:
    tensors = {"a.weight": random_fp8(40, 24)} | ({} if scale is None else {"a.weight_scale": scale})
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    if message is None:  # what is made of it is the business of who expects a weight there
        assert Checkpoint.open(tmp_path).tensors["a.weight"].dtype == "F8_E4M3"
        return
    with pytest.raises(UserError, match=message):
        Checkpoint.open(tmp_path)


def test_another_way_of_quantising_is_refused(tmp_path: Path) -> None:
    folder = build_tiny_decoder(tmp_path, "qwen3")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(UserError, match="quantization_config: weights quantised by awq are not implemented"):
        make_engine(folder)


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.5), torch.rand(256, 1) + 0.1, torch.rand(2, 3) + 0.1], ids=["all", "row", "block"]
)
def test_kept_codes_mean_what_dequantised_ones_do(scale: Tensor, tmp_path: Path) -> None:
    codes = random_fp8(256, 384)
    end = "weight_scale_inv" if scale.shape == (2, 3) else "weight_scale"
    folder = write_projection(tmp_path, {"weight": codes, end: scale})
    dequantised = WeightReader(Checkpoint.open(folder), torch.float32, torch.device("cpu")).read(PROJECTION)
    kept = replace(Checkpoint.open(folder), tensors=keep_in_codes(Checkpoint.open(folder).tensors))
    reader = WeightReader(kept, torch.bfloat16, torch.device("cpu"))
    matrix = reader.read_matrix([PROJECTION])
    assert isinstance(matrix, Fp8Matrix) and matrix.scale.shape == (256, 3)
    torch.testing.assert_close(converted(matrix.codes, matrix.scale), dequantised, rtol=0, atol=0)
    assert reader.num_bytes == kept_bytes(FP8, (256, 384)) == 256 * (384 + 12)


@pytest.mark.parametrize("end", ["weight_scale_2", "weight_global_scale"])
def test_kept_nvfp4_codes_mean_what_dequantised_ones_do(end: str, tmp_path: Path) -> None:
    codes, block_scale, scale = quantise_nvfp4(randn(1, 64, 256))
    is_modelopt = end == "weight_scale_2"
    parts = {
        "weight" if is_modelopt else "weight_packed": codes[0],
        "weight_scale": block_scale[0],
        end: scale if is_modelopt else scale.reciprocal(),
    }
    folder = write_projection(tmp_path, parts)
    dequantised = WeightReader(Checkpoint.open(folder), torch.float32, torch.device("cpu")).read(PROJECTION)
    kept = replace(Checkpoint.open(folder), tensors=keep_in_codes(Checkpoint.open(folder).tensors))
    reader = WeightReader(kept, torch.bfloat16, torch.device("cpu"))
    matrix = reader.read_matrix([PROJECTION])
    assert isinstance(matrix, Nvfp4Matrix)
    meant = converted_nvfp4(matrix.codes, matrix.block_scale, matrix.row_scale)
    torch.testing.assert_close(meant, dequantised, rtol=1e-6, atol=0)
    assert reader.num_bytes == kept_bytes(NVFP4, (64, 256)) == 64 * (128 + 16 + 4)


PROJECTION = "model.layers.0.self_attn.o_proj.weight"


def write_projection(folder: Path, parts: Tensors) -> Path:
    (folder / "config.json").write_text("{}")
    stem = PROJECTION.removesuffix("weight")
    save_file({stem + end: tensor for end, tensor in parts.items()}, folder / "model.safetensors")
    return folder


def test_kept_codes_that_are_no_numbers(tmp_path: Path) -> None:
    codes = random_fp8(128, 128)
    codes.view(torch.uint8)[5, 7] = 0xFF
    folder = write_projection(tmp_path, {"weight": codes, "weight_scale": torch.tensor(0.5)})
    kept = replace(Checkpoint.open(folder), tensors=keep_in_codes(Checkpoint.open(folder).tensors))
    with pytest.raises(UserError, match="values that are not finite"):
        WeightReader(kept, torch.bfloat16, torch.device("cpu")).read_matrix([PROJECTION])


def test_products_are_kept_as_a_whole_or_not_at_all() -> None:
    def entry(name: str, dtype: str, inner: int = 256) -> TensorEntry:
        return TensorEntry(name, Path(), dtype, (128, inner))

    layers = {"a.q_proj.weight": FP8, "a.k_proj.weight": FP8, "a.v_proj.weight": "BF16", "a.o_proj.weight": FP8}
    tensors = {name: entry(name, dtype) for name, dtype in layers.items()}
    tensors["a.experts.0.down_proj.weight"] = entry("a.experts.0.down_proj.weight", FP8)
    tensors["b.down_proj.weight"] = entry("b.down_proj.weight", FP8, inner=200)
    assert [name for name, one in keep_in_codes(tensors).items() if one.is_kept] == ["a.o_proj.weight"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter, which takes the CPU's tensors")
def test_a_model_in_codes_says_what_the_dequantised_one_says(tmp_path: Path) -> None:
    """Products with codes, in Triton's interpreter; what is held is what was predicted, half of bf16 and some."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = TINY_QWEN3 | sizes
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engines = {
        way: make_engine(tmp_path, load="random", quantised_weights=way, attention_backend="triton")
        for way in ("keep", "dequantise")
    }
    kept, dequantised = engines["keep"], engines["dequantise"]
    assert kept.memory.fixed_bytes["target_weights"] == kept.model.num_bytes < dequantised.model.num_bytes
    requests = [token_request("0", random_ids(4), 3)]
    assert outputs(kept, requests) == outputs(dequantised, requests)
