"""From the audio and images of a step's rows to features on the device.

Belongs here: gathering what the scheduler names, one call of a tower for each kind. Does not belong here: the towers
(layers/towers.py), the merge (layers/features.py).

Nothing is kept between steps. A tower makes each token's feature from that token alone and costs a few table rows, so
the host keeps the bins for as long as the request lives, and a step makes the features that its own rows read: those of
its chunk, the few that drafting looks ahead, and those that it looks back at after a rejection. Preemption, prefix hits
and resuming need no rule of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from specbench.engine.content.placement import PlacedContent
from specbench.engine.layers.features import StepFeatures
from specbench.engine.models.target import ContentEncoder
from specbench.engine.scheduling.step import ContentWindow


def encode_step(
    windows: Sequence[ContentWindow], num_requests: int, encoder: ContentEncoder | None, device: torch.device
) -> StepFeatures | None:
    """Features of a step of `num_requests` requests; None where none of them reads any."""
    if not windows:
        return None
    assert encoder is not None, "a request with content is refused where the model has no tower"
    bounds = np.zeros((3, num_requests), dtype=np.int64)
    #: kind, rows for the tower, first entry
    pieces: list[tuple[str, np.ndarray, int]] = []
    num_entries = 0
    for window in windows:
        bounds[:, window.request] = window.start, window.end, num_entries
        pieces += [_piece(placed, window, num_entries) for placed in window.content]
        num_entries += window.end - window.start
    pieces.sort(key=lambda piece: piece[0])
    feature_of_entry = np.full(num_entries + 1, -1, dtype=np.int64)
    num_features = 0
    for _, rows, first_entry in pieces:
        feature_of_entry[first_entry : first_entry + len(rows)] = np.arange(num_features, num_features + len(rows))
        num_features += len(rows)
    features = [
        encoder.encode_content(kind, _to_device(np.concatenate([rows for _, rows, _ in group]), device))
        for kind, group in groupby(pieces, key=lambda piece: piece[0])
    ]
    return StepFeatures(torch.cat(features), _to_device(feature_of_entry, device), _to_device(bounds, device))


def _piece(placed: PlacedContent, window: ContentWindow, offset: int) -> tuple[str, np.ndarray, int]:
    """The part of the content that lies in the window."""
    span = placed.span
    start, end = max(span.start, window.start), min(span.end, window.end)
    rows = placed.content.rows[start - span.start : end - span.start]
    return placed.content.kind, rows, offset + start - window.start


def _to_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy that the host does not wait for."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
