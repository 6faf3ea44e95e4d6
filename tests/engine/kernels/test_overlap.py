"""Kernels that may start early wait before they touch anything that a step makes: in every program, before it ends."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from specbench.engine.kernels.overlap import launch_options

FOLDER = Path(__file__).resolve().parents[3] / "specbench" / "engine" / "kernels"
LAUNCH, WAIT = "tl.extra.cuda.gdc_launch_dependents()", "tl.extra.cuda.gdc_wait()"
#: Lets the next kernel start when it has waited itself ...
WAITS_FIRST = {"_attention_inputs"}
#: ... so that the next may read before it waits what the layers of a step never write.
READ_EARLY = {"_attend_tile": {"query_start_loc", "num_live", "first_position", "table"}}


HARMLESS = {"tl.program_id", "tl.minimum", "tl.maximum", "tl.cdiv", "tl.arange"}


def overlapping_kernels() -> list[ast.FunctionDef]:
    functions = [
        node
        for path in sorted(FOLDER.glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    return [node for node in functions if "MAY_OVERLAP" in [argument.arg for argument in node.args.args]]


def split_at_wait(kernel: ast.FunctionDef) -> tuple[list[ast.stmt], list[str]]:
    """What stands before the wait, and the wait itself."""
    (wait,) = [statement for statement in kernel.body if ast.unparse(statement).startswith("if MAY_OVERLAP:")]
    assert isinstance(wait, ast.If)
    before = kernel.body[bool(ast.get_docstring(kernel)) : kernel.body.index(wait)]
    return before, [ast.unparse(statement) for statement in wait.body]


def called(statements: list[ast.stmt]) -> list[tuple[str, set[str]]]:
    """Functions of Triton that are called, and the names in their first arguments."""
    calls = [node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call)]
    names = [{node.id for node in ast.walk(call.args[0]) if isinstance(node, ast.Name)} for call in calls]
    return [(ast.unparse(call.func), of_call) for call, of_call in zip(calls, names, strict=True)]


@pytest.mark.parametrize("kernel", overlapping_kernels(), ids=lambda kernel: kernel.name)
def test_a_kernel_waits_before_it_touches_what_a_step_makes(kernel: ast.FunctionDef) -> None:
    before, wait = split_at_wait(kernel)
    assert wait == ([WAIT, LAUNCH] if kernel.name in WAITS_FIRST else [LAUNCH, WAIT])
    if kernel.name not in READ_EARLY:
        assert not before
    for function, names in called(before):
        assert function in HARMLESS or function.endswith(".to") or names & READ_EARLY[kernel.name]
        assert "store" not in function and "atomic" not in function
    assert not any(isinstance(node, ast.Return) for statement in before for node in ast.walk(statement))


def test_nothing_overlaps_on_a_cpu() -> None:
    assert launch_options(torch.device("cpu")) == {"MAY_OVERLAP": False}
    assert len(overlapping_kernels()) >= 10
