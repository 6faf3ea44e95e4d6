"""Audio files made in the test."""

from __future__ import annotations

import io

import numpy as np


def tone(hertz: float = 440.0, duration: float = 0.5, rate: int = 16_000, amplitude: float = 0.4) -> np.ndarray:
    """[num_samples] of one sine."""
    return amplitude * np.sin(2 * np.pi * hertz * np.arange(int(duration * rate)) / rate)


def encode(samples: np.ndarray, rate: int = 16_000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file's content: [num_samples] or [num_samples, channels]; kind WAV, FLAC, MP3 or OGG."""
    import soundfile  # not where tests hand over bins

    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()
