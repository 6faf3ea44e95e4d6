"""The engine's Inkling over paged caches against the oracle: whole, chunked, batched, at every depth."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specbench.engine.models.inkling import InklingModel
from tests.engine.oracle import Oracle
from tests.engine.paged_sequences import PagedSequences, load_modules, load_target
from tests.engine.tiny_inkling import build_tiny_inkling

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def random_ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(250) for _ in range(length)]


@torch.inference_mode()
def run_target(
    target: InklingModel, sequences: PagedSequences, steps: list[dict[int, list[int]]]
) -> dict[int, torch.Tensor]:
    """Each step maps sequence -> its next token ids. Returns sequence -> hidden of all its rows."""
    lengths: dict[int, int] = {}
    hidden: dict[int, list[torch.Tensor]] = {}
    for step in steps:
        counts = [len(ids) for ids in step.values()]
        firsts = [lengths.get(sequence, 0) for sequence in step]
        metadata = sequences.metadata(list(step), firsts, counts)
        token_ids = torch.tensor([token for ids in step.values() for token in ids])
        output = target.forward(target.embed(token_ids), metadata, sequences.caches)
        for sequence, rows, first in zip(step, output.hidden_states.split(counts), firsts, strict=True):
            hidden.setdefault(sequence, []).append(rows)
            lengths[sequence] = first + len(rows)
    return {sequence: torch.cat(rows) for sequence, rows in hidden.items()}


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    assert sum(sizes) == len(ids)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [ids[start : start + size] for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize(
    "sizes", [[60], [1] * 60, [30, 1, 1, 1, 5, 3, 19], [16, 17, 27], [59, 1]], ids=lambda sizes: str(sizes[:4])
)
@pytest.mark.parametrize("block_size", [4, 16])
def test_any_chunking_equals_the_oracle(tiny_folder: Path, sizes: list[int], block_size: int) -> None:
    target, ids = load_target(tiny_folder), random_ids(60)
    expected_hidden, expected_logits = Oracle(tiny_folder).target_hidden_and_logits(ids)
    sequences = PagedSequences(target, 1, 64, block_size)
    hidden = run_target(target, sequences, [{0: chunk} for chunk in cut(ids, sizes)])[0]
    torch.testing.assert_close(hidden, expected_hidden, **TOLERANCE)
    logits = target.compute_logits(hidden)
    assert logits.dtype == torch.float32 and logits.shape == (60, 250)
    torch.testing.assert_close(logits, expected_logits, **TOLERANCE)


def test_a_chunk_longer_than_a_segment_equals_the_oracle(tiny_folder: Path) -> None:
    target, ids = load_target(tiny_folder), random_ids(300)
    sequences = PagedSequences(target, 1, 320, 16)
    hidden = run_target(target, sequences, [{0: ids[:10]}, {0: ids[10:]}])[0]
    torch.testing.assert_close(hidden, Oracle(tiny_folder).target_hidden_and_logits(ids)[0], **TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_batches_equal_single_sequences(tiny_folder: Path, seed: int) -> None:
    rng = random.Random(seed)
    target, oracle = load_target(tiny_folder), Oracle(tiny_folder)
    texts = {sequence: random_ids(rng.randrange(25, 60), seed=10 * seed + sequence) for sequence in range(4)}
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
    hidden = run_target(target, PagedSequences(target, 4, 64, 8, seed), steps)
    for sequence, ids in texts.items():
        torch.testing.assert_close(hidden[sequence], oracle.target_hidden_and_logits(ids)[0], **TOLERANCE)


def test_rejected_rows_leave_no_trace(tiny_folder: Path) -> None:
    """Rows written and then overwritten, as after a rejection: the text alone decides."""
    target, ids = load_target(tiny_folder), random_ids(40)
    sequences = PagedSequences(target, 1, 64, 4)
    with torch.inference_mode():
        for first, rows in ((0, ids[:20]), (20, [1, 2, 3, 4, 5]), (21, [9, 9, 9]), (20, ids[20:])):
            metadata = sequences.metadata([0], [first], [len(rows)])
            output = target.forward(target.embed(torch.tensor(rows)), metadata, sequences.caches)
    expected = Oracle(tiny_folder).target_hidden_and_logits(ids)[0][20:]
    torch.testing.assert_close(output.hidden_states, expected, **TOLERANCE)


@torch.inference_mode()
def run_modules(
    folder: Path, ids: list[int], num_modules: int, sizes: list[int], faults: tuple[str, ...] = ()
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Hiddens and logits of each module over all rows that have its token; the chunks split the rows of module 0."""
    target = load_target(folder)
    modules = load_modules(folder, target, num_modules, faults)
    sequences = PagedSequences(target, 1, 64, 4)
    drafting = PagedSequences(modules, 1, 64, 4, seed=1)
    hidden = run_target(target, sequences, [{0: ids}])[0]
    embeds = target.embed(torch.tensor(ids))
    chain = []
    for module in range(num_modules):
        outputs, first = [], 0
        for size in sizes:
            count = min(size, len(ids) - module - 1 - first)
            if count > 0:
                metadata = drafting.metadata([0], [first], [count])
                rows = slice(first, first + count)
                shifted = slice(first + module + 1, first + module + 1 + count)
                outputs.append(modules.forward_module(module, embeds[shifted], hidden[rows], metadata, drafting.caches))
                first += count
        hidden = torch.cat(outputs)
        chain.append((hidden, modules.compute_logits(hidden)))
    return chain


