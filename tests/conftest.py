"""For every test: one torch thread, Triton's interpreter where there is no GPU, data that may lie beside the
repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Read where kernels are defined: without a GPU they run in Triton's interpreter.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the real evaluation data; the test is skipped where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no data at {folder}")
    return folder
