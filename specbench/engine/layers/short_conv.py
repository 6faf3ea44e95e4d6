"""Short depthwise causal convolution with an identity branch, over a position-addressed cache.

Every row stores its input at its own slot and reads the taps that end there, so dropping rejected rows needs no work:
their slots are written again.
"""

from __future__ import annotations

from torch import Tensor


class ShortConv:
    """y_t = x_t + sum over i of weight[i] * x_(t - kernel + 1 + i), per channel, in fp32."""

    def __init__(self, weight: Tensor, scale: Tensor | None = None) -> None:
        # weight: [channels, 1, kernel] fp32; scale: [1] fp32, a factor of the input (the convolution is linear)
        taps = weight.squeeze(1).T.clone()
        taps[-1] += 1.0
        self._kernel = taps.shape[0]
        #: [kernel, channels], newest tap last and with the identity added
        self._taps = (taps if scale is None else taps * scale).contiguous()

    def __call__(self, x: Tensor, cache: Tensor, slot_mapping: Tensor, tap_slots: Tensor) -> Tensor:
        # x: [T, channels]; cache: [slots + 1, channels]; slot_mapping: [T]; tap_slots: [T * kernel]
        cache.index_put_((slot_mapping,), x)
        inputs = cache.index_select(0, tap_slots).view(-1, self._kernel, cache.shape[1])
        return (inputs * self._taps).sum(1).to(x.dtype)
