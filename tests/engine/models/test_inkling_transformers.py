"""Parity with transformers: the target, whole and cached, and its MTP modules with its known defects mended.

transformers feeds the modules the raw embedding, and lets its windowed modules see everything: both are put right here.
It also scales scores by position in the modules, which the engine does not, so the floor is out of reach there.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

# Earlier ones do not load these folders.
pytest.importorskip("transformers", minversion="5.24")
from transformers import InklingForConditionalGeneration, masking_utils
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from tests.engine.models.test_inkling import TOLERANCE, random_ids, run_modules, run_target
from tests.engine.oracle import Oracle
from tests.engine.paged_sequences import PagedSequences, load_target
from tests.engine.tiny_inkling import build_tiny_inkling


def load_reference(folder: Path) -> InklingForConditionalGeneration:
    return InklingForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("sizes", [[50], [20, 1, 1, 1, 5, 22]], ids=str)
def test_target_equals_transformers(tiny_folder: Path, sizes: list[int]) -> None:
    ids = random_ids(50)
    with torch.no_grad():
        reference = load_reference(tiny_folder)(torch.tensor([ids]), output_hidden_states=True)
    target = load_target(tiny_folder)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    steps = [{0: ids[start : start + size]} for start, size in zip(starts, sizes, strict=True)]
    hidden = run_target(target, PagedSequences(target, 1, 64, 4), steps)[0]
    torch.testing.assert_close(hidden, reference.hidden_states[-1][0], **TOLERANCE)
    torch.testing.assert_close(target.compute_logits(hidden), reference.logits[0], **TOLERANCE)


def test_a_folder_saved_by_transformers_gives_the_same_model(tiny_folder: Path, tmp_path: Path) -> None:
    load_reference(tiny_folder).save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert "layer_types" in text and "moe_intermediate_size" in text
    ids = random_ids(30)
    first, second = load_target(tiny_folder), load_target(tmp_path)
    steps = [{0: ids}]
    torch.testing.assert_close(
        run_target(first, PagedSequences(first, 1, 32, 4), steps)[0],
        run_target(second, PagedSequences(second, 1, 32, 4), steps)[0],
    )


def reference_drafts(folder: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], torch.Tensor]:
    """transformers' drafts after `ids` and the logits they were taken from, [num_modules, vocab]."""
    mended = {
        "sliding_attention": masking_utils.create_sliding_window_causal_mask,
        "linear_attention": masking_utils.create_recurrent_attention_mask,
    }
    monkeypatch.setitem(masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING, "hybrid_sliding", mended)
    model = load_reference(folder)
    head = MtpModel.from_pretrained(model)
    head.embed_tokens = model.get_input_embeddings()
    num_rows = len(ids) - 1
    with torch.no_grad():
        hidden = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states[-1]
        tokens, logits, *_ = head(
            input_ids=torch.tensor([ids[1:]]),
            last_hidden_states=hidden,
            attention_mask=None,
            position_ids=torch.arange(1, num_rows + 1)[None],
            mtp_cache=MtpCache(config=model.config.get_mtp_config()),
        )
    return tokens.flatten().tolist(), logits.squeeze(0)


def test_modules_equal_transformers_at_every_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build_tiny_inkling(tmp_path, num_modules=5, local_module_ids=(0, 2, 4), log_scaling_n_floor=1000)
    # transformers reads no second file where there is a model.safetensors.
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "mtp.safetensors")
    (folder / "mtp.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    rng = random.Random(3)
    ids = [rng.randrange(250) for _ in range(33)]
    drafts, expected = reference_drafts(folder, ids, monkeypatch)
    last_row = len(ids) - 2
    ours = run_modules(folder, ids + drafts[:-1], 5, [len(ids) + 4])
    oracles = Oracle(folder).mtp_chain(ids + drafts[:-1], 5)
    for module in range(5):
        torch.testing.assert_close(ours[module][1][last_row], expected[module], **TOLERANCE)
        torch.testing.assert_close(oracles[module][1][last_row], expected[module], **TOLERANCE)
        assert int(ours[module][1][last_row].argmax()) == drafts[module]
