"""The training side of inkling-nano: packed rows keep documents apart, losses look at the right tokens."""

import argparse

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tools.nano import data
from tools.nano.evaluate import Rounds, compare
from tools.nano.listening import TRAIN_SEED, make_items
from tools.nano.model import NanoConfig, NanoModel, initialize, make_layout, rms_norm
from tools.nano.optimizer import orthogonalized
from tools.nano.tokenizer import AUDIO_PLACEHOLDER, train_tokenizer
from tools.nano.train import Trainer, rate_factor, shifted


@pytest.fixture(scope="module")
def model() -> NanoModel:
    torch.set_num_threads(1)
    nano = NanoModel(NanoConfig())
    initialize(nano, torch.Generator().manual_seed(0))
    return nano.requires_grad_(False)


def chained(model: NanoModel, tokens: torch.Tensor, documents: torch.Tensor) -> list[torch.Tensor]:
    """Hidden rows of the backbone and of the first three MTP depths, [1, T, H] each."""
    layout = make_layout(documents, model.config.window)
    embedded = model.embed(tokens)
    rows = [model.final_norm(model.layers_forward(embedded, layout)[0])]
    for depth, module in enumerate(model.mtp[:3]):
        rows.append(module.transformer_block(module.join(rows[-1], shifted(embedded, depth + 1)), layout)[0])
    return rows


def test_a_document_does_not_see_its_neighbours(model):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 2048, (1, 128), generator=generator)
    documents = torch.ones(1, 128, dtype=torch.int32)
    documents[:, 41:] = 2
    together = chained(model, tokens, documents)
    alone = chained(model, torch.cat([tokens[:, 41:], tokens[:, :41]], dim=1), torch.cat(
        [documents[:, 41:], documents[:, :41]], dim=1))  # fmt: skip
    for depth, (a, b) in enumerate(zip(together, alone, strict=True)):
        # The last rows of a document look past its end and are masked in the loss.
        torch.testing.assert_close(a[:, 41 : 128 - depth], b[:, : 87 - depth], atol=2e-5, rtol=1e-4)


def test_windowed_chunks_equal_a_masked_whole_attention(model):
    layer = model.llm.layers[0]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 128, model.config.hidden_size, generator=generator)
    layout = make_layout(torch.ones(1, 128, dtype=torch.int32), model.config.window)
    place = torch.arange(128)
    windowed = layout.causal & (place[:, None] - place[None, :] < model.config.window)
    whole, _ = layer(x, layout._replace(causal=windowed), ignore_window=True)
    torch.testing.assert_close(layer(x, layout)[0], whole, atol=2e-5, rtol=1e-4)
    assert (layer(x, layout, ignore_window=True)[0] - whole).abs().max() > 1e-3


def test_targets_stop_at_the_end_of_a_document():
    args = argparse.Namespace(seed=0, muon_rate=1e-3, adam_rate=1e-3, mtp_share=0.3)
    trainer = Trainer(NanoConfig(), 1, torch.device("cpu"), args)
    trainer.tokens[0, :6] = torch.tensor([10, 11, 12, 20, 21, 22])
    trainer.documents[0, :6] = torch.tensor([1, 1, 1, 2, 2, 2])
    trainer.weights[0, :6] = 1.0
    targets, weights = trainer.targets(2)
    assert weights[0, :6].tolist() == [1, 0, 0, 1, 0, 0]
    assert targets[0, [0, 3]].tolist() == [12, 22]


def test_orthogonalized_matrices_have_even_singular_values():
    batch = torch.randn(3, 48, 96, generator=torch.Generator().manual_seed(3))
    values = torch.linalg.svdvals(orthogonalized(batch).float())
    assert values.min() > 0.5 and values.max() < 1.5


def test_learning_rate_warms_up_and_ends_low():
    factors = [rate_factor(step, 1000) for step in range(1000)]
    assert factors[0] < 0.01 and max(factors) == 1.0 and factors[-1] < 0.03


def test_the_paired_error_ignores_what_two_settings_share():
    right = Rounds(torch.tensor([10, 10, 10]), torch.tensor([[9], [1], [5]]))
    lower = Rounds(torch.tensor([10, 10, 10]), torch.tensor([[8], [0], [4]]))
    row = compare(right, lower)
    assert row["differences"] == pytest.approx([-0.1, -0.1])
    assert row["errors"] == pytest.approx([0.0, 0.0], abs=1e-12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(data.tokenizer_texts([], num_problems=60))


def test_rows_hold_whole_documents(tokenizer):
    rows = data.make_rows(tokenizer, [], 40, num_items=30)
    assert rows.tokens.shape[1] == data.ROW_LENGTH
    used = rows.documents > 0
    assert np.array_equal(used, rows.codes > 0)
    # Documents are numbered from 1 in order, padding comes last.
    steps = np.diff(rows.documents.astype(int), axis=1)
    assert set(np.unique(steps[used[:, 1:]])) <= {0, 1}
    assert used.mean() > 0.7


def test_frames_of_a_clip_stand_at_its_placeholders(tokenizer):
    rows = data.make_rows(tokenizer, [], 10, num_items=30)
    assert np.array_equal(rows.frames > 0, rows.codes == data.HEARD)
    assert np.array_equal(rows.frames > 0, rows.tokens == tokenizer.token_to_id(AUDIO_PLACEHOLDER))
    assert data.LOSS_WEIGHTS[data.HEARD] == 0.0
    clips = {item.digest: data.clip_bins(item.clip) for item in make_items(TRAIN_SEED, 30)}
    assert set(rows.digests.tolist()) == set(clips)
    seen = 0
    for frames, documents in zip(rows.frames, rows.documents, strict=True):
        for number in range(1, documents.max() + 1):
            bins = rows.bins[frames[(documents == number) & (frames > 0)]]
            if len(bins):
                seen += any(np.array_equal(bins, clip) for clip in clips.values())
    assert seen == 30


def test_joined_parts_keep_their_frames(tokenizer):
    parts = [data.make_rows(tokenizer, [], 5, num_items=count) for count in (4, 9)]
    whole, start = data.joined(parts), 0
    for part in parts:
        frames = whole.frames[start : start + part.num_rows]
        assert np.array_equal(whole.bins[frames], part.bins[part.frames])
        start += part.num_rows


def test_the_towers_rows_stand_at_placeholders(model):
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(16, 2048, (1, 64), generator=generator)
    tokens[:, 20:30] = model.config.audio_token
    bins = torch.randint(0, 16, (1, 64, 80), generator=generator)
    heard = model.hear(bins)
    embedded = model.embed(tokens, heard)
    torch.testing.assert_close(embedded[:, 20:30], heard[:, 20:30])
    torch.testing.assert_close(embedded[:, 30:], model.embed(tokens)[:, 30:])
    table = model.model.audio.encoder.weight.view(80, 16, -1)
    summed = sum(table[band, bins[0, 25, band]] for band in range(80))
    torch.testing.assert_close(heard[0, 25], rms_norm(summed, model.model.audio.final_norm.weight, 1e-6))
