"""RMSNorm against its formula; the convolution over a cache against a padded one."""

from __future__ import annotations

import pytest
import torch

from specbench.engine.layers.norm import RMSNorm
from specbench.engine.layers.short_conv import ShortConv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("magnitude", [1.0, 1e-4, 0.0, 1e4])
def test_rms_norm(dtype: torch.dtype, magnitude: float) -> None:
    x = (magnitude * torch.randn(3, 2, 24)).to(dtype)
    weight = torch.randn(2, 24).to(dtype)
    expected = torch.nn.functional.rms_norm(x.double(), (24,), eps=1e-6) * weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(RMSNorm(weight, 1e-6)(x).double(), expected, rtol=tolerance, atol=tolerance)


def test_conv_reads_the_rows_before_it_from_the_cache() -> None:
    channels, kernel, num_rows = 5, 4, 7
    x, weight, scale = torch.randn(num_rows, channels), torch.randn(channels, 1, kernel), torch.tensor([1.5])
    conv = ShortConv(weight, scale)
    cache = torch.zeros(20, channels)
    slots = torch.arange(8, 8 + num_rows)
    outputs = []
    for start, end in ((0, 1), (1, 5), (5, 7)):
        taps = torch.stack([torch.where(slots - back >= 8, slots - back, 0) for back in (3, 2, 1, 0)], 1)
        outputs.append(conv(x[start:end], cache, slots[start:end], taps[start:end].reshape(-1)))
    padded = torch.cat((torch.zeros(kernel - 1, channels), x * scale))
    expected = x * scale + torch.nn.functional.conv1d(padded.T[None], weight, groups=channels)[0].T
    torch.testing.assert_close(torch.cat(outputs), expected)
