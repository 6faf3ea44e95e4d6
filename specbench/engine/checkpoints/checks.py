"""Checks names and shapes of a checkpoint against what a model family expects, before any weight is read. No torch.

Belongs here: the refusals. Does not belong here: which tensors a family expects (models/*_config.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from specbench.engine.checkpoints.checkpoint import Checkpoint
from specbench.engine.checkpoints.quantised import FP8, NVFP4
from specbench.engine.checkpoints.tensor_entry import TensorEntry
from specbench.errors import UserError, near_name

#: Types that weights may be stored in as they are.
STORED_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class ExpectedTensors:
    """What a model family reads from a checkpoint."""

    #: name -> shape. All of these are read.
    required: Mapping[str, tuple[int, ...]]
    #: name -> shape. Known, not read (modules beyond those asked for).
    unread: Mapping[str, tuple[int, ...]]
    #: A tensor under one of these that is in neither map is an error; any other stranger is ignored.
    strict_prefixes: tuple[str, ...]
    #: name -> what is wrong when the checkpoint has it.
    forbidden: Mapping[str, str]
    #: Ends of the names of tensors that stay in fp32, whatever the model's type.
    float32_suffixes: tuple[str, ...] = ()
    #: name -> shape. Known, never read, and no parameters: copies of others, and constants.
    redundant: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def num_bytes(self, element_size: int) -> int:
        """Bytes of everything that is read, as it lies on the device."""
        return sum(
            math.prod(shape) * (4 if name.endswith(self.float32_suffixes) else element_size)
            for name, shape in self.required.items()
        )


def check_tensors(checkpoint: Checkpoint, expected: ExpectedTensors) -> None:
    """Raise a UserError for the first tensor that is missing, misshapen, quantised, forbidden or unknown."""
    for name, shape in expected.required.items():
        if name not in checkpoint.tensors:
            raise UserError(
                f"{checkpoint.path}: tensor {name} {_text(shape)} is missing from its {len(checkpoint.files)} "
                "safetensors file(s); fetch the checkpoint again, or correct config.json"
            )
        _check_entry(checkpoint.tensors[name], shape)
    for name, entry in checkpoint.tensors.items():
        if name in expected.forbidden:
            raise UserError(f"{entry.file}: tensor {name} {_text(entry.shape)}: {expected.forbidden[name]}")
        if name in expected.required or name in expected.unread or name in expected.redundant:
            continue
        if name.startswith(expected.strict_prefixes):
            hint = near_name(name, [*expected.required, *expected.unread])
            raise UserError(
                f"{entry.file}: tensor {name} {_text(entry.shape)} is unknown, {hint} "
                "Correct config.json if it declares too little, or remove the tensor"
            )


def _check_entry(entry: TensorEntry, shape: tuple[int, ...]) -> None:
    if entry.shape != shape:
        raise UserError(
            f"{entry.file}: tensor {entry.name} has shape {_text(entry.shape)}, config.json makes it {_text(shape)}; "
            "correct config.json or fetch the file that belongs to it"
        )
    if entry.dtype not in (*STORED_DTYPES, FP8, NVFP4):
        raise UserError(
            f"{entry.file}: tensor {entry.name} is stored as {entry.dtype}, not as one of {', '.join(STORED_DTYPES)}, "
            f"and not with the scales of {FP8} or {NVFP4}; use a checkpoint that is not quantised in another way"
        )


def _text(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
