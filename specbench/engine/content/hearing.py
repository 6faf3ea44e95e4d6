"""From a clip to what the audio tower takes.

Belongs here: the way through decoding and features. Does not belong here: either of them (audio_files.py, dmel.py),
where a clip stands in a prompt (placement.py).
"""

from __future__ import annotations

from specbench.engine.content.audio_files import read_audio
from specbench.engine.content.content_tokens import AUDIO
from specbench.engine.content.dmel import features
from specbench.engine.content.placement import Content
from specbench.generate import AudioSource


def hear(source: AudioSource) -> Content:
    """A clip as bins. UserError where it can't be heard."""
    return Content(AUDIO, features(read_audio(source)))
