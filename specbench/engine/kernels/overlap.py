"""Kernels that start before the one before them has ended (programmatic dependent launch, Hopper and later).

A kernel that may overlap does nothing but ask for constants before it waits; it waits in every program; and it lets the
next kernel start at once, which waits in its turn. So whoever waits has everything that was launched before it, and the
time between two kernels is hidden.

The gated product (gated_product.py) starts no next kernel early, beside which that one's first weights would only
compete with its own; nor do products with codes of more than 16 rows, of which programs would wait for their places.

The kernel that makes attention's inputs lets the next start only when it has waited itself. So attention finds what was
there before that kernel, lengths and block tables, without waiting, and can ask for keys right after. And biases, which
depend on what that kernel reads and not on what it writes, are made beside it: theirs waits last.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl


@cache
def may_overlap(device: torch.device) -> bool:
    """Whether kernels of this device may."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch: what the kernel is told, and what the launch is."""
    return {"MAY_OVERLAP": True, "launch_pdl": True} if may_overlap(device) else {"MAY_OVERLAP": False}


@triton.jit
def ask_for(addresses):
    """Brings the lines of 128 bytes at these pointers to the cache that all multiprocessors share, and waits for none.
    What is written to them meanwhile is written there, too. Only for kernels that may overlap."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
