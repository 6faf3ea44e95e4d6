"""Prompts with clips for the tiny model: marker and placeholder ids, and what the oracle must hear."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specbench.engine.content.content_tokens import AUDIO, NUM_BANDS, NUM_BINS, ContentTokens
from specbench.engine.content.hearing import hear
from specbench.engine.content.placement import Content, place
from specbench.generate import AudioSource, GenerateRequest, SamplingParams
from tests.engine.content.sounds import encode
from tests.engine.oracle import Oracle

#: Of build_tiny_inkling.
VOCAB = 246
AUDIO_TOKENS = ContentTokens(marker_id=246, placeholder_id=248)
IMAGE_TOKENS = ContentTokens(marker_id=247, placeholder_id=249)


def draw(seed: int, count: int) -> list[int]:
    """Ordinary token ids."""
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def clip(seed: int, num_tokens: int) -> bytes:
    """Noise whose loudness changes: no two tokens are alike."""
    rng = np.random.default_rng(seed)
    samples = rng.standard_normal(num_tokens * 800) * np.repeat(10.0 ** rng.uniform(-3, 0, num_tokens), 800) * 0.3
    return encode(samples.clip(-1, 1))


def bins(seed: int, num_tokens: int) -> bytes:
    """What the tower takes, for tests to which files and sound are all one."""
    return np.random.default_rng(seed).integers(0, NUM_BINS, (num_tokens, NUM_BANDS), dtype=np.uint8).tobytes()


def take_clips_for_bins(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a clip is what `bins` makes."""

    def hear_bins(source: bytes) -> Content:
        return Content(AUDIO, np.frombuffer(source, np.uint8).reshape(-1, NUM_BANDS).copy())

    for module in ("specbench.engine.llm_engine", "specbench.engine.replay", __name__):
        monkeypatch.setattr(f"{module}.hear", hear_bins)


def audio_request(
    name: str, prompt: Sequence[int], audio: Sequence[AudioSource], max_output_tokens: int = 16, **sampling: object
) -> GenerateRequest:
    params = SamplingParams(max_output_tokens, **({"ignore_eos": True} | sampling))
    return GenerateRequest(name, name, params, prompt_token_ids=tuple(prompt), audio=tuple(audio))


def tell(oracle: Oracle, request: GenerateRequest) -> list[int]:
    """Let the oracle hear the request's clips; returns the prompt with its placeholders."""
    assert request.prompt_token_ids is not None
    token_ids, placed = place(request.prompt_token_ids, [hear(source) for source in request.audio], AUDIO_TOKENS)
    bins = {
        one.span.start + index: torch.from_numpy(row) for one in placed for index, row in enumerate(one.content.rows)
    }
    oracle.hear(token_ids, bins)
    return token_ids
