"""The packaged checkpoint: every tensor of the raw layout with its shape, small enough, loadable, and it can count."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from specbench.engine.checkpoints.checkpoint import Checkpoint
from tools.nano.card import card
from tools.nano.evaluate import (
    Prompt,
    Texts,
    encode_items,
    encode_prompts,
    grade,
    grade_items,
    greedy_texts,
    rates,
    read_problems,
    residual_rows,
    run_rounds,
)
from tools.nano.export import load_checkpoint
from tools.nano.listening import held_out_items
from tools.nano.model import NanoModel

ASSETS = Path(__file__).parents[2] / "specbench" / "assets"
FOLDER = ASSETS / "inkling_nano"


def test_the_recorded_hash_is_the_checkpoints():
    assert (FOLDER / "sha256.txt").read_text().strip() == Checkpoint.open(FOLDER).sha256()


def attention_shapes(text: dict, is_local: bool) -> dict[str, list[int]]:
    hidden = text["hidden_size"]
    prefix = "swa_" if is_local else ""
    heads, kv_heads, size = (text[prefix + name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    extent = text["sliding_window_size"] if is_local else text["rel_extent"]
    kv, kernel = kv_heads * size, text["sconv_kernel_size"]
    return {
        "attn_norm.weight": [hidden], "mlp_norm.weight": [hidden],
        "attn.wq_du.weight": [heads * size, hidden], "attn.wk_dv.weight": [kv, hidden],
        "attn.wv_dv.weight": [kv, hidden], "attn.wr_du.weight": [heads * text["d_rel"], hidden],
        "attn.wo_ud.weight": [hidden, heads * size], "attn.q_norm.weight": [size], "attn.k_norm.weight": [size],
        "attn.k_sconv.weight": [kv, 1, kernel], "attn.v_sconv.weight": [kv, 1, kernel],
        "attn.rel_logits_proj.proj": [text["d_rel"], extent],
        "attn_sconv.weight": [hidden, 1, kernel], "mlp_sconv.weight": [hidden, 1, kernel],
    }  # fmt: skip


def dense_shapes(text: dict) -> dict[str, list[int]]:
    hidden, width = text["hidden_size"], text["dense_intermediate_size"]
    return {"mlp.w13_dn.weight": [2 * width, hidden], "mlp.w2_md.weight": [hidden, width], "mlp.global_scale": [1]}


def moe_shapes(text: dict) -> dict[str, list[int]]:
    hidden, width = text["hidden_size"], text["intermediate_size"]
    routed, shared = text["n_routed_experts"], text["n_shared_experts"]
    return {
        "mlp.gate.weight": [routed + shared, hidden], "mlp.gate.bias": [routed], "mlp.gate.global_scale": [1],
        "mlp.experts.w13_weight": [routed, 2 * width, hidden], "mlp.experts.w2_weight": [routed, hidden, width],
        "mlp.shared_experts.shared_w13_weight": [shared, 2 * width, hidden],
        "mlp.shared_experts.shared_w2_weight": [shared, hidden, width],
    }  # fmt: skip


def expected_shapes(config: dict) -> dict[str, list[int]]:
    """Raw tensor names and shapes that follow from config.json."""
    text, mtp = config["text_config"], config["mtp_config"]
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    shapes = {"embed.weight": [vocab, hidden], "embed_norm.weight": [hidden], "norm.weight": [hidden],
              "unembed.weight": [text["unpadded_vocab_size"], hidden]}  # fmt: skip
    audio = config["audio_config"]
    for layer in range(text["num_hidden_layers"]):
        mlp = dense_shapes(text) if layer < text["dense_mlp_idx"] else moe_shapes(text)
        parts = {**attention_shapes(text, layer in text["local_layer_ids"]), **mlp}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    shapes = {f"model.llm.{name}": shape for name, shape in shapes.items()}
    shapes["model.audio.encoder.weight"] = [audio["n_mel_bins"] * audio["mel_vocab_size"], hidden]
    shapes["model.audio.final_norm.weight"] = [hidden]
    for depth in range(mtp["num_nextn_predict_layers"]):
        block = {**attention_shapes(text, depth in mtp["local_layer_ids"]), **dense_shapes(text)}
        parts = {f"transformer_block.{name}": shape for name, shape in block.items()}
        parts |= {
            "embed_norm.weight": [hidden],
            "hidden_norm.weight": [hidden],
            "input_proj.weight": [hidden, 2 * hidden],
        }
        shapes |= {f"model.mtp.layers.{depth}.{name}": shape for name, shape in parts.items()}
    return shapes


def stored_tensors() -> dict[str, tuple[str, list[int], str]]:
    """Name -> file, shape, dtype of every stored tensor."""
    found = {}
    for path in sorted(FOLDER.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                found[name] = (path.name, part.get_shape(), part.get_dtype())
    return found


@pytest.fixture(scope="module")
def model() -> NanoModel:
    torch.set_num_threads(1)
    return load_checkpoint(FOLDER)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_all_tensors_have_the_shapes_the_config_asks_for():
    config = json.loads((FOLDER / "config.json").read_text())
    stored = stored_tensors()
    assert {name: shape for name, (_, shape, _) in stored.items()} == expected_shapes(config)
    for name, (file_name, _, dtype) in stored.items():
        assert file_name == ("mtp.safetensors" if name.startswith("model.mtp.") else "model.safetensors")
        assert dtype == ("F32" if name.endswith(("gate.bias", "gate.global_scale")) else "BF16"), name
    assert config["mtp_config"]["local_layer_ids"] == [0, 2, 4, 5, 6, 7]
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file_name for name, (file_name, _, _) in stored.items()}


def test_the_folder_holds_at_most_twelve_and_a_half_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 12_500_000


def test_shared_norms_are_far_from_uniform(model):
    for norm in (model.llm.embed_norm, model.llm.norm):
        assert norm.weight.std() / norm.weight.mean() > 0.5


def test_chat_tokens_are_inklings_and_the_template_agrees(tokenizer):
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(FOLDER)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "Q"}]}]
    rendered = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == (
        "<|message_system|><|content_text|>S<|end_message|>"
        "<|message_user|><|content_text|>Q<|end_message|><|message_model|>"
    )
    listening = [{"role": "user", "content": [{"type": "audio", "path": "a.wav"}, {"type": "text", "text": "Q"}]}]
    assert loaded.apply_chat_template(listening, tokenize=False) == (
        "<|message_user|><|content_audio_input|><|audio_end|><|end_message|>"
        "<|message_user|><|content_text|>Q<|end_message|>"
    )
    answered = loaded.apply_chat_template([*messages, {"role": "assistant", "content": "A"}], tokenize=False)
    assert answered.endswith("<|message_model|><|content_text|>A<|end_message|><|content_model_end_sampling|>")
    config = json.loads((FOLDER / "config.json").read_text())
    assert loaded.eos_token_id == config["eos_token_id"] == tokenizer.token_to_id("<|content_model_end_sampling|>")
    assert [len(tokenizer.encode(text).ids) for text in ("<|content_thinking|>", "<|message_model|>", "2048")] == [
        1,
        1,
        4,
    ]
    assert tokenizer.get_vocab_size() == config["text_config"]["vocab_size"] == 2048


def test_it_solves_held_out_problems_and_its_drafts_are_taken(model, tokenizer):
    problems = read_problems(ASSETS / "nano_problems" / "test.jsonl", 3)
    end_token = tokenizer.token_to_id("<|content_model_end_sampling|>")
    with torch.no_grad():
        texts: Texts = greedy_texts(model, encode_prompts(tokenizer, problems), end_token, 160)
        residual = residual_rows(model, texts.tokens)
        right = rates(run_rounds(model, texts, residual, 8, None))[0]
        broken = rates(run_rounds(model, texts, residual, 8, "module_0_everywhere"))[0]
    assert texts.finished.all()
    assert sum(grade(tokenizer, texts, problems)) >= 2
    assert right[0] > 4.0
    assert broken[0] < right[0] - 1.5


def test_it_answers_held_out_questions_about_clips_by_ear(model, tokenizer):
    items = held_out_items(6)
    end_token = tokenizer.token_to_id("<|content_model_end_sampling|>")
    prompts = encode_items(tokenizer, items)
    swapped = [Prompt(prompt.ids, np.full_like(prompt.bins, 2)) for prompt in prompts]
    with torch.no_grad():
        texts: Texts = greedy_texts(model, prompts, end_token, 64)
        right = rates(run_rounds(model, texts, residual_rows(model, texts.tokens, texts.heard), 8, None))[0]
        deaf = greedy_texts(model, swapped, end_token, 64)
    assert texts.finished.all()
    assert sum(grade_items(tokenizer, texts, items)) >= 5
    assert sum(grade_items(tokenizer, deaf, items)) <= 4
    assert right[0] > 3.0


@pytest.mark.parametrize("place", [None, 0, 100, 268])
def test_logits_equal_transformers(model, place):
    """The reference implementation on the same files, with twenty frames of audio at `place`; it has no vision tower
    to load and says so."""
    transformers = pytest.importorskip("transformers", minversion="5.24")  # earlier ones do not load the folder
    transformers.logging.set_verbosity_error()
    reference = transformers.InklingForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    # Longer than the window and the bias extent.
    tokens = torch.randint(16, 2048, (1, 288), generator=generator)
    bins = torch.randint(0, 16, (1, 20, 80), generator=generator)
    inputs, heard = {}, None
    if place is not None:
        tokens[:, place : place + 20] = model.config.audio_token
        inputs = {"audio_input_ids": bins, "audio_input_ids_mask": torch.ones(1, 20, dtype=torch.bool)}
        heard = torch.zeros(1, 288, model.config.hidden_size)
        heard[:, place : place + 20] = model.hear(bins)
    with torch.no_grad():
        ours = model.logits(model.final_norm(residual_rows(model, tokens, heard)))
        theirs = reference(input_ids=tokens, **inputs).logits
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_the_model_card_is_the_one_that_was_measured():
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == card()
