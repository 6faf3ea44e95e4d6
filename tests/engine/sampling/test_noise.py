"""Counter-based noise: the right law, and a function of its key alone."""

import math

import torch

from specbench.engine.sampling.noise import exponential_noise, spread_ids, uniform_noise, window_stream


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ids(count: int) -> torch.Tensor:
    return spread_ids(count, torch.device("cpu"))


def test_variates_follow_the_exponential_law():
    noise = exponential_noise(keys(*range(2000)), torch.arange(2000) % 7, 0, ids(500)).flatten()
    assert (noise > 0).all()
    # Kolmogorov-Smirnov against 1 - exp(-x); the 0.1 % point at n = 1e6 is 1.95 / sqrt(n).
    ordered = noise.double().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    distance = (1 - torch.exp(-ordered) - steps).abs().max()
    assert distance < 1.95 / math.sqrt(len(ordered))


def test_neighbouring_keys_positions_and_ids_are_uncorrelated():
    base = exponential_noise(keys(5).expand(4000), torch.arange(4000), 0, ids(50))
    for other in (
        exponential_noise(keys(6).expand(4000), torch.arange(4000), 0, ids(50)),
        exponential_noise(keys(5).expand(4000), torch.arange(1, 4001), 0, ids(50)),
        exponential_noise(keys(5).expand(4000), torch.arange(4000), 0, ids(51)[1:]),
        exponential_noise(keys(5).expand(4000), torch.arange(4000), 1, ids(50)),
        exponential_noise(keys(5 + (1 << 40)).expand(4000), torch.arange(4000), 0, ids(50)),
        exponential_noise(keys(5).expand(4000), torch.arange(4000), window_stream(2, torch.tensor(3)), ids(50)),
        exponential_noise(keys(5).expand(4000), torch.full((4000,), 9), window_stream(1, torch.arange(4000)), ids(50)),
    ):
        # Exp(1) has variance 1: the correlation of 2e5 independent pairs has a standard deviation of 0.0022.
        assert abs(((base - 1) * (other - 1)).mean()) < 0.01


def test_a_value_depends_on_its_own_key_position_and_id_only():
    whole = exponential_noise(keys(1, 2, 3), torch.tensor([4, 5, 6]), 0, ids(100))
    part = exponential_noise(keys(2), torch.tensor([5]), 0, ids(60)[40:])
    assert torch.equal(whole[1, 40:60], part[0])


def test_streams_of_a_window_are_all_different():
    streams = {
        (purpose, row): int(window_stream(purpose, torch.tensor(row))) for purpose in range(4) for row in range(9)
    }
    assert len(set(streams.values())) == len(streams)


def test_uniform_variates_lie_inside_the_unit_interval():
    noise = uniform_noise(torch.arange(4000) - (1 << 62), torch.arange(4000), 1, ids(500))
    assert 0 < float(noise.min()) < 1e-5 and 1 - 1e-5 < float(noise.max()) < 1
    assert abs(float(noise.mean()) - 0.5) < 1e-3


def test_a_large_vocabulary_has_no_pattern():
    """Blocks of ids have the mean and variance of independent variates: 2,000 blocks of 1,000."""
    noise = exponential_noise(keys(11, 12, 13, 14, 15, 16, 17, 18, 19, 20), torch.arange(10), 0, ids(200_000))
    blocks = noise.double().view(-1, 1000).mean(dim=1)
    assert abs(float(blocks.mean()) - 1) < 5 / math.sqrt(noise.numel())
    # The variance of a block's mean is 1 / 1000, known here to 3 %.
    assert abs(float(blocks.var()) * 1000 - 1) < 0.16
