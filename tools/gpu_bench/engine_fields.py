"""Fields of the engine that a call of a benchmark may set, checked before anything is measured.

Belongs here: which fields, and what they may be. Does not belong here: what the benchmarks decide themselves (shapes,
lengths, batch sizes, who drafts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specbench.engine.layers.attention_backends.choose import BACKENDS, choose_backend, choose_graphs
from specbench.errors import UserError

_SWITCH = {"true": True, "on": True, "false": False, "off": False}
#: Field -> what it may be, by how that is written.
_CHOICES: Mapping[str, Mapping[str, object]] = {
    "attention_backend": {name: name for name in BACKENDS},
    "cuda_graphs": _SWITCH,
    "dtype": {name: name for name in ("bfloat16", "float32")},
    "pipeline_depth": {"0": 0, "1": 1},
    "prefix_caching": _SWITCH,
}
#: Fields that are whole numbers above 0.
_COUNTS = ("block_size", "max_num_batched_tokens", "num_blocks")


def engine_fields(texts: Sequence[str], device: torch.device, defaults: Mapping[str, Any]) -> dict[str, object]:
    """Of FIELD=VALUE. UserError where there is no such field, or it cannot have the value or, with `defaults` for the
    others, not on the device."""
    fields = dict(_field(text) for text in texts)
    wanted = {"attention_backend": "torch", "dtype": "bfloat16", "cuda_graphs": False} | dict(defaults) | fields
    if fields:
        backend = choose_backend(wanted["attention_backend"], str(device), wanted["dtype"], features=()).name
        if wanted["cuda_graphs"]:
            choose_graphs("on", backend, str(device))
    return fields


def _field(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise UserError(f"--engine {text}: {name} is one of {', '.join(_CHOICES[name])}")
        return name, _CHOICES[name][value]
    if name not in _COUNTS:
        known = ", ".join(sorted([*_CHOICES, *_COUNTS]))
        raise UserError(f"--engine {text}: no field {name!r} to set; there are {known}")
    if not value.isdigit() or int(value) == 0:
        raise UserError(f"--engine {text}: {name} is a whole number above 0")
    return name, int(value)
