"""When each request arrives.

Belongs here: implementations of generate.Load and the laws that they draw arrival times from. Does not belong here:
what a request asks (evals/), reading a trace (trace.py), keeping to the timetable while a target runs (submission.py).

A timetable is drawn before the load begins, from nothing but the run's seed and the number of the repeat: how fast a
target answers cannot move it, and two runs that are compared are sent the same requests at the same times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specbench.errors import UserError
from specbench.generate import Load
from specbench.run_config import LoadConfig
from specbench.trace import read_trace

#: The longest timetable.
MAX_DAYS = 30


@dataclass(frozen=True, slots=True)
class ClosedLoad:
    """So many clients, each sending its next request as soon as its last one finished."""

    concurrency: int

    def scheduled_s(self, index: int) -> float | None:
        """There is no timetable: a finished request is what frees a client."""
        return None


@dataclass(frozen=True, slots=True)
class OpenLoad:
    """Requests that arrive by a timetable, however many are still running."""

    #: Requests that the client has out at once, while the others wait in it; None: no limit.
    concurrency: int | None
    #: Seconds after the load began, one for each request, never falling.
    times_s: tuple[float, ...]

    def scheduled_s(self, index: int) -> float | None:
        return self.times_s[index]


def make_load(
    config: LoadConfig, *, seed: int, repeat: int, num_requests: int, places: Sequence[int] | None = None
) -> Load:
    """The load that the configuration names, over the `num_requests` requests of a repeat that follow no other.

    `places` are those of them that a resumed run still has to send; they keep the gaps that they had.
    """
    if config.name == "closed":
        assert config.concurrency is not None
        return ClosedLoad(config.concurrency)
    times_s = arrival_times(config, seed=seed, repeat=repeat, num_requests=num_requests)
    if places:
        times_s = times_s[list(places)] - times_s[places[0]]
    return OpenLoad(config.concurrency, tuple(times_s.tolist()))


def arrival_times(config: LoadConfig, *, seed: int, repeat: int, num_requests: int) -> np.ndarray:
    """[num_requests] Seconds after the load began."""
    if config.name == "trace":
        assert config.trace is not None and config.time_scale is not None
        times_s = np.array(read_trace(config.trace)[:num_requests])
        return config.time_scale * (times_s - times_s[:1])
    if config.name == "offline":
        return np.zeros(num_requests)
    generator = np.random.default_rng(np.random.SeedSequence([seed, repeat]))
    return _LAWS[config.name](config, num_requests, generator)


def check_timetable(config: LoadConfig, *, seed: int, num_repeats: int, num_requests: int) -> tuple[str, ...]:
    """UserError where a load of `num_requests` a repeat can't be kept to; notices of what will not be replayed."""
    if config.name == "closed" or not num_requests:
        return ()
    notices = () if config.trace is None else _check_trace(config.trace, num_requests)
    for repeat in range(num_repeats):
        last_s = arrival_times(config, seed=seed, repeat=repeat, num_requests=num_requests)[-1]
        if not last_s <= MAX_DAYS * 86_400:
            key, advice = ("rate", "raise it") if config.trace is None else ("time_scale", "lower it")
            raise UserError(
                f"load.{key}: the last of {num_requests} requests would arrive {last_s:.3g} s after the first is sent, "
                f"and {MAX_DAYS} days are the most that are waited for; {advice}"
            )
    return notices


def _check_trace(trace: str, num_requests: int) -> tuple[str, ...]:
    """UserError where a trace can't be read or has too few timestamps for a repeat; a notice where it has more."""
    num_times = len(read_trace(trace))
    if num_times < num_requests:
        raise UserError(
            f"load.trace: {trace} has {num_times} timestamps for {num_requests} requests; say "
            f"eval.num_samples={num_times} or name a longer trace"
        )
    if num_times == num_requests:
        return ()
    return (f"load.trace: the first {num_requests:,} of {num_times:,} timestamps are replayed.",)


def _poisson(config: LoadConfig, num_requests: int, generator: np.random.Generator) -> np.ndarray:
    """Independent gaps of the exponential law."""
    assert config.rate is not None
    return np.cumsum(generator.exponential(1 / config.rate, num_requests))


def _gamma(config: LoadConfig, num_requests: int, generator: np.random.Generator) -> np.ndarray:
    """Independent gaps of the gamma law with mean 1 / rate and shape `burstiness`, whose coefficient of variation is
    1 / sqrt(burstiness). Unlike vLLM's benchmark it does not stretch them to end at num_requests / rate, after which
    they would be independent no more."""
    assert config.rate is not None and config.burstiness is not None
    return np.cumsum(generator.gamma(config.burstiness, 1 / config.rate / config.burstiness, num_requests))


def _burst(config: LoadConfig, num_requests: int, generator: np.random.Generator) -> np.ndarray:
    """`burst_size` at once, as often as gives `rate` on average."""
    assert config.rate is not None and config.burst_size is not None
    return np.arange(num_requests) // config.burst_size * (config.burst_size / config.rate)


def _ramp(config: LoadConfig, num_requests: int, generator: np.random.Generator) -> np.ndarray:
    """A Poisson process whose rate goes from `rate_from` to `rate` in `ramp_s` seconds, in a straight line, and stays.

    The expected number of arrivals by time t is taken at the points of a Poisson process of rate 1 and solved for t
    (E. Çinlar, Introduction to Stochastic Processes, 1975, section 4.7).
    """
    assert config.rate is not None and config.rate_from is not None and config.ramp_s is not None
    expected = np.cumsum(generator.exponential(1.0, num_requests))
    slope = (config.rate - config.rate_from) / config.ramp_s
    at_end = (config.rate_from + config.rate) / 2 * config.ramp_s
    inside = np.minimum(expected, at_end)
    # rate_from t + slope t² / 2 = expected, in the form that also holds for a slope of 0.
    root = np.sqrt(np.maximum(config.rate_from * config.rate_from + 2 * slope * inside, 0.0))
    return 2 * inside / (config.rate_from + root) + np.maximum(expected - at_end, 0.0) / config.rate


_LAWS = {"poisson": _poisson, "gamma": _gamma, "burst": _burst, "ramp": _ramp}
