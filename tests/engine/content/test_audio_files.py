"""What is heard of a file, whatever its format, rate and channels, and what is said of one that can't be heard."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from specbench.engine.content.audio_files import num_audio_tokens, read_audio
from specbench.engine.content.dmel import features
from specbench.errors import UserError
from tests.engine.content.sounds import encode, tone


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_every_format_sounds_the_same(kind: str, tmp_path: Path) -> None:
    samples = tone(duration=1.0)
    file = tmp_path / f"clip.{kind.lower()}"
    file.write_bytes(encode(samples, kind=kind))
    heard = read_audio(file)
    assert heard.dtype == np.float32
    np.testing.assert_array_equal(heard, read_audio(file.read_bytes()))
    # Lossy encoders add padding at the ends.
    middle = heard[len(heard) // 2 - 800 : len(heard) // 2 + 800]
    assert abs(np.abs(middle).max() - 0.4) < 0.02
    assert np.abs(np.fft.rfft(middle)).argmax() == 44  # 440 Hz of 1,600 samples at 16 kHz
    if kind in ("WAV", "FLAC"):
        np.testing.assert_allclose(heard, samples, atol=2 / 32_768)


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("hertz", [200.0, 1_000.0, 3_000.0])
def test_any_rate_gives_the_bins_of_the_sound_itself(rate: int, hertz: float) -> None:
    heard = read_audio(encode(tone(hertz, 1.0, rate), rate, subtype="FLOAT"))
    assert abs(len(heard) - 16_000) <= 1
    bins, native = features(heard), features(tone(hertz, 1.0).astype(np.float32))
    # The first and last frames see the ends; between them only what the filter leaves far below the tone may differ.
    loudest = native[3:-3].max(axis=0) >= 10
    assert loudest.sum() >= 2
    assert (np.abs(bins[3:-3, loudest].astype(int) - native[3:-3, loudest]) <= 1).all()
    assert (bins[3:-3, loudest] == native[3:-3, loudest]).mean() > 0.9


def test_channels_are_averaged() -> None:
    left, right = tone(440.0), tone(2_000.0)
    both = read_audio(encode(np.stack([left, right], axis=1), subtype="FLOAT"))
    np.testing.assert_allclose(both, (left + right) / 2, atol=1e-6)
    cancelled = read_audio(encode(np.stack([left, -left], axis=1), subtype="FLOAT"))
    assert (features(cancelled) == features(np.zeros(len(left)))).all()


def test_a_few_samples_at_a_high_rate_are_one_token() -> None:
    assert len(features(read_audio(encode(np.full(2, 0.5), 48_000)))) == 1


def write(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "clip.wav"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't be decoded"),
        (b"RIFF of nothing", "can't be decoded"),
        (b"ID3 and then no frames" * 10, "can't be decoded"),
        (encode(np.zeros(0)), "holds no samples"),
        (encode(np.full(10, np.nan), subtype="FLOAT"), "not finite"),
    ],
)
def test_one_line_says_what_is_wrong_with_a_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = write(tmp_path, content)
    for source, name in ((file, str(file)), (content, f"of {len(content)} bytes")):
        with pytest.raises(UserError) as caught:
            read_audio(source)
        assert str(caught.value).startswith(f"audio {name}: ") and message in str(caught.value)
        assert "\n" not in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"audio .*absent\.wav: no such file; give a wav"):
        read_audio(tmp_path / "absent.wav")
    with pytest.raises(UserError, match=r"is a folder; give a wav"):
        read_audio(tmp_path)


def test_ten_minutes_are_the_most(tmp_path: Path) -> None:
    longest = encode(np.zeros(600 * 1_000), 1_000, "FLAC", "PCM_16")
    assert len(read_audio(longest)) == 12_000 * 800
    with pytest.raises(UserError, match=r"20\.0 minutes long, and a clip may have 10 \(12,000 tokens\); cut it"):
        read_audio(encode(np.zeros(1_200 * 1_000), 1_000, "FLAC", "PCM_16"))


def test_a_cut_file_is_heard_as_far_as_it_goes_or_refused(tmp_path: Path) -> None:
    whole = encode(tone(duration=1.0), kind="FLAC")
    try:
        heard = read_audio(whole[: len(whole) // 2])
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert 0 < len(heard) < 16_000


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    for call in (read_audio, num_audio_tokens):
        with pytest.raises(UserError, match=r"audio: can't load soundfile.*; pip install soundfile soxr"):
            call(b"RIFF")


@pytest.mark.parametrize(("duration", "rate"), [(0.5, 16_000), (1.0, 44_100), (0.33, 8_000), (2.01, 48_000)])
def test_the_header_promises_the_tokens(duration: float, rate: int) -> None:
    content = encode(tone(duration=duration, rate=rate), rate)
    assert num_audio_tokens(content) == len(features(read_audio(content)))
    assert num_audio_tokens(b"no audio") is None and num_audio_tokens(Path("absent.wav")) is None
