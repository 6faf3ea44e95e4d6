"""Sounds of the made-up listening questions, synthesized: notes, events, backgrounds and speech-like syllables.

Belongs here: waveforms from a few numbers. Does not belong here: what is asked about them (`listening.py`).

A waveform is float32 at `RATE` samples a second, mono. Everything is drawn from the `random.Random` that is passed in,
so the same seed gives the same sound. `quantized` rounds to 8 bits: packaged clips are stored so, and training hears
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np

RATE = 16_000
MIN_SECONDS, MAX_SECONDS = 0.5, 2.0
_TABLE_SIZE = 8192

Waveform = np.ndarray

# Amplitudes of harmonics 1, 2, ...; what sets instruments apart besides their envelopes.
_FLUTE = (1.0, 0.25, 0.06)
_CLARINET = (1.0, 0.0, 0.6, 0.0, 0.4, 0.0, 0.25, 0.0, 0.15)
_STRING = tuple(1.0 / k for k in range(1, 13))
_PLUCKED = tuple(1.0 / k**1.5 for k in range(1, 9))
_BUZZ = tuple(1.0 / k**0.5 for k in range(1, 25))
# Frequencies of a bell's partials over its note, and their amplitudes.
_BELL = ((1.0, 1.0), (2.76, 0.6), (5.4, 0.35), (8.93, 0.2))

# Formants in hertz, of an adult man.
VOWELS = {
    "a": (800.0, 1200.0, 2500.0),
    "e": (450.0, 2000.0, 2600.0),
    "i": (280.0, 2300.0, 3000.0),
    "o": (450.0, 800.0, 2600.0),
    "u": (300.0, 650.0, 2400.0),
}
# Range of the fundamental in hertz, and how much higher the formants are than a man's.
SPEAKERS = {"Man": (95.0, 130.0, 1.0), "Woman": (190.0, 240.0, 1.15), "Child": (310.0, 380.0, 1.35)}


def num_samples(seconds: float) -> int:
    return round(seconds * RATE)


def silence(seconds: float) -> Waveform:
    return np.zeros(num_samples(seconds), np.float32)


def faded(wave: Waveform, seconds: float = 0.01) -> Waveform:
    """With a short rise and fall, so that nothing clicks at its ends."""
    count = min(num_samples(seconds), wave.size // 2)
    ramp = np.linspace(0.0, 1.0, count, dtype=np.float32)
    wave = wave.copy()
    wave[:count] *= ramp
    wave[wave.size - count :] *= ramp[::-1]
    return wave


def decaying(wave: Waveform, seconds: float) -> Waveform:
    """Under an exponential that falls to 1/e in `seconds`."""
    return wave * np.exp(np.arange(wave.size, dtype=np.float32) * (-1.0 / (seconds * RATE)))


def periodic(amplitudes: Sequence[float], frequency: np.ndarray) -> Waveform:
    """A sum of harmonics of a fundamental given sample by sample, in hertz."""
    spectrum = np.zeros(_TABLE_SIZE // 2 + 1, np.complex64)
    spectrum[1 : len(amplitudes) + 1] = -0.5j * np.asarray(amplitudes, np.float32)
    table = np.fft.irfft(spectrum).astype(np.float32)
    table /= np.abs(table).max()
    phase = np.cumsum(frequency) * (_TABLE_SIZE / RATE)
    return table[phase.astype(np.int64) % _TABLE_SIZE]


def steady(hertz: float, seconds: float) -> np.ndarray:
    return np.full(num_samples(seconds), hertz)


def gliding(start: float, end: float, seconds: float) -> np.ndarray:
    """From one frequency to another, evenly in pitch."""
    return np.geomspace(start, end, num_samples(seconds))


def noise(rng: Random, seconds: float, low: float, high: float) -> Waveform:
    """Even noise between two frequencies, with a peak of 1."""
    count = num_samples(seconds)
    spectrum = np.fft.rfft(np.random.default_rng(rng.getrandbits(32)).standard_normal(count))
    hertz = np.fft.rfftfreq(count, 1.0 / RATE)
    spectrum[(hertz < low) | (hertz > high)] = 0.0
    wave = np.fft.irfft(spectrum, count).astype(np.float32)
    return wave / np.abs(wave).max()


# ---- notes


def flute(rng: Random, hertz: float, seconds: float) -> Waveform:
    return faded(periodic(_FLUTE, steady(hertz, seconds)), 0.04)


def clarinet(rng: Random, hertz: float, seconds: float) -> Waveform:
    return faded(periodic(_CLARINET, steady(hertz, seconds)), 0.02)


def violin(rng: Random, hertz: float, seconds: float) -> Waveform:
    time = np.arange(num_samples(seconds)) / RATE
    return faded(periodic(_STRING, hertz * (1.0 + 0.012 * np.sin(2 * np.pi * 6.0 * time))), 0.05)


def guitar(rng: Random, hertz: float, seconds: float) -> Waveform:
    return faded(decaying(periodic(_PLUCKED, steady(hertz, seconds)), 0.15), 0.004)


def bell(rng: Random, hertz: float, seconds: float) -> Waveform:
    wave = sum(gain * periodic((1.0,), steady(hertz * ratio, seconds)) for ratio, gain in _BELL if hertz * ratio < 7800)
    return faded(decaying(wave / np.abs(wave).max(), 0.3), 0.002)


def drum(rng: Random, hertz: float, seconds: float) -> Waveform:
    body = decaying(periodic((1.0,), gliding(140.0, 70.0, seconds)), 0.06)
    return faded(0.8 * body + 0.2 * decaying(noise(rng, seconds, 100.0, 4000.0), 0.02), 0.002)


INSTRUMENTS: dict[str, Callable[[Random, float, float], Waveform]] = {
    "Flute": flute, "Clarinet": clarinet, "Violin": violin, "Guitar": guitar, "Bell": bell, "Drum": drum,
}  # fmt: skip
# Those with a clear pitch that lasts.
MELODIC = (flute, clarinet, violin, guitar)


# ---- events


def beep(rng: Random, seconds: float) -> Waveform:
    return faded(periodic((1.0,), steady(rng.uniform(900.0, 1500.0), seconds)))


def hiss(rng: Random, seconds: float) -> Waveform:
    return faded(noise(rng, seconds, 3500.0, 7900.0))


def siren(rng: Random, seconds: float) -> Waveform:
    time = np.arange(num_samples(seconds)) / RATE
    middle, rate = rng.uniform(750.0, 950.0), rng.uniform(4.0, 6.0)
    return faded(periodic((1.0, 0.3), middle * (1.0 + 0.4 * np.sin(2 * np.pi * rate * time))))


def click(rng: Random, seconds: float) -> Waveform:
    return decaying(noise(rng, min(seconds, 0.06), 500.0, 7900.0), 0.006)


def rumble(rng: Random, seconds: float) -> Waveform:
    return faded(noise(rng, seconds, 40.0, 220.0), 0.03)


def chirp(rng: Random, seconds: float) -> Waveform:
    return faded(periodic((1.0,), gliding(rng.uniform(1400.0, 1800.0), rng.uniform(4000.0, 5500.0), seconds)))


def buzz(rng: Random, seconds: float) -> Waveform:
    return faded(periodic(_BUZZ, steady(rng.uniform(90.0, 140.0), seconds)))


def knock(rng: Random, seconds: float) -> Waveform:
    return faded(decaying(periodic((1.0, 0.4), steady(rng.uniform(180.0, 300.0), min(seconds, 0.12))), 0.025), 0.002)


EVENTS: dict[str, Callable[[Random, float], Waveform]] = {
    "Beep": beep, "Hiss": hiss, "Siren": siren, "Click": click,
    "Rumble": rumble, "Chirp": chirp, "Buzz": buzz, "Knock": knock,
}  # fmt: skip


# ---- backgrounds


def rain(rng: Random, seconds: float) -> Waveform:
    """Scattered drops."""
    wave = silence(seconds)
    generator = np.random.default_rng(rng.getrandbits(32))
    starts = generator.integers(0, wave.size - 80, size=max(1, int(seconds * 60)))
    drop = np.exp(-np.arange(80, dtype=np.float32) / 12.0)
    for start, gain in zip(starts, generator.uniform(0.3, 1.0, starts.size), strict=True):
        wave[start : start + 80] += gain * drop * generator.uniform(-1.0, 1.0, 80)
    return wave / np.abs(wave).max()


def wind(rng: Random, seconds: float) -> Waveform:
    """Noise that swells."""
    time = np.arange(num_samples(seconds)) / RATE
    swell = 0.65 + 0.35 * np.sin(2 * np.pi * (rng.uniform(0.7, 1.5) * time + rng.random()))
    return (noise(rng, seconds, 200.0, 1400.0) * swell).astype(np.float32)


def engine(rng: Random, seconds: float) -> Waveform:
    return periodic(_STRING, steady(rng.uniform(50.0, 75.0), seconds))


BACKGROUNDS: dict[str, Callable[[Random, float], Waveform]] = {"Rain": rain, "Wind": wind, "Engine": engine}


# ---- voices


def formant_amplitudes(fundamental: float, formants: Sequence[float], tilt: float) -> list[float]:
    """Harmonics of a voice up to 4.5 kHz: resonances of 120 Hz width over a source that falls with `tilt`."""
    hertz = fundamental * np.arange(1, int(4500.0 / fundamental) + 1)
    gains = sum(level / (1.0 + ((hertz - f) / 60.0) ** 2) for f, level in zip(formants, (1.0, 0.7, 0.35), strict=True))
    return list((gains + 0.01) * (hertz / fundamental) ** -tilt)


def syllable(vowel: str, pitch: np.ndarray, stretch: float, tilt: float = 0.3) -> Waveform:
    """One vowel on a pitch given sample by sample in hertz; `stretch` raises the formants."""
    formants = [f * stretch for f in VOWELS[vowel]]
    return faded(periodic(formant_amplitudes(float(pitch.mean()), formants, tilt), pitch), 0.025)


def robot(rng: Random, vowel: str, seconds: float) -> Waveform:
    """A vowel without any change of pitch, chopped fast."""
    time = np.arange(num_samples(seconds)) / RATE
    wave = syllable(vowel, steady(150.0, seconds), 1.0, tilt=0.0)
    return (wave * (0.5 + 0.5 * np.sign(np.sin(2 * np.pi * 35.0 * time)))).astype(np.float32)


def spoken(rng: Random, speaker: str, vowel: str, seconds: float) -> Waveform:
    """A vowel by one of `SPEAKERS` or the robot, its pitch falling a little, as in plain speech."""
    if speaker == "Robot":
        return robot(rng, vowel, seconds)
    low, high, stretch = SPEAKERS[speaker]
    pitch = rng.uniform(low, high)
    return syllable(vowel, gliding(pitch * 1.04, pitch * 0.96, seconds), stretch)


# ---- whole clips


def sequence(parts: Sequence[Waveform], gaps: Sequence[float]) -> Waveform:
    """Parts one after another, with silences of `gaps` seconds between them."""
    joined = [parts[0]]
    for part, gap in zip(parts[1:], gaps, strict=True):
        joined += [silence(gap), part]
    return np.concatenate(joined)


def mixed(waves: Sequence[Waveform]) -> Waveform:
    """Waveforms of one length at once."""
    return np.sum(waves, axis=0) / len(waves)


def quantized(wave: Waveform) -> np.ndarray:
    """[samples] int8: 8-bit samples, full scale being 128."""
    return np.clip(np.round(wave * 128.0), -127, 127).astype(np.int8)


def as_clip(rng: Random, wave: Waveform) -> np.ndarray:
    """[samples] int8, at a random loudness, with a random short silence before and after."""
    gain = rng.uniform(0.2, 0.6) / np.abs(wave).max()
    before, after = rng.uniform(0.0, 0.12), rng.uniform(0.0, 0.1)
    after = max(after, MIN_SECONDS - before - wave.size / RATE)
    whole = np.concatenate([silence(before), wave * gain, silence(after)])
    return quantized(whole[: num_samples(MAX_SECONDS)])
