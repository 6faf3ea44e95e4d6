"""Kernels that may start early wait before they touch anything: in every program, before it can end."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from specbench.engine.kernels.overlap import launch_options

FOLDER = Path(__file__).resolve().parents[3] / "specbench" / "engine" / "kernels"
WAIT = "if MAY_OVERLAP:\n    tl.extra.cuda.gdc_launch_dependents()\n    tl.extra.cuda.gdc_wait()"


def overlapping_kernels() -> list[ast.FunctionDef]:
    functions = [
        node
        for path in sorted(FOLDER.glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    return [node for node in functions if "MAY_OVERLAP" in [argument.arg for argument in node.args.args]]


@pytest.mark.parametrize("kernel", overlapping_kernels(), ids=lambda kernel: kernel.name)
def test_the_first_thing_a_kernel_does_is_to_wait(kernel: ast.FunctionDef) -> None:
    first = kernel.body[1] if ast.get_docstring(kernel) else kernel.body[0]
    assert ast.unparse(first) == WAIT


def test_nothing_overlaps_on_a_cpu() -> None:
    assert launch_options(torch.device("cpu")) == {"MAY_OVERLAP": False}
    assert len(overlapping_kernels()) >= 10