@pytest.mark.parametrize("chain_hidden_post_norm", [False, True])
@pytest.mark.parametrize("sizes", [[40], [17, 1, 1, 4, 17]], ids=str)
def test_every_module_equals_the_oracle(tmp_path: Path, chain_hidden_post_norm: bool, sizes: list[int]) -> None:
    folder = build_tiny_inkling(
        tmp_path, num_modules=8, local_module_ids=(0, 2, 4, 5, 6, 7), chain_hidden_post_norm=chain_hidden_post_norm
    )
    ids = random_ids(40)
    chain = run_modules(folder, ids, 8, sizes)
    for (hidden, logits), (expected_hidden, expected_logits) in zip(
        chain, Oracle(folder).mtp_chain(ids, 8), strict=True
    ):
        torch.testing.assert_close(hidden, expected_hidden, rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(logits, expected_logits, **TOLERANCE)


def test_fewer_modules_are_the_first_of_all(tiny_folder: Path) -> None:
    ids = random_ids(20)
    for first, second in zip(
        run_modules(tiny_folder, ids, 2, [20]), run_modules(tiny_folder, ids, 3, [20]), strict=False
    ):
        assert torch.equal(first[0], second[0])


def test_the_ignored_window_differs_only_past_the_window(tiny_folder: Path) -> None:
    ids = random_ids(40)
    (right, _), *_ = run_modules(tiny_folder, ids, 1, [40])
    (wrong, _), *_ = run_modules(tiny_folder, ids, 1, [40], faults=("ignored_window",))
    assert torch.allclose(right[:8], wrong[:8], atol=1e-5)
    assert (right[9:] - wrong[9:]).abs().amax(1).min() > 1e-4


def test_registered_groups(tiny_folder: Path) -> None:
    target = load_target(tiny_folder)
    assert [(g.name, g.kind, g.window, len(g.layers)) for g in target.cache_groups()] == [
        ("target.full_attention", "full_attention", None, 1),
        ("target.sliding_window", "sliding_window", 8, 5),
        ("target.short_conv", "short_conv", 4, 6),
    ]
    groups = load_modules(tiny_folder, target, 3).cache_groups()
    assert [(g.name, g.num_prompt_lookahead, g.num_provisional_rows, len(g.layers)) for g in groups] == [
        ("draft.full_attention", 3, 2, 1),
        ("draft.sliding_window", 3, 2, 2),
        ("draft.short_conv", 3, 2, 3),
    ]
    wrong = load_modules(tiny_folder, target, 3, ("ignored_window",)).cache_groups()
    assert [(g.name, g.kind, g.window) for g in wrong] == [
        ("draft.full_attention", "full_attention", None),
        ("draft.ignored_window", "full_attention", None),
        ("draft.short_conv", "short_conv", 4),
    ]
    # keys and values: 2 streams of 4 heads of 16; fp32
    assert target.cache_groups()[1].bytes_per_token == 5 * 2 * 4 * 16 * 4


def test_log_scaling_and_window_matter_in_the_tiny_model(tiny_folder: Path, tmp_path: Path) -> None:
    """Else the tests above would not see them."""
    ids = random_ids(40)
    reference = Oracle(tiny_folder).target_hidden_and_logits(ids)[0]
    for index, field in enumerate(({"log_scaling_n_floor": 1000}, {"log_scaling_alpha": 0.5})):
        folder = build_tiny_inkling(tmp_path / str(index), **field)
        changed = Oracle(folder).target_hidden_and_logits(ids)[0]
        assert torch.equal(changed[:12], reference[:12])
        assert (changed[20:] - reference[20:]).abs().max() > 1e-3


def test_bf16_loads_and_stays_near(tiny_folder: Path) -> None:
    target = load_target(tiny_folder, torch.bfloat16)
    assert target.cache_groups()[0].element_size == 2
    modules = load_modules(tiny_folder, target, 2)
    ids = random_ids(24)
    sequences, drafting = PagedSequences(target, 1, 64, 4), PagedSequences(modules, 1, 64, 4)
    with torch.inference_mode():
        metadata = sequences.metadata([0], [0], [24])
        output = target.forward(target.embed(torch.tensor(ids)), metadata, sequences.caches)
        draft_metadata = drafting.metadata([0], [0], [23])
        hidden = modules.forward_module(
            0, target.embed(torch.tensor(ids[1:])), output.hidden_states[:23], draft_metadata, drafting.caches
        )
    assert output.hidden_states.dtype == hidden.dtype == torch.bfloat16
    oracle = Oracle(tiny_folder)
    expected = oracle.target_hidden_and_logits(ids)[1]
    logits = target.compute_logits(output.hidden_states)
    assert logits.dtype == torch.float32
    cosine = torch.nn.functional.cosine_similarity(logits, expected)
    assert cosine.min() > 0.97 and cosine.mean() > 0.995


def test_num_bytes_counts_the_weights(tiny_folder: Path) -> None:
    stored = load_file(tiny_folder / "model.safetensors")
    assert load_target(tiny_folder).num_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_pieces_exposed_for_faults_fit_together(tiny_folder: Path) -> None:
    target, ids = load_target(tiny_folder), random_ids(9)
    sequences = PagedSequences(target, 1, 16, 4)
    with torch.inference_mode():
        metadata = sequences.metadata([0], [0], [9])
        output = target.forward(target.embed(torch.tensor(ids)), metadata, sequences.caches)
        assert torch.equal(target.final_norm(output.residual), output.hidden_states)
        table = load_file(tiny_folder / "model.safetensors")["model.llm.embed.weight"]
        assert torch.equal(target.embed_raw(torch.tensor(ids)), table[ids])
    assert json.loads((tiny_folder / "config.json").read_text())["text_config"]["hidden_size"] == target.hidden_size
