"""How a vocabulary writes audio and images. No torch: configs of models say it.

Belongs here: kinds, their token ids, the size of what a token stands for. Does not belong here: putting them into a
prompt (placement.py).
"""

from __future__ import annotations

from dataclasses import dataclass

AUDIO, IMAGE = "audio", "image"

#: A token of audio is this many bands, each in one of this many bins.
NUM_BANDS, NUM_BINS = 80, 16


@dataclass(frozen=True, slots=True)
class ContentTokens:
    """One kind of content: a marker, and behind it a placeholder for each feature."""

    marker_id: int
    placeholder_id: int
