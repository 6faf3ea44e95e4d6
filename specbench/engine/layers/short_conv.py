"""Short depthwise causal convolution with an identity branch, over a position-addressed cache.

Every row stores its input at its own slot and reads the taps that end there, so dropping rejected rows needs no work:
their slots are written again.

Does not belong here: kernels (kernels/short_conv.py), which slots taps are (metadata.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specbench.engine.kernels.inboxes import Inboxes
from specbench.engine.layers import fusion
from specbench.engine.layers.metadata import AttentionMetadata
from specbench.engine.layers.norm import RMSNorm

if TYPE_CHECKING:
    from specbench.engine.kernels.short_conv import PickedRows


class ShortConv:
    """y_t = x_t + sum over i of weight[i] * x_(t - kernel + 1 + i), per channel, in fp32."""

    def __init__(self, weight: Tensor, scale: Tensor | None = None) -> None:
        # weight: [channels, 1, kernel] fp32; scale: [1] fp32, a factor of the input (the convolution is linear)
        taps = weight.squeeze(1).T.clone()
        taps[-1] += 1.0
        self._kernel = taps.shape[0]
        #: [kernel, channels] fp32, newest tap last and with the identity added
        self.taps = (taps if scale is None else taps * scale).contiguous()

    def __call__(self, x: Tensor, cache: Tensor, slot_mapping: Tensor, tap_slots: Tensor) -> Tensor:
        # x: [T, channels]; cache: [slots + 1, channels]; slot_mapping: [T]; tap_slots: [T * kernel]
        cache.index_put_((slot_mapping,), x)
        inputs = cache.index_select(0, tap_slots).view(-1, self._kernel, cache.shape[1])
        return (inputs * self.taps).sum(1).to(x.dtype)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        group: str,
        norm: RMSNorm | None,
        picked: PickedRows | None = None,
    ) -> tuple[Tensor, Tensor]:
        """residual [T, channels] + the convolution of x over the cache of `group`, and the norm of that (itself where
        there is none), of which rows are picked (on a GPU)."""
        slot_mapping, tap_slots = metadata.slot_mapping[group], metadata.tap_slots[group]
        if fusion.is_fused(x):
            from specbench.engine.kernels.short_conv import CachedConv, conv_add_norm

            conv = CachedConv(self.taps, cache, slot_mapping, tap_slots)
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return conv_add_norm(x, residual, conv, metadata.paged.step_rows, weight, eps, picked)
        assert picked is None
        summed = residual + self(x, cache, slot_mapping, tap_slots)
        return summed, summed if norm is None else norm(summed)

    def add_to_shared(
        self,
        residual: Tensor,
        x: Tensor,
        cache: Tensor,
        metadata: AttentionMetadata,
        group: str,
        norm: RMSNorm | None,
        inboxes: Inboxes,
    ) -> tuple[Tensor, Tensor]:
        """The same where ranks share the channels: of the sum over ranks of x, each convolving its own. On GPUs."""
        from specbench.engine.kernels.short_conv import CachedConv
        from specbench.engine.kernels.split_conv import can_sum, split_conv_add_norm, sum_own_channels

        conv = CachedConv(self.taps, cache, metadata.slot_mapping[group], metadata.tap_slots[group])
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        rows = metadata.paged.step_rows
        own = x if can_sum(rows, len(x)) else sum_own_channels(x, inboxes)
        return split_conv_add_norm(own, residual, conv, rows, weight, eps, inboxes)
