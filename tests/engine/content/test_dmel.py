"""Bins against transformers' extractor and processor, on every kind of sound."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import soxr
import torch

from specbench.engine.content.audio_files import read_audio
from specbench.engine.content.dmel import features, num_tokens
from tests.engine.content.sounds import encode

try:
    from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor
    from transformers.models.inkling.processing_inkling import InklingProcessor
except ImportError:
    pytest.skip("transformers of this version has no dMel", allow_module_level=True)


def seconds(count: float, rate: int = 16_000) -> np.ndarray:
    return np.arange(int(count * rate)) / rate


def sine(hertz: float, duration: float = 0.7, amplitude: float = 0.5) -> np.ndarray:
    return amplitude * np.sin(2 * np.pi * hertz * seconds(duration))


def noise(num_samples: int, amplitude: float = 0.3, seed: int = 0) -> np.ndarray:
    return amplitude * np.random.default_rng(seed).standard_normal(num_samples)


def clicks() -> np.ndarray:
    samples = np.zeros(16_000)
    samples[::1_000] = 1.0
    return samples


SOUNDS = {
    "noise": noise(32_123),
    "loud noise": noise(20_000, amplitude=30.0),
    "quiet noise": noise(20_000, amplitude=1e-6),
    "silence": np.zeros(8_001),
    "a constant": np.full(4_000, 0.25),
    "clicks": clicks(),
    "one sample": np.ones(1),
    "one hop": noise(800),
    "a hop and one": noise(801),
    "a chirp": np.sin(2 * np.pi * (50 + 1900 * seconds(2.0)) * seconds(2.0)),
    "fading": noise(48_000) * np.logspace(0, -8, 48_000),
} | {f"sine {hertz}": sine(hertz) for hertz in (30, 60, 440, 999, 1_000, 3_150, 7_990)}


def expected_bins(samples: np.ndarray) -> np.ndarray:
    """The processor's own quantiser on the extractor's features; a processor needs a tokenizer that we do without."""
    spectrum = InklingFeatureExtractor()(samples.astype(np.float32), sampling_rate=16_000, return_tensors="pt")
    centres = torch.linspace(-7.0, 2.0, 16, dtype=torch.float64).to(torch.float32)
    settings = SimpleNamespace(bin_centers=centres, dmel_min_value=-7.0, dmel_max_value=2.0)
    assert spectrum["input_features_mask"].all()
    return InklingProcessor._extract_dmel_bins(settings, spectrum["input_features"])[0].numpy()


@pytest.mark.parametrize("sound", SOUNDS)
def test_bins_are_those_of_transformers(sound: str) -> None:
    bins = features(SOUNDS[sound])
    assert bins.dtype == np.uint8 and bins.shape == (num_tokens(len(SOUNDS[sound])), 80)
    np.testing.assert_array_equal(bins, expected_bins(SOUNDS[sound]))


def test_a_long_clip_is_cut_into_the_same_bins() -> None:
    samples = noise(2_100 * 800) * np.logspace(0, -6, 2_100 * 800)
    np.testing.assert_array_equal(features(samples), expected_bins(samples))


def test_sounds_differ_in_their_bins() -> None:
    """Else the comparison above would say little."""
    assert (features(SOUNDS["silence"]) == 2).all()  # the magnitude's floor of 1e-5 lies there, not in bin 0
    assert set(range(3, 16)) <= set(np.unique(features(SOUNDS["fading"] * 1000)))
    low, high = (features(sine(hertz)).mean(axis=0) for hertz in (200, 4_000))
    assert low.argmax() < 20 and high.argmax() > 55


@pytest.mark.parametrize(("num_samples", "expected"), [(1, 1), (800, 1), (801, 2), (32_123, 41), (16_000, 20)])
def test_twenty_tokens_a_second(num_samples: int, expected: int) -> None:
    assert num_tokens(num_samples) == expected == len(features(noise(num_samples)))


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("num_channels", [1, 2])
def test_files_of_any_rate_give_the_bins_of_transformers(rate: int, num_channels: int) -> None:
    """transformers takes samples at 16 kHz: its own loader averages channels, then resamples with soxr."""
    length = int(1.3 * rate)
    tone = 0.4 * np.sin(2 * np.pi * 900 * np.arange(length) / rate)
    channels = [tone + noise(length, 0.1, seed) for seed in range(num_channels)]
    samples = np.stack(channels, axis=1).clip(-1, 1).astype(np.float32)
    resampled = soxr.resample(samples.mean(axis=1), rate, 16_000)
    bins = features(read_audio(encode(samples, rate, subtype="FLOAT")))
    assert len(bins) == num_tokens(len(resampled)) == 26
    np.testing.assert_array_equal(bins, expected_bins(resampled))
