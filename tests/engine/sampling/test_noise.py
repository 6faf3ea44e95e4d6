"""Counter-based noise: the right law, and a function of its key alone."""

import math

import torch

from specbench.engine.sampling.noise import exponential_noise


def keys(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_variates_follow_the_exponential_law():
    noise = exponential_noise(keys(*range(2000)), torch.arange(2000) % 7, 0, torch.arange(500)).flatten()
    assert (noise > 0).all()
    # Kolmogorov-Smirnov against 1 - exp(-x); the 0.1 % point at n = 1e6 is 1.95 / sqrt(n).
    ordered = noise.double().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    distance = (1 - torch.exp(-ordered) - steps).abs().max()
    assert distance < 1.95 / math.sqrt(len(ordered))


def test_neighbouring_keys_positions_and_ids_are_uncorrelated():
    base = exponential_noise(keys(5).expand(4000), torch.arange(4000), 0, torch.arange(50))
    for other in (
        exponential_noise(keys(6).expand(4000), torch.arange(4000), 0, torch.arange(50)),
        exponential_noise(keys(5).expand(4000), torch.arange(1, 4001), 0, torch.arange(50)),
        exponential_noise(keys(5).expand(4000), torch.arange(4000), 0, torch.arange(1, 51)),
        exponential_noise(keys(5).expand(4000), torch.arange(4000), 1, torch.arange(50)),
        exponential_noise(keys(5 + (1 << 40)).expand(4000), torch.arange(4000), 0, torch.arange(50)),
    ):
        # Exp(1) has variance 1: the correlation of 2e5 independent pairs has a standard deviation of 0.0022.
        assert abs(((base - 1) * (other - 1)).mean()) < 0.01


def test_a_value_depends_on_its_own_key_position_and_id_only():
    whole = exponential_noise(keys(1, 2, 3), torch.tensor([4, 5, 6]), 0, torch.arange(100))
    part = exponential_noise(keys(2), torch.tensor([5]), 0, torch.arange(40, 60))
    assert torch.equal(whole[1, 40:60], part[0])
