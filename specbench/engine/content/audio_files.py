"""Audio files: from a path or bytes to samples at 16 kHz, one channel.

Belongs here: decoding (wav, flac, mp3, ogg), the mean of channels, the change of rate, and what is wrong with a file.
Does not belong here: what a model makes of samples (dmel.py).

Channels are averaged before the rate is changed, by soxr at its high quality: what librosa does, and so what the
preprocessors of other engines feed to a model.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType

import numpy as np

from specbench.engine.content.dmel import SAMPLE_RATE, num_tokens
from specbench.errors import UserError
from specbench.generate import AudioSource

#: The longest clip: 10 minutes.
MAX_TOKENS = 12_000
_MAX_SECONDS = MAX_TOKENS // num_tokens(SAMPLE_RATE)


def read_audio(source: AudioSource) -> np.ndarray:
    """[num_samples] fp32 at 16 kHz, one sample at least.

    Raises UserError for a file that is missing, no audio, empty, not finite or longer than 10 minutes.
    """
    name = _name(source)
    samples, rate = _decode(source, name)
    if not len(samples):
        raise UserError(f"audio {name}: holds no samples; give a clip with sound in it")
    if not np.isfinite(samples).all():
        raise UserError(f"audio {name}: holds samples that are not finite; export it again")
    mono = samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0]
    if rate == SAMPLE_RATE:
        return mono
    import soxr

    resampled = soxr.resample(mono, rate, SAMPLE_RATE, quality="HQ")
    # A few samples at a high rate may be less than one here; the clip is still one token.
    return resampled if len(resampled) else mono[:1]


def num_audio_tokens(source: AudioSource) -> int | None:
    """Tokens of a clip, as its header promises, before anything is decoded; None where it can't be heard."""
    soundfile = _soundfile()
    try:
        with soundfile.SoundFile(source if isinstance(source, Path) else io.BytesIO(source)) as file:
            return num_tokens(-(-file.frames * SAMPLE_RATE // file.samplerate))
    except (soundfile.LibsndfileError, OSError):
        return None


def _decode(source: AudioSource, name: str) -> tuple[np.ndarray, int]:
    """[num_frames, num_channels] fp32, and frames a second."""
    soundfile = _soundfile()
    if isinstance(source, Path) and not source.is_file():
        what = "is a folder" if source.is_dir() else "no such file"
        raise UserError(f"audio {name}: {what}; give a wav, flac, mp3 or ogg file")
    try:
        with soundfile.SoundFile(source if isinstance(source, Path) else io.BytesIO(source)) as file:
            if file.frames > _MAX_SECONDS * file.samplerate:
                minutes = file.frames / file.samplerate / 60
                raise UserError(
                    f"audio {name}: {minutes:.1f} minutes long, and a clip may have {_MAX_SECONDS // 60} "
                    f"({MAX_TOKENS:,} tokens); cut it"
                )
            return file.read(dtype="float32", always_2d=True), file.samplerate
    except (soundfile.LibsndfileError, OSError) as error:
        reason = str(error).rpartition(": ")[2].rstrip(".")
        raise UserError(f"audio {name}: can't be decoded ({reason}); give a wav, flac, mp3 or ogg file") from error


def _soundfile() -> ModuleType:
    """Imported where it is needed: it loads a shared library."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        raise UserError(
            f"audio: can't load soundfile, which decodes it ({error}); pip install soundfile soxr"
        ) from error
    return soundfile


def _name(source: AudioSource) -> str:
    return str(source) if isinstance(source, Path) else f"of {len(source):,} bytes"
