"""How models are split over ranks, without ranks: what is refused, which slices are read, what the full models take."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.weights import WeightReader
from specbench.engine.layers.attention_backends.choose import make_backend
from specbench.engine.layers.linear import Nvfp4Stack
from specbench.engine.layers.parallel import ALONE
from specbench.engine.models import registry
from specbench.engine.models.inkling import InklingModel, load_modules
from specbench.engine.models.inkling_config import parse_config
from specbench.engine.shard import Part, Shard, SplitCount, check_split
from specbench.errors import UserError
from specbench.model_choice import SHAPES_FOLDER
from tests.engine.ranks import rank_alone
from tests.engine.tiny_decoders import build_tiny_decoder
from tests.engine.tiny_inkling import build_tiny_inkling

#: The published sizes (see the reference page of the family).
INKLING: dict[str, Any] = {
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "hidden_size": 6144,
    "num_hidden_layers": 66,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 16,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "model_max_length": 1048576,
    "rms_norm_eps": 1e-6,
    "sconv_kernel_size": 4,
    "dense_mlp_idx": 2,
    "dense_intermediate_size": 24576,
    "intermediate_size": 3072,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 8.0,
    "logits_mup_width_multiplier": 24,
}
CONFIG = {
    "architectures": ["InklingForConditionalGeneration"],
    "eos_token_id": 200006,
    "text_config": INKLING,
    "mtp_config": {"num_nextn_predict_layers": 8, "local_layer_ids": [0, 2, 4, 5, 6, 7]},
}


@pytest.fixture(scope="module")
def inkling(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The full model's config and tensors, without their values."""
    folder = tmp_path_factory.mktemp("inkling")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return registry.open_checkpoint(folder, "random")


def test_ranges_cover_what_does_not_split_evenly():
    ranges = [Shard(rank, 4).range_of(250) for rank in range(4)]
    assert ranges == [(0, 63), (63, 126), (126, 189), (189, 250)]


def test_a_refusal_names_the_count_and_every_size_that_works(inkling: Checkpoint):
    heads, kv_heads = SplitCount(24, "heads"), SplitCount(4, "key-value heads", is_replicable=True)
    check_split([heads, kv_heads], 8)  # two ranks hold the same key-value head
    with pytest.raises(UserError, match="16 ranks cannot share 24 heads; say 1, 2, 4, 8, 12, 24"):
        check_split([heads, kv_heads], 16)
    with pytest.raises(UserError, match="4 ranks cannot share 48 columns in multiples of 8; say 1, 2, 3, 6"):
        check_split([SplitCount(48, "columns", unit=8)], 4)
    with pytest.raises(UserError, match="5 ranks cannot share 64 heads of global attention; say 1, 2, 4, 8, 16, 32"):
        registry.weight_parts(parse_config(inkling), 0, Shard(0, 5))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "whole_experts"),
    [
        ("inkling", False),
        ("inkling", True),
        ("llama biases", False),
        ("qwen3 tied and biased", False),
        ("moe among dense layers", False),
    ],
)
def test_ranks_together_read_every_tensor(name: str, whole_experts: bool, size: int, tmp_path: Path):
    """Side by side, the slices are the tensor; key-value heads that several ranks hold are read by each of them."""
    folder = build_tiny_inkling(tmp_path) if name == "inkling" else build_tiny_decoder(tmp_path, name)
    checkpoint = Checkpoint.open(folder)
    config = registry.load_model_config(checkpoint)
    num_sliced = 0
    for tensor in registry.FAMILIES[config.architecture].expected_tensors(config, config.num_modules).required:
        whole = WeightReader(checkpoint, torch.float32, torch.device("cpu")).read(tensor)
        slices, dims = [], set()
        for rank in range(size):
            parts = registry.weight_parts(config, config.num_modules, Shard(rank, size, whole_experts))
            reader = WeightReader(checkpoint, torch.float32, torch.device("cpu"), ALONE, parts)
            slices.append(reader.read(tensor))
            dims.add(parts[tensor].dim if tensor in parts else None)
        (dim,) = dims
        if dim is None:
            assert all(torch.equal(each, whole) for each in slices)
            continue
        num_sliced += 1
        num_copies = sum(each.shape[dim] for each in slices) // whole.shape[dim] or 1
        together = torch.cat(slices[::num_copies], dim)
        assert torch.equal(together, whole.narrow(dim, 0, together.shape[dim]))
        # Only padding of the vocabulary is read by nobody.
        assert together.shape[dim] == whole.shape[dim] or (tensor.endswith("embed.weight") and name == "inkling")
    assert num_sliced > 10


