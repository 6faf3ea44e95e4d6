"""Devices that engine tests run on: always the CPU; a GPU, behind its marker, with each attention backend that can do
what the tiny models ask for, in fp32, where texts must be equal."""

from __future__ import annotations

import pytest
import torch

from specbench.engine.layers.attention_backends.choose import BACKENDS

ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
ON_CPU = {"device": "cpu"}


def gpu_settings() -> list[dict[str, str]]:
    """Fields of EngineConfig, one dictionary a backend."""
    able = [
        name
        for name, line in BACKENDS.items()
        if "cuda" in line.devices and "float32" in line.dtypes and line.features >= {"window", "relative_bias"}
    ]
    return [{"device": "cuda", "attention_backend": name} for name in able]


def _name(settings: dict[str, str]) -> str:
    return "-".join(settings.values())


DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param(ON_CPU, id="cpu"),
        *(pytest.param(settings, marks=ON_GPU, id=_name(settings)) for settings in gpu_settings()),
    ],
)
