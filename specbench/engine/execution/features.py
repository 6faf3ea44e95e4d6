"""The audio and images of a step's rows, from the host to the device.

Belongs here: gathering what the scheduler names; where recorded steps find it. Does not belong here: the towers
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

from specbench.engine.content.placement import ContentPiece
from specbench.engine.layers.features import StepContent, StepFeatures
from specbench.engine.layers.to_device import to_device
from specbench.engine.scheduling.step import ContentWindow


def step_content(windows: Sequence[ContentWindow], num_requests: int, device: torch.device) -> StepContent | None:
    """Content of a step of `num_requests` requests; None where none of them reads any."""
    if not windows:
        return None
    bounds = np.zeros((3, num_requests), dtype=np.int64)
    #: a piece, and its first entry
    pieces: list[tuple[ContentPiece, int]] = []
    num_entries = 0
    for window in windows:
        bounds[:, window.request] = window.start, window.end, num_entries
        pieces += [(piece, num_entries + piece.start - window.start) for piece in window.pieces]
        num_entries += window.end - window.start
    pieces.sort(key=_kind)
    feature_of_entry = np.full(num_entries + 1, -1, dtype=np.int64)
    num_features = 0
    for piece, entry in pieces:
        count = len(piece.rows)
        feature_of_entry[entry : entry + count] = np.arange(num_features, num_features + count)
        num_features += count
    rows = {
        kind: _copied(np.concatenate([piece.rows for piece, _ in group]), device)
        for kind, group in groupby(pieces, key=_kind)
    }
    return StepContent(rows, *to_device([feature_of_entry, bounds], device))


class FeatureBuffers:
    """Where recorded steps find the features of placeholders: the same place for every step and shape."""

    def __init__(
        self, num_requests: int, num_features: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ):
        # [3, num_requests], [num_features + 1], [num_features, hidden]: as in StepContent and StepFeatures
        self._windows = torch.zeros(3, num_requests, dtype=torch.int64, device=device)
        self._feature_of_entry = torch.full((num_features + 1,), -1, device=device)
        self._features = torch.zeros(num_features, hidden_size, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return self._windows.nbytes + self._feature_of_entry.nbytes + self._features.nbytes

    def of_first(self, num_requests: int) -> StepFeatures:
        """What a step of so many requests reads, padding included."""
        content = StepContent({}, self._feature_of_entry, self._windows[:, :num_requests])
        return StepFeatures(content, self._features)

    def fill(self, step: StepFeatures) -> None:
        """Take over a step's features; requests behind its own have none."""
        windows, feature_of_entry = step.content.windows, step.content.feature_of_entry[:-1]
        self._windows.zero_()
        self._windows[:, : windows.shape[1]] = windows
        self._feature_of_entry[: len(feature_of_entry)] = feature_of_entry
        self._features[: len(step.features)] = step.features


def _kind(placed: tuple[ContentPiece, int]) -> str:
    return placed[0].kind


def _copied(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """In its own type, and without waiting for the device."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