def test_ranks_with_whole_experts_read_their_own_alone(inkling: Checkpoint, tmp_path: Path):
    """Named one by one, or a range of a stack; of shared experts a part of the width."""
    checkpoint = Checkpoint.open(build_tiny_decoder(tmp_path, "moe"))
    config = registry.load_model_config(checkpoint)
    family = registry.FAMILIES[config.architecture]
    read = [
        family.expected_tensors(family.shard_config(config, Shard(rank, 4, True)), 0).required.items()
        for rank in range(4)
    ]
    of_experts = [{name: shape for name, shape in tensors if ".experts." in name} for tensors in read]
    assert [len(names) for names in of_experts] == [12, 12, 12, 12]  # 2 layers, 2 experts, 3 matrices
    assert len({name for names in of_experts for name in names}) == 48
    assert {shape for names in of_experts for shape in names.values()} == {(32, 64), (64, 32)}
    parts = registry.weight_parts(parse_config(inkling), 0, Shard(3, 8, True))
    prefix = "model.llm.layers.5.mlp."
    assert parts[prefix + "experts.w13_weight"] == parts[prefix + "experts.w2_weight"] == Part(0, 96, 128)
    assert parts[prefix + "shared_experts.shared_w13_weight"] == Part(1, 3 * 768, 4 * 768)
    assert prefix + "gate.weight" not in parts
    with pytest.raises(UserError, match="16 ranks cannot share 8 experts; say 1, 2, 4"):
        family.shard_config(dataclasses.replace(config, num_heads=16), Shard(0, 16, True))


