"""dMel: a waveform as Inkling hears it, one token of 80 small integers for each 50 ms.

Belongs here: the arithmetic from samples at 16 kHz to bins. Does not belong here: files and rates (audio_files.py),
from bins to embeddings (models/).

A token is the frame of 1,600 samples that ends with its 800: magnitudes of the Fourier transform under a periodic Hann
window, 80 bands of equal width on Slaney's mel scale and of equal area, logarithm to base 10, the nearest of 16 centres
between -7 and 2. Operations and types are those of transformers' InklingFeatureExtractor and InklingProcessor, in their
order: a sum that is rounded otherwise may fall into the neighbouring bin.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from specbench.engine.content.content_tokens import NUM_BANDS, NUM_BINS

SAMPLE_RATE = 16_000
#: Samples of one token: 20 tokens a second.
HOP = 800

_FRAME = 2 * HOP
_LOWEST, _HIGHEST = -7.0, 2.0
_FLOOR = 1e-10
#: Frames whose distances to all centres are looked at together (5 MB each thousand).
_FRAMES_AT_ONCE = 1024


def num_tokens(num_samples: int) -> int:
    """Tokens of so many samples at 16 kHz; the last one may stand for less than 50 ms."""
    return -(-num_samples // HOP)


def features(samples: np.ndarray) -> np.ndarray:
    """[num_samples] at 16 kHz, one sample at least, full scale 1 -> [num_tokens(num_samples), 80] uint8 below 16."""
    waveform = torch.from_numpy(np.ascontiguousarray(samples, dtype=np.float32))[None]
    padding = num_tokens(waveform.shape[1]) * HOP - waveform.shape[1]
    spectrum = torch.stft(
        F.pad(waveform, (_FRAME - HOP, padding)),
        _FRAME,
        hop_length=HOP,
        win_length=_FRAME,
        window=torch.hann_window(_FRAME, periodic=True, dtype=torch.float32),
        center=False,
        return_complex=True,
    )
    magnitudes = torch.view_as_real(spectrum).pow(2).sum(-1).clamp_min(_FLOOR).sqrt()
    # [1, 80, tokens]
    bands = (_filters() @ magnitudes).clamp_min(_FLOOR).log10()
    return np.concatenate([_bins(frames) for frames in bands[0].T.split(_FRAMES_AT_ONCE)])


def _bins(bands: torch.Tensor) -> np.ndarray:
    """[frames, 80] log-magnitudes -> the nearest centre of each; of two as near the lower one."""
    centres = torch.linspace(_LOWEST, _HIGHEST, NUM_BINS, dtype=torch.float64).to(torch.float32)
    distances = (bands.clamp(_LOWEST, _HIGHEST)[..., None] - centres).abs()
    return distances.argmin(-1).to(torch.uint8).numpy()


@cache
def _filters() -> torch.Tensor:
    """[80, 801]: weights of each frequency in each band, triangles over three neighbouring edges."""
    edges = _hertz(np.linspace(0.0, _mel(SAMPLE_RATE / 2), NUM_BANDS + 2))
    distance = edges[:, None] - np.linspace(0, SAMPLE_RATE // 2, _FRAME // 2 + 1)
    rising = -distance[:-2] / np.diff(edges)[:-1, None]
    falling = distance[2:] / np.diff(edges)[1:, None]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return torch.from_numpy((triangles * (2.0 / (edges[2:] - edges[:-2]))[:, None]).astype(np.float32))


#: Slaney's scale: linear up to 1 kHz, then 27 mels to each factor of 6.4.
_LINEAR_UP_TO = 1000.0
_MELS_PER_HERTZ = 3.0 / 200.0
_MELS_PER_NEPER = 27.0 / np.log(6.4)


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_UP_TO:
        return hertz * _MELS_PER_HERTZ
    return _LINEAR_UP_TO * _MELS_PER_HERTZ + np.log(hertz / _LINEAR_UP_TO) * _MELS_PER_NEPER


def _hertz(mels: np.ndarray) -> np.ndarray:
    knee = _LINEAR_UP_TO * _MELS_PER_HERTZ
    above = _LINEAR_UP_TO * np.exp((mels - knee) / _MELS_PER_NEPER)
    return np.where(mels < knee, mels / _MELS_PER_HERTZ, above)
