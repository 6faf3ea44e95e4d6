"""Plain decoders over paged caches equal transformers, for every variation of their configs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.models.test_inkling import cut, random_ids, run_target
from tests.engine.paged_sequences import PagedSequences, load_target
from tests.engine.tiny_decoders import VARIATIONS, build_tiny_decoder, reference_logits

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
CHUNKINGS = ([60], [30, 1, 1, 1, 5, 3, 19], [1] * 60)


@pytest.mark.parametrize("name", VARIATIONS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    """Whole, in chunks and one by one."""
    folder, ids = build_tiny_decoder(tmp_path, name), random_ids(60)
    expected = reference_logits(folder, ids)
    target = load_target(folder)
    for sizes in CHUNKINGS:
        sequences = PagedSequences(target, 1, 64, 4)
        hidden = run_target(target, sequences, [{0: chunk} for chunk in cut(ids, sizes)])[0]
        logits = target.compute_logits(hidden)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen3 windows", "moe among dense layers"])
def test_mixed_batches_equal_single_sequences(name: str, tmp_path: Path) -> None:
    folder, rng = build_tiny_decoder(tmp_path, name), random.Random(0)
    target = load_target(folder)
    texts = {sequence: random_ids(rng.randrange(25, 60), seed=sequence) for sequence in range(4)}
    left = {sequence: list(ids) for sequence, ids in texts.items()}
    steps = []
    while any(left.values()):
        step = {}
        for sequence in rng.sample(range(4), rng.randrange(1, 5)):
            count = rng.choice([1, 1, 1, 4, 4, 9, 30])
            if left[sequence]:
                step[sequence], left[sequence] = left[sequence][:count], left[sequence][count:]
        if step:
            steps.append(step)
    hidden = run_target(target, PagedSequences(target, 4, 64, 8), steps)
    for sequence, ids in texts.items():
        expected = reference_logits(folder, ids)
        torch.testing.assert_close(target.compute_logits(hidden[sequence]), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["llama yarn", "qwen3 windows"])
def test_a_chunk_longer_than_a_segment_equals_transformers(name: str, tmp_path: Path) -> None:
    folder, ids = build_tiny_decoder(tmp_path, name), random_ids(300)
    target = load_target(folder)
    hidden = run_target(target, PagedSequences(target, 1, 320, 16), [{0: ids[:10]}, {0: ids[10:]}])[0]
    torch.testing.assert_close(target.compute_logits(hidden), reference_logits(folder, ids), **TOLERANCE)


def test_the_older_spelling_of_rotary_fields_gives_the_same_model(tmp_path: Path) -> None:
    folder, ids = build_tiny_decoder(tmp_path, "llama llama3"), random_ids(60)
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    old = config | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope | {"type": rope.pop("rope_type")}}
    (folder / "config.json").write_text(json.dumps(old))
    target = load_target(folder)
    hidden = run_target(target, PagedSequences(target, 1, 64, 4), [{0: ids}])[0]
    torch.testing.assert_close(target.compute_logits(hidden), reference_logits(folder, ids), **TOLERANCE)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_sharded_checkpoints_of_other_types(stored: torch.dtype, tmp_path: Path) -> None:
    folder, ids = build_tiny_decoder(tmp_path, "qwen3", stored, max_shard_size="50KB"), random_ids(40)
    assert len(list(folder.glob("*.safetensors"))) > 2
    target = load_target(folder)
    hidden = run_target(target, PagedSequences(target, 1, 64, 4), [{0: ids}])[0]
    torch.testing.assert_close(target.compute_logits(hidden), reference_logits(folder, ids), **TOLERANCE)


@pytest.mark.parametrize("name", ["llama biases", "qwen3 windows", "moe among dense layers"])
def test_bf16_stays_near(name: str, tmp_path: Path) -> None:
    folder, ids = build_tiny_decoder(tmp_path, name), random_ids(40)
    target = load_target(folder, torch.bfloat16)
    hidden = run_target(target, PagedSequences(target, 1, 64, 4), [{0: ids[:20]}, {0: ids[20:]}])[0]
    assert hidden.dtype == torch.bfloat16
    logits = target.compute_logits(hidden)
    assert logits.dtype == torch.float32
    cosine = torch.nn.functional.cosine_similarity(logits, reference_logits(folder, ids))
    assert cosine.min() > 0.99


def test_registered_groups_and_bytes(tmp_path: Path) -> None:
    target = load_target(build_tiny_decoder(tmp_path, "qwen3 windows"))
    assert [(g.name, g.kind, g.window, g.layers) for g in target.cache_groups()] == [
        ("target.full_attention", "full_attention", None, ("model.layers.1.",)),
        ("target.sliding_window", "sliding_window", 8, ("model.layers.0.", "model.layers.2.")),
    ]
    # keys and values of 2 heads of 16, fp32
    assert target.cache_groups()[0].bytes_per_token == 2 * 2 * 16 * 4
    stored = load_file(tmp_path / "model.safetensors")
    assert target.num_bytes == sum(tensor.nbytes for tensor in stored.values())