class MetaWeights(WeightReader):
    """Tensors of the right shapes that hold nothing."""

    def __init__(
        self, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], shard: Shard, parts: dict[str, Part]
    ) -> None:
        super().__init__(checkpoint, torch.bfloat16, torch.device("meta"), rank_alone(shard), parts)
        self._shapes = shapes

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._parts[name].shape_of(self._shapes[name]) if name in self._parts else self._shapes[name]

    def read_stack(self, name: str) -> Nvfp4Stack:
        *leading, width = self._shape(name)
        stack = Nvfp4Stack(
            torch.empty(*leading, width // 2, dtype=torch.uint8, device="meta"),
            torch.empty(*leading, width // 16, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(leading[0], device="meta"),
        )
        self.num_bytes += stack.codes.nbytes + stack.block_scale.nbytes + stack.scale.nbytes
        return stack

    def _read_into(self, name: str, destination: Tensor | None, dtype: torch.dtype) -> Tensor:
        made = torch.empty(self._shape(name), dtype=dtype, device="meta")
        self.num_bytes += made.nbytes
        return made if destination is None else destination


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize(
    ("size", "target_gib", "modules_gib", "kv_heads"), [(4, 441.3, 3.3, (2, 4)), (8, 220.9, 2.2, (1, 2))]
)
def test_inkling_builds_on_ranks_and_its_memory_is_predicted(
    inkling: Checkpoint,
    size: int,
    target_gib: float,
    modules_gib: float,
    kv_heads: tuple[int, int],
    whole_experts: bool,
):
    """The full model in bf16, on the meta device; either way of sharing experts takes as much."""
    shard = Shard(size - 1, size, whole_experts)
    config = parse_config(inkling)
    family = registry.FAMILIES[config.architecture]
    own = family.shard_config(config, shard)
    weights = MetaWeights(
        inkling, dict(family.expected_tensors(config, 8).required), shard, registry.weight_parts(config, 8, shard)
    )
    target = InklingModel(own, weights, make_backend("torch"))
    modules = load_modules(weights, target, 8, ())
    target_bytes = registry.target_weight_bytes(inkling, "bfloat16", "meta", shard)
    module_bytes = registry.module_weight_bytes(inkling, "bfloat16", 8, shard)
    assert weights.num_bytes == target_bytes + module_bytes
    assert target_bytes / 2**30 == pytest.approx(target_gib, abs=0.05)
    assert module_bytes / 2**30 == pytest.approx(modules_gib, abs=0.05)
    (of_global,) = {streams for group in target.cache_groups() if group.window is None for streams in group.streams}
    (of_local,) = {streams for group in target.cache_groups() if group.window == 512 for streams in group.streams}
    assert (of_global[0].shape[1], of_local[0].shape[1]) == kv_heads
    convolutions = next(group for group in target.cache_groups() if group.kind == "short_conv")
    assert [stream.shape for stream in convolutions.streams[0][1:]] == [(6144 // size,), (6144 // size,)]
    assert modules.relative_extents.values() and dataclasses.is_dataclass(own)


@pytest.mark.parametrize("whole_experts", [False, True])
@pytest.mark.parametrize(("size", "target_gib"), [(4, 135.7), (8, 68.0)])
def test_inklings_experts_in_codes_build_on_ranks(size: int, target_gib: float, whole_experts: bool):
    """NVFP4 codes with their scales; the first sparse layer, shared experts and all else in bf16."""
    checkpoint = registry.open_checkpoint(SHAPES_FOLDER / "inkling_nvfp4", "random", "keep")
    shard = Shard(1, size, whole_experts)
    config = parse_config(checkpoint)
    family = registry.FAMILIES[config.architecture]
    shapes = dict(family.expected_tensors(config, 0).required)
    weights = MetaWeights(checkpoint, shapes, shard, registry.weight_parts(config, 0, shard))
    InklingModel(family.shard_config(config, shard), weights, make_backend("torch"))
    predicted = registry.target_weight_bytes(checkpoint, "bfloat16", "meta", shard)
    assert weights.num_bytes == predicted
    assert predicted / 2**30 == pytest.approx(target_gib, abs=0.05)


def test_experts_in_codes_that_cannot_be_shared_by_width(tmp_path: Path):
    """Whole ones can."""
    config = json.loads((SHAPES_FOLDER / "inkling_nvfp4" / "config.json").read_text())
    config["text_config"]["intermediate_size"] = 3 * 128
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = registry.open_checkpoint(tmp_path, "random", "keep")
    layer = r"model\.llm\.layers\.3\.mlp\.experts\.w2_weight \[256, 6144, 384\]: the 96 columns of a rank"
    with pytest.raises(UserError, match=f"the NVFP4 codes of {layer} .* say parallel\\.experts=whole, or dequantise"):
        registry.target_weight_bytes(checkpoint, "bfloat16", "meta", Shard(0, 4))
    assert registry.target_weight_bytes(checkpoint, "bfloat16", "meta", Shard(0, 4, True))


def test_only_what_lies_together_is_read(tmp_path: Path) -> None:
    """Rows and experts' widths by their own bytes; columns of a matrix by whole rows."""
    read: list[int] = []
    checkpoint = dataclasses.replace(Checkpoint.open(build_tiny_inkling(tmp_path)), on_read=read.append)
    config = registry.load_model_config(checkpoint)
    parts = registry.weight_parts(config, 0, Shard(1, 2))
    reader = WeightReader(checkpoint, torch.float32, torch.device("cpu"), ALONE, parts)
    for name, share in (("attn.wq_du.weight", 2), ("mlp.experts.w13_weight", 2), ("mlp.experts.w2_weight", 1)):
        tensor = f"model.llm.layers.1.{name}"
        read.clear()
        reader.read(tensor)
        assert sum(read) == checkpoint.tensors[tensor].num_bytes // share
