"""Audio and images through the engine against transformers: its extractor, its towers, its merge, its logits."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

# Earlier ones do not load these folders.
pytest.importorskip("transformers", minversion="5.24")
from transformers import InklingForConditionalGeneration
from transformers.models.inkling.feature_extraction_inkling import InklingFeatureExtractor
from transformers.models.inkling.modeling_inkling import plan_out_scales
from transformers.models.inkling.processing_inkling import InklingProcessor

from specbench.engine.content.content_tokens import IMAGE
from specbench.engine.content.placement import Content, place
from specbench.engine.llm_engine import LLMEngine
from specbench.engine.models.inkling_image_stages import image_stages
from tests.engine.content.prompts import AUDIO_TOKENS, IMAGE_TOKENS, audio_request, clip, draw
from tests.engine.harness import make_engine
from tests.engine.models.test_inkling import TOLERANCE
from tests.engine.tiny_inkling import build_tiny_inkling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_inkling(tmp_path_factory.mktemp("tiny"), has_towers=True)


def processed(audio: list[bytes]) -> dict[str, torch.Tensor]:
    """What transformers' processor hands to its model; a processor needs a tokenizer that we do without."""
    clips = [soundfile.read(io.BytesIO(content), dtype="float32")[0] for content in audio]
    extracted = InklingFeatureExtractor()(clips, sampling_rate=16_000, return_tensors="pt")
    centres = torch.linspace(-7.0, 2.0, 16, dtype=torch.float64).to(torch.float32)
    settings = SimpleNamespace(bin_centers=centres, dmel_min_value=-7.0, dmel_max_value=2.0)
    bins = InklingProcessor._extract_dmel_bins(settings, extracted["input_features"])
    return {"audio_input_ids": bins, "audio_input_ids_mask": extracted["input_features_mask"]}


@torch.no_grad()
def reference_logits(folder: Path, token_ids: list[int], **content: torch.Tensor) -> torch.Tensor:
    model = InklingForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    return model(torch.tensor([token_ids]), **content).logits[0]


def prompt_logits(engine: LLMEngine, request: object) -> tuple[list[int], torch.Tensor]:
    """The prompt as the engine ran it, and the logits of its rows, chunk after chunk."""
    rows: list[torch.Tensor] = []
    forward = engine.model.forward

    def recording_forward(embeds, metadata, caches):
        output = forward(embeds, metadata, caches)
        rows.append(output.hidden_states)
        return output

    engine.model.forward = recording_forward
    engine.add_request(request, 0.0)
    result = None
    while engine.has_requests:
        finished, _ = engine.step()
        result = finished[0] if finished else result
    assert result is not None
    logits = engine.model.compute_logits(torch.cat(rows))
    return result.prompt_token_ids, logits[: len(result.prompt_token_ids)]


MARKER = AUDIO_TOKENS.marker_id
PROMPTS = {
    "start": [MARKER, *draw(1, 9)],
    "middle": [*draw(2, 7), MARKER, *draw(3, 6)],
    "end": [*draw(4, 8), MARKER],
    "everywhere": [MARKER, *draw(5, 4), MARKER, *draw(6, 3), MARKER],
    "side by side": [*draw(7, 3), MARKER, MARKER, *draw(8, 3)],
}


@pytest.mark.parametrize("budget", [256, 7], ids=["whole", "chunked"])
@pytest.mark.parametrize("place_of_audio", PROMPTS)
def test_logits_equal_transformers(folder: Path, place_of_audio: str, budget: int) -> None:
    prompt = PROMPTS[place_of_audio]
    audio = [clip(seed, length) for seed, length in zip(range(prompt.count(MARKER)), (11, 5, 8), strict=False)]
    engine = make_engine(folder, max_num_batched_tokens=budget)
    token_ids, logits = prompt_logits(engine, audio_request("r", prompt, audio, 1))
    assert token_ids.count(AUDIO_TOKENS.placeholder_id) == sum((11, 5, 8)[: len(audio)])
    torch.testing.assert_close(logits, reference_logits(folder, token_ids, **processed(audio)), **TOLERANCE)
    deaf = reference_logits(folder, token_ids)
    assert (deaf - logits).abs().max() > 1e-2, "else the model would not hear anything"


@pytest.mark.parametrize("budget", [256, 7], ids=["whole", "chunked"])
def test_images_and_audio_equal_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int) -> None:
    """Images have no file format here: what their processor hands over is placed as it is."""
    pixels = np.random.default_rng(0).standard_normal((9, 2, 8, 8, 3)).astype(np.float32)
    images = [Content(IMAGE, pixels[:4]), Content(IMAGE, pixels[4:])]
    engine = make_engine(folder, max_num_batched_tokens=budget)
    place_clips = engine.place_clips

    def place_both(token_ids, clips):
        with_images, placed_images = place(token_ids, images, IMAGE_TOKENS)
        return_ids, placed_audio = place_clips(with_images, clips)
        shift = placed_audio[0].span.end - placed_audio[0].span.start
        assert all(one.span.end <= placed_audio[0].span.start for one in placed_images) and shift
        return return_ids, placed_images + placed_audio

    monkeypatch.setattr(engine, "place_clips", place_both)
    prompt = [*draw(1, 3), IMAGE_TOKENS.marker_id, *draw(2, 2), IMAGE_TOKENS.marker_id, MARKER, *draw(3, 4)]
    audio = [clip(3, 6)]
    token_ids, logits = prompt_logits(engine, audio_request("r", prompt, audio, 1))
    expected = reference_logits(folder, token_ids, pixel_values=torch.from_numpy(pixels), **processed(audio))
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert (reference_logits(folder, token_ids, **processed(audio)) - logits).abs().max() > 1e-2


@pytest.mark.parametrize(
    "shape", [(40, 2, 3, 4), (8, 2, 3, 4), (16, 2, 3, 4), (14, 2, 3, 3), (40, 1, 3, 3), (6, 2, 1, 5)]
)
def test_stages_are_those_of_transformers(shape: tuple[int, int, int, int]) -> None:
    size, temporal, channels, num_stages = shape
    scales = plan_out_scales(temporal, size, num_stages, channels).tolist()
    stages = image_stages(size, temporal, channels, num_stages)
    folds = [(end[0] // start[0], end[1] // start[1]) for start, end in pairwise(scales)]
    assert [(stage.t, stage.hw) for stage in stages] == folds
    # The last stage's are the hidden size.
    assert [stage.channels_out for stage in stages[:-1]] == [scale[3] for scale in scales[1:-1]]


def test_the_released_towers_shapes() -> None:
    stages = image_stages(40, 2, 3, 4)
    assert [(stage.channels_out, stage.channels_in) for stage in stages[:3]] == [(128, 75), (320, 512), (4800, 5120)]
    assert stages[3].channels_in == 9600 and [(stage.t, stage.hw) for stage in stages] == [
        (1, 5),
        (1, 2),
        (1, 4),
        (2, 1),
    ]
