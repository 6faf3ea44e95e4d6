"""Made-up listening questions: answerable, taught in words that MMAU's matcher takes, packaged as they were made."""

import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest

from specbench.engine.content import dmel
from specbench.engine.content.audio_files import read_audio
from specbench.evals.mmau import PROMPTS
from tools.nano import listening, sounds
from tools.nano.listening import HELD_OUT_SEED, TRAIN_SEED, Item, held_out_items, is_matched, make_item, make_items

ASSETS = Path(__file__).parents[2] / "specbench" / "assets"
FOLDER = ASSETS / "nano_audio"
MMAU_KEYS = {"id", "audio_id", "question", "choices", "answer", "dataset", "task", "split", "category", "sub-category",
             "difficulty"}  # fmt: skip


@pytest.fixture(scope="module")
def items() -> list[Item]:
    return list(make_items(TRAIN_SEED, 600))


@pytest.fixture(scope="module")
def packaged() -> list[dict]:
    return json.loads((FOLDER / "questions.json").read_text(encoding="utf-8"))


def test_an_item_depends_on_its_seed_and_index_alone():
    once, again = make_item(TRAIN_SEED, 40), make_item(TRAIN_SEED, 40)
    assert once.row == again.row and once.answer == again.answer and np.array_equal(once.clip, again.clip)
    assert make_item(HELD_OUT_SEED, 40).digest != once.digest


def test_every_kind_of_question_comes_up(items):
    made = {(item.row["task"], item.row["sub-category"]) for item in items}
    assert made == {(kind.task, kind.sub_category) for kind in listening.KINDS}
    assert set(Counter(item.row["task"] for item in items).values()) == {200}


def test_choices_hold_the_answer_once_at_an_even_place(items):
    places = Counter()
    for item in items:
        choices, gold = item.row["choices"], item.row["answer"]
        assert len(set(choices)) == len(choices) in (3, 4) and choices.count(gold) == 1
        places[choices.index(gold)] += 1
    assert max(places[place] for place in range(3)) < 0.4 * len(items)


def test_mmaus_matcher_takes_the_taught_answer_and_no_other(items):
    for item in items:
        choices, gold = item.row["choices"], item.row["answer"]
        assert is_matched(item.answer, gold, choices) and item.answer.endswith(f"\nAnswer: {gold}")
        for other in set(choices) - {gold}:
            assert not is_matched(item.answer.replace(f"Answer: {gold}", f"Answer: {other}"), gold, choices)


def test_clips_are_short_audible_and_not_clipped(items):
    for item in items:
        assert item.clip.dtype == np.int8 and 10 <= dmel.num_tokens(item.clip.size) <= 40
        assert 10 < np.abs(item.clip.astype(int)).max() < 120


def spectrum(wave: np.ndarray) -> np.ndarray:
    """[bands] mean level of each mel band, loudness taken out."""
    levels = dmel.features(wave).astype(float).mean(0)
    return levels - levels.mean()


@pytest.mark.parametrize("made", [sounds.EVENTS, sounds.BACKGROUNDS])
def test_sounds_of_one_name_are_nearer_than_others(made):
    first, second = ({name: spectrum(make(Random(seed), 0.4)) for name, make in made.items()} for seed in (1, 2))
    for name, levels in first.items():
        assert min(second, key=lambda other: np.abs(second[other] - levels).sum()) == name


def test_rising_notes_rise():
    low, high = (int(dmel.features(sounds.flute(Random(1), hertz, 0.3))[3].argmax()) for hertz in (350.0, 520.0))
    assert low < high


def test_prompts_are_those_of_the_eval_and_show_the_choices(items):
    row = items[0].row
    assert set(PROMPTS.values()) <= set(listening.PROMPTS)
    for form in listening.PROMPTS:
        text = listening.prompt(row, form)
        assert text.startswith(row["question"]) and all(choice in text for choice in row["choices"])


def test_packaged_rows_are_the_held_out_items_in_mmaus_schema(packaged):
    assert len(packaged) == listening.NUM_HELD_OUT_ITEMS
    for row, item in zip(packaged[:60], held_out_items(60), strict=True):
        assert set(row) == MMAU_KEYS
        assert {name: value for name, value in row.items() if name not in ("id", "audio_id")} == item.row
        assert np.array_equal(read_audio(FOLDER / row["audio_id"]) * 128, item.clip)


def test_packaged_clips_are_all_there_and_differ(packaged):
    assert {(FOLDER / row["audio_id"]).resolve() for row in packaged} == set((FOLDER / "audio").resolve().iterdir())
    assert len({(FOLDER / row["audio_id"]).read_bytes() for row in packaged}) == len(packaged)


def test_held_out_clips_are_not_training_clips(items):
    trained = {item.digest for item in items}
    assert not trained & {item.digest for item in held_out_items(100)}


def test_everything_packaged_holds_at_most_fourteen_megabytes():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= 14_000_000
