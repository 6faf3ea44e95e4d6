"""Which attention backend runs: the table of them, with what each can do as data, and the choice among them. No torch.

Belongs here: what must be known of a backend before anything is loaded. Does not belong here: what a backend does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specbench.errors import UserError

if TYPE_CHECKING:
    from specbench.engine.layers.attention_backends.backend import AttentionBackend

#: What a model may ask for beyond softmax over all keys up to a row's own. Sliding windows; a bias by distance and the
#: scaling of scores that comes with it; heads of another size than 64, 128 and 256.
AttentionFeature = Literal["window", "relative_bias", "head_size"]
COMMON_HEAD_SIZES = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class BackendLine:
    """One backend."""

    #: File of this folder and class in it, made without arguments.
    implementation: str
    features: frozenset[AttentionFeature]
    dtypes: frozenset[str]
    #: Kinds of devices.
    devices: frozenset[str]
    #: Whether a CUDA graph may hold its launches.
    is_capturable: bool
    #: Package that must be installed beside torch.
    package: str | None = None
    #: What is to be known of its speed.
    speed: str = ""


#: The order in which `auto` asks, the fastest first: docs/gpu_benchmark.md has the figures, of one H200 and a layer of
#: 32 heads over 8 key heads. Triton's kernel took less in every case: decoding and 9 rows at 1 to 64 requests, prompts.
BACKENDS = {
    "triton": BackendLine(
        "triton_backend.TritonAttention",
        frozenset({"window", "relative_bias", "head_size"}),
        frozenset({"float32", "bfloat16"}),
        frozenset({"cuda"}),
        is_capturable=True,
        package="triton",
        speed="on an H200 it took 487 us for 9 rows of 64 requests over 8,192 tokens, flashinfer 605",
    ),
    "torch": BackendLine(
        "torch_backend.TorchAttention",
        frozenset({"window", "relative_bias", "head_size"}),
        frozenset({"float32", "bfloat16"}),
        frozenset({"cpu", "cuda"}),
        is_capturable=False,
    ),
    "flashinfer": BackendLine(
        "flashinfer_backend.FlashInferAttention",
        frozenset({"window"}),
        frozenset({"bfloat16"}),
        frozenset({"cuda"}),
        is_capturable=True,
        package="flashinfer",
        speed="it compiles its kernels on first use, for about half a minute",
    ),
}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What runs, and why."""

    name: str
    reason: str


def choose_backend(
    name: str, device: str, dtype: str, features: Iterable[AttentionFeature], *, is_here: bool = True
) -> BackendChoice:
    """The named backend, or for `auto` the first that can do it. UserError where the named one can't.

    is_here: whether the device is this machine's; another machine has the packages that it needs.
    """
    wanted = frozenset(features)
    refusals = {
        other: _refusal(other, device, dtype, wanted, is_named=other == name, is_here=is_here) for other in BACKENDS
    }
    able = [other for other, refusal in refusals.items() if refusal is None]
    if name == "auto":
        before = list(refusals.items())[: list(refusals).index(able[0])]
        reasons = [f"{other} {refusal}" for other, refusal in before] or [BACKENDS[able[0]].speed]
        return BackendChoice(able[0], "; ".join(reasons))
    if refusals[name] is not None:
        raise UserError(f"engine.attention_backend: {name} {refusals[name]}; say {' or '.join(able)}, or auto")
    speed = BACKENDS[name].speed
    return BackendChoice(name, f"as asked; {speed}" if speed else "as asked")


def choose_graphs(asked: str, backend: str, device: str) -> BackendChoice:
    """Whether steps of decoding are recorded in CUDA graphs, "on" or "off". UserError where they must and can't be."""
    refusal = None
    if device.partition(":")[0] != "cuda":
        refusal = f"there are none on {device}"
    elif not BACKENDS[backend].is_capturable:
        able = " or ".join(name for name, line in BACKENDS.items() if line.is_capturable)
        refusal = f"attention by {backend} cannot be recorded; engine.attention_backend={able} can"
    if asked == "on" and refusal is not None:
        raise UserError(f"engine.cuda_graphs=on: {refusal}; say auto or off")
    if asked != "auto":
        return BackendChoice(asked, "as asked")
    return BackendChoice("on", f"{backend} can be recorded") if refusal is None else BackendChoice("off", refusal)


def make_backend(name: str) -> AttentionBackend:
    """A backend of the table."""
    file, _, cls = BACKENDS[name].implementation.partition(".")
    module = importlib.import_module(f"specbench.engine.layers.attention_backends.{file}")
    backend: AttentionBackend = getattr(module, cls)()
    return backend


def _refusal(
    name: str, device: str, dtype: str, features: frozenset[AttentionFeature], *, is_named: bool, is_here: bool
) -> str | None:
    """Why a backend can't run; None where it can."""
    line = BACKENDS[name]
    kind = device.partition(":")[0]
    # Triton's interpreter runs on a CPU what is meant for a GPU, in minutes for seconds: for who asks for it.
    is_interpreted = is_named and name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if kind not in line.devices and not is_interpreted:
        return f"does not run on {kind}"
    if is_here and line.package is not None and importlib.util.find_spec(line.package) is None:
        return f"needs the package {line.package}, which is not installed"
    if dtype not in line.dtypes:
        return f"does not run in {dtype}"
    missing = sorted(features - line.features)
    return f"does not do {' and '.join(missing)}" if missing else None
