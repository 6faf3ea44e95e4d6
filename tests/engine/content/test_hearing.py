"""Clips are heard beside the engine's steps: nothing is lost, nothing waits that has no clip."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from specbench.engine.content import hearing
from specbench.engine.content.hearing import ClipReader, hear
from specbench.errors import UserError
from tests.engine.content.sounds import encode, tone


def test_items_without_clips_overtake_those_that_are_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def slow(source: bytes) -> object:
        gate.wait()
        return hear(source)

    monkeypatch.setattr(hearing, "hear", slow)
    with ClipReader[str]() as reader:
        reader.put("clip", [encode(tone())])
        reader.put("text", [])
        assert reader.take() == [("text", [])] and reader.take() == []
        gate.set()
        assert reader.wait()
        ((item, clips),) = reader.take()
        assert item == "clip" and not isinstance(clips, UserError) and len(clips[0].rows) == 10
        assert not reader.wait() and reader.take() == []


def test_every_item_comes_out_once_with_its_own_clips(tmp_path: Path) -> None:
    with ClipReader[int]() as reader:
        for index in range(30):
            reader.put(index, [tmp_path / f"{index}.wav"] if index % 5 == 0 else [encode(tone(duration=0.05 * index))])
        found: dict[int, object] = {}
        while reader.wait():
            for item, clips in reader.take():
                assert item not in found
                found[item] = clips
    assert sorted(found) == list(range(30))
    for index, clips in found.items():
        if index % 5 == 0:
            assert isinstance(clips, UserError) and f"{index}.wav: no such file" in str(clips)
        else:
            assert isinstance(clips, list) and len(clips[0].rows) == index


def test_a_fault_of_our_own_is_not_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: bytes) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(hearing, "hear", broken)
    with ClipReader[int]() as reader:
        reader.put(0, [b"x"])
        reader.wait()
        with pytest.raises(ZeroDivisionError):
            reader.take()


def test_text_alone_starts_no_thread() -> None:
    before = threading.active_count()
    with ClipReader[int]() as reader:
        reader.put(0, [])
        assert reader.take() and threading.active_count() == before
