"""Audio and images of one step, and their features' place among the embeddings.

Belongs here: which row of a pass takes a feature instead of its token's embedding. Does not belong here: which
placeholders a step needs (scheduling/), how their content comes to the device (execution/features.py), towers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepContent:
    """What stands behind the placeholders at the positions [start, end) of each request: those that this step's rows,
    drafting's own included, can read.

    Entry `offset + p - start` stands for position p of a request.
    """

    # kind -> [num_features of this kind, ...], as a tower takes it; features are counted over the kinds in this order
    rows: Mapping[str, Tensor]
    # [num_entries + 1] int64: the feature of an entry; -1 for a token, and for the last entry, which is everything else
    feature_of_entry: Tensor
    # [3, num_requests] int64: start, end and offset; start = end where a request has no features in this step
    windows: Tensor

    def encode(self, encode: Callable[[str, Tensor], Tensor]) -> StepFeatures:
        """Features by a model's towers: (kind, rows) -> [num_rows, hidden]."""
        return StepFeatures(self, torch.cat([encode(kind, rows) for kind, rows in self.rows.items()]))


@dataclass(frozen=True, slots=True)
class StepFeatures:
    """The content of a step as one model hears and sees it."""

    content: StepContent
    # [num_features, hidden], in the model's type
    features: Tensor

    def merge(self, embeds: Tensor, request_of_row: Tensor, positions: Tensor) -> Tensor:
        """[T, hidden] embeddings of the tokens at `positions` [T] of the requests [T] (batch index) -> the same, with
        features where placeholders are. Neither normed nor scaled: towers do that."""
        start, end, offset = self.content.windows[:, request_of_row]
        feature_of_entry = self.content.feature_of_entry
        is_inside = (positions >= start) & (positions < end)
        entry = torch.where(is_inside, offset + positions - start, len(feature_of_entry) - 1)
        feature = feature_of_entry[entry]
        return torch.where((feature >= 0)[:, None], self.features[feature.clamp_min(0)], embeds)
