"""MiMo: the target is transformers' Qwen2, and its modules are the formula of their layers, written out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.models.registry import check_checkpoint, load_model_config, module_weight_bytes
from specbench.errors import UserError
from tests.engine.harness import make_engine, outputs, token_request
from tests.engine.models.test_inkling import cut, random_ids, run_target
from tests.engine.paged_sequences import PagedSequences, load_modules, load_target
from tests.engine.tiny_decoders import build_tiny_decoder, reference_logits

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDTH = 64, 4, 2, 16, 96


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_tiny_mimo(tmp_path, num_modules=2)


def build_tiny_mimo(folder: Path, num_modules: int) -> Path:
    """transformers' Qwen2 under another name, and modules of random tensors, none near its neutral value."""
    build_tiny_decoder(folder, "qwen2")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": num_modules}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for module in range(num_modules):
        for name, shape in module_shapes().items():
            tensor = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else 0.15)
            tensors[f"model.mtp_layers.{module}.{name}"] = tensor + name.endswith("norm.weight")
    save_file(tensors, folder / "mtp.safetensors", metadata={"format": "pt"})
    return folder


def module_shapes() -> dict[str, tuple[int, ...]]:
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    widths = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    return {
        **{f"{norm}.weight": (HIDDEN,) for norm in norms},
        "input_proj.weight": (HIDDEN, 2 * HIDDEN),
        **{f"self_attn.{name}_proj.weight": (width, HIDDEN) for name, width in widths.items()},
        **{f"self_attn.{name}_proj.bias": (width,) for name, width in widths.items()},
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (WIDTH, HIDDEN),
        "mlp.up_proj.weight": (WIDTH, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, WIDTH),
    }


class ModuleReference:
    """One module over a whole sequence: no cache, no fused matrix, heads one by one."""

    def __init__(self, folder: Path, module: int) -> None:
        prefix = f"model.mtp_layers.{module}."
        stored = load_file(folder / "mtp.safetensors")
        self.tensors = {name.removeprefix(prefix): t for name, t in stored.items() if name.startswith(prefix)}
        config = json.loads((folder / "config.json").read_text())
        self.eps = config["rms_norm_eps"]
        self.theta = config["rope_parameters"]["rope_theta"]

    def __call__(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        x = torch.cat((self._norm("hidden_layernorm", hidden), self._norm("token_layernorm", embeds)), 1)
        x = x @ self.tensors["input_proj.weight"].T
        x = x + self._attention(self._norm("input_layernorm", x))
        x = x + self._mlp(self._norm("post_attention_layernorm", x))
        return self._norm("final_layernorm", x)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.tensors[name + ".weight"]

    def _attention(self, x: Tensor) -> Tensor:
        query, key, value = (
            x @ self.tensors[f"self_attn.{name}_proj.weight"].T + self.tensors[f"self_attn.{name}_proj.bias"]
            for name in "qkv"
        )
        is_hidden = torch.ones(len(x), len(x)).triu(1).bool()
        heads = []
        for head in range(HEADS):
            kv_head = slice(head // (HEADS // KV_HEADS) * HEAD_DIM, (head // (HEADS // KV_HEADS) + 1) * HEAD_DIM)
            q = self._turn(query[:, head * HEAD_DIM : (head + 1) * HEAD_DIM])
            scores = q @ self._turn(key[:, kv_head]).T / HEAD_DIM**0.5
            heads.append(scores.masked_fill(is_hidden, -torch.inf).softmax(-1) @ value[:, kv_head])
        return torch.cat(heads, 1) @ self.tensors["self_attn.o_proj.weight"].T

    def _turn(self, x: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        angles = torch.arange(len(x))[:, None] * self.theta ** (-torch.arange(half) / half)
        first, second = x[:, :half], x[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), 1)

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.tensors[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return (F.silu(gate) * up) @ self.tensors["mlp.down_proj.weight"].T


def test_the_target_is_qwen2(folder: Path) -> None:
    ids, target = random_ids(40), load_target(folder)
    hidden = run_target(target, PagedSequences(target, 1, 64, 4), [{0: chunk} for chunk in cut(ids, [30, 9, 1])])[0]
    (folder / "mtp.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    )
    torch.testing.assert_close(target.compute_logits(hidden), reference_logits(folder, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("module", [0, 1])
@pytest.mark.parametrize("sizes", [[40], [30, 1, 4, 5]], ids=str)
def test_a_module_is_its_formula(folder: Path, module: int, sizes: list[int]) -> None:
    target = load_target(folder)
    modules = load_modules(folder, target, 2)
    assert modules.num_bytes == module_weight_bytes(Checkpoint.open(folder), "float32", 2)
    sequences = PagedSequences(modules, 1, 64, 4)
    embeds = target.embed(torch.tensor(random_ids(40)))
    hidden = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(2))
    rows, first = [], 0
    for size in sizes:
        metadata = sequences.metadata([0], [first], [size])
        part = slice(first, first + size)
        rows.append(modules.forward_module(module, embeds[part], hidden[part], metadata, sequences.caches))
        first += size
    torch.testing.assert_close(torch.cat(rows), ModuleReference(folder, module)(embeds, hidden), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("proposer", "k"), [("mtp_single", 3), ("mtp_multi", 2)])
def test_drafted_text_is_plain_text(folder: Path, proposer: str, k: int) -> None:
    requests = [token_request(str(seed), random_ids(20 + seed, seed)) for seed in range(3)]
    plain = outputs(make_engine(folder), requests)
    assert outputs(make_engine(folder, k, proposer=proposer), requests) == plain


def test_module_tensors_that_are_missing_or_misshapen(folder: Path) -> None:
    file = folder / "mtp.safetensors"
    tensors = load_file(file)
    name = "model.mtp_layers.1.input_proj.weight"
    save_file(tensors | {name: torch.zeros(HIDDEN, HIDDEN)}, file, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(folder)
    config = load_model_config(checkpoint)
    check_checkpoint(checkpoint, config, 1)  # the second module is not read
    with pytest.raises(UserError, match=f"tensor {name} has shape"):
        check_checkpoint(checkpoint, config, 2)
    with pytest.raises(UserError, match="has 2 MTP modules, 3 were asked for"):
        check_checkpoint(checkpoint, config, 3)
