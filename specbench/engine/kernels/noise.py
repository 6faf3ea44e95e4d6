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
def random_bits(key, position, stream, ids):
    """31 bits of 64-bit keys, positions, streams and 32-bit global ids, int32."""
    golden = tl.full([], 0x9E3779B1, tl.uint32)
    spread = mix(stream.to(tl.uint32) * golden)
    low = mix(key.to(tl.uint32) ^ mix((position * 2 + 1).to(tl.uint32) ^ spread))
    high = mix((key >> 32).to(tl.uint32) ^ mix(position.to(tl.uint32) ^ spread))
    bits = mix(mix((ids.to(tl.uint32) * golden) ^ low) ^ high) & tl.full([], 0x7FFFFFFF, tl.uint32)
    return bits.to(tl.int32)


@triton.jit
def uniform(key, position, stream, ids):
    """Variates in (0, 1) of the same keys."""
    bits = random_bits(key, position, stream, ids)
    return tl.minimum((bits.to(tl.float32) + 0.5) * 4.656612873077393e-10, 0.9999999403953552)


@triton.jit
def exponential(key, position, stream, ids):
    """Exp(1) variates of the same keys."""
    u = uniform(key, position, stream, ids)
    # -log1p(-u), which plain log would round to 0 for small u; those decide.
    rest = 1.0 - u
    return tl.where(rest == 1.0, u, -tl.log(rest) * (u / (1.0 - rest)))


# ---- Bounds on what an id can reach, for a fraction of what the variate takes: far below the best no more is needed.
# An exponential variate is no less than the uniform one it is made of, and nearly the same where it is small.


@triton.jit
def log_floor(bits, IS_FAST: tl.constexpr):
    """No more than the logarithm of the exponential variate of these bits, but for 1e-5."""
    x = bits.to(tl.float32) + 0.5
    if IS_FAST:
        base_2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
        return base_2 * 0.6931471805599453 - 21.487562597358306
    return tl.log(x) - 21.487562597358306


@triton.jit
def inverse_ceiling(bits, IS_FAST: tl.constexpr):
    """No less than the inverse of the exponential variate of these bits, but for a millionth of it."""
    x = (bits.to(tl.float32) + 0.5) * 4.656612873077393e-10
    if IS_FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return 1.0 / x
