"""Encoder-free towers: a token of sound or a patch of an image to one embedding each, on its own.

Belongs here: the arithmetic. Does not belong here: which token gets the embedding (features.py), names of tensors
(models/).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from specbench.engine.layers.norm import RMSNorm


class AudioTower:
    """RMSNorm of the sum of one table row for each band."""

    def __init__(self, table: Tensor, final_norm: RMSNorm, num_bands: int) -> None:
        #: [num_bands * num_bins, hidden]: band m's bins are rows m * num_bins and on
        self._table = table
        self._final_norm = final_norm
        num_bins = len(table) // num_bands
        # [num_bands] int64
        self._first_row = torch.arange(num_bands, device=table.device) * num_bins

    def __call__(self, bins: Tensor) -> Tensor:
        # bins: [T, num_bands] uint8 -> [T, hidden]
        return self._final_norm(F.embedding_bag(bins + self._first_row, self._table, mode="sum"))


class ImageTower:
    """Hierarchical MLP: at each stage neighbouring places are folded into the channels and projected."""

    def __init__(
        self,
        projections: Sequence[Tensor],
        norms: Sequence[RMSNorm],
        final_norm: RMSNorm,
        folds: Sequence[tuple[int, int]],
    ) -> None:
        #: per stage [channels out, channels in * t * hw * hw]; the last one's channels are the hidden size
        self._projections = projections
        #: of every stage but the last
        self._norms = norms
        self._final_norm = final_norm
        #: per stage (t, hw): moments, and rows as well as columns, that are folded into one place
        self._folds = folds

    def __call__(self, patches: Tensor) -> Tensor:
        # patches: [P, temporal, size, size, channels], normalised -> [P, hidden]
        x = patches
        for stage, ((t, hw), projection) in enumerate(zip(self._folds, self._projections, strict=True)):
            x = F.linear(_fold(x, t, hw), projection)
            if stage < len(self._norms):
                x = F.gelu(self._norms[stage](x))
        return self._final_norm(x.flatten(1))


def _fold(x: Tensor, t: int, hw: int) -> Tensor:
    """[P, T, H, W, C] -> [P, T / t, H / hw, W / hw, t * hw * hw * C]."""
    num, moments, rows, columns, channels = x.shape
    x = x.reshape(num, moments // t, t, rows // hw, hw, columns // hw, hw, channels)
    return x.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(4)
