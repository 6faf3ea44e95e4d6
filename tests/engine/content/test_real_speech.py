"""Real speech of several languages, from the samples of pytest-audioeval: heard, and run through a model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from specbench.engine.content.audio_files import read_audio
from specbench.engine.content.dmel import features
from tests.engine.content.prompts import AUDIO_TOKENS, audio_request, draw
from tests.engine.harness import make_engine, run
from tests.engine.tiny_inkling import build_tiny_inkling

_SPEC = importlib.util.find_spec("pytest_audioeval")
if _SPEC is None or not _SPEC.submodule_search_locations:
    pytest.skip("needs the samples of pytest-audioeval (the extra speech)", allow_module_level=True)
FILES = sorted(Path(_SPEC.submodule_search_locations[0]).rglob("*.wav"))


def test_every_sample_is_heard() -> None:
    assert len(FILES) >= 20
    for file in FILES:
        samples = read_audio(file)
        bins = features(samples)
        assert 0.5 < len(samples) / 16_000 < 60, file
        assert len(bins) == -(-len(samples) // 800), file
        # Speech has energy below 4 kHz and pauses: loud and quiet bins, and no token like every other.
        assert bins.max() >= 8 and len(np.unique(bins, axis=0)) > len(bins) // 2, file


def test_speech_runs_with_drafts_as_without(tmp_path: Path) -> None:
    folder = build_tiny_inkling(tmp_path, num_modules=4, has_towers=True)
    prompt = [*draw(0, 3), AUDIO_TOKENS.marker_id, *draw(1, 5)]
    requests = [audio_request(file.stem, prompt, [file], 12) for file in FILES[:4]]
    fields = {"max_model_len": 512, "max_num_seqs": 2, "max_num_batched_tokens": 48}
    plain, drafted = (run(make_engine(folder, k, **fields), requests) for k in (0, 4))
    for name, result in drafted.items():
        assert result.output_token_ids == plain[name].output_token_ids
        assert result.record.num_prompt_tokens > 30
