"""The features of one step's placeholders, and their place among the embeddings.

Belongs here: which row of a pass takes a feature instead of its token's embedding. Does not belong here: which
placeholders a step needs (scheduling/), how they were made (execution/features.py, towers.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """Features of the positions [start, end) of each request that this step's rows, drafting's own included, can read.

    Entry `offset + p - start` stands for position p of a request.
    """

    # [num_features, hidden], in the model's type
    features: Tensor
    # [num_entries + 1] int64: the feature of an entry; -1 for a token, and for the last entry, which is everything else
    feature_of_entry: Tensor
    # [3, num_requests] int64: start, end and offset; start = end where a request has no features in this step
    windows: Tensor

    def merge(self, embeds: Tensor, request_of_row: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden] embeddings of the tokens at `positions` [T] of the requests [T] (batch index) -> the same, with
        features where placeholders are. Neither normed nor scaled: towers do that."""
        start, end, offset = self.windows[:, request_of_row]
        is_inside = (positions >= start) & (positions < end)
        entry = torch.where(is_inside, offset + positions - start, len(self.feature_of_entry) - 1)
        feature = self.feature_of_entry[entry]
        return torch.where((feature >= 0)[:, None], self.features[feature.clamp_min(0)], embeds)
