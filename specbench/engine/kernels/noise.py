"""The counter-based random numbers of sampling/noise.py where they are used, inside other kernels: the same bits, so
the same numbers up to the logarithms. Belongs here: functions that other kernels call. No kernel is launched from
here.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """The 32-bit finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def uniform(key, position, stream, ids):
    """Variates in (0, 1) of 64-bit keys, positions, streams and 32-bit global ids."""
    golden = tl.full([], 0x9E3779B1, tl.uint32)
    spread = mix(stream.to(tl.uint32) * golden)
    low = mix(key.to(tl.uint32) ^ mix((position * 2 + 1).to(tl.uint32) ^ spread))
    high = mix((key >> 32).to(tl.uint32) ^ mix(position.to(tl.uint32) ^ spread))
    bits = mix(mix((ids.to(tl.uint32) * golden) ^ low) ^ high) & tl.full([], 0x7FFFFFFF, tl.uint32)
    return tl.minimum((bits.to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)


@triton.jit
def exponential(key, position, stream, ids):
    """Exp(1) variates of the same keys."""
    u = uniform(key, position, stream, ids)
    # -log1p(-u), which plain log would round to 0 for small u; those decide.
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))


@triton.jit
def rough_log(x, IS_FAST: tl.constexpr):
    """The logarithm within 2e-7 of its value, or of 1; a third of the instructions of an exact one."""
    if IS_FAST:
        return tl.extra.cuda.libdevice.fast_logf(x)
    return tl.log(x)


@triton.jit
def rough_exponential_of(u, IS_FAST: tl.constexpr):
    """As `exponential` from a uniform variate, within a ten-thousandth of its value."""
    return tl.where(u < 0.0078125, u * (1.0 + u * (0.5 + u * 0.33333334)), -rough_log(1.0 - u, IS_FAST))
