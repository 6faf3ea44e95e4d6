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
READ_EARLY = {
    "_attend_tile": {"query_start_loc", "num_live", "first_position", "table"},
    "_bias_tile": {"query_start_loc", "first_position", "rows", "own", "profiles"},
}
#: Lets the next kernel start when it has read all that it reads.
LAUNCHES_LAST = {"_gated_tile"}
#: Does so of many rows, and at once of few.
LAUNCHES_EITHER_WAY = {"_fp8_tile", "_nvfp4_tile"}
#: Writes what nothing that runs at the same time has in use, and waits last.
WAITS_LAST = {"_bias_tile"}
CONSTANTS = {"weight", "norm_weight", "of_weight", "of_codes", "of_scale", "scale", "codes", "block_scale", "row_scale"}
HARMLESS = {"tl.program_id", "tl.minimum", "tl.maximum", "tl.cdiv", "tl.arange", "tl.zeros"}
HARMLESS |= {"tl.dot", "tl.trans", "tl.where", "_request_of_row", "_keys_of_split", "first_biased", "_of_block"}


def overlapping_kernels() -> list[ast.FunctionDef]:
    functions = [
        node
        for path in sorted(FOLDER.glob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    ]
    return [node for node in functions if "MAY_OVERLAP" in [argument.arg for argument in node.args.args]]


def calls(statement: ast.stmt) -> list[tuple[str, set[str]]]:
    """Functions of Triton that it calls, and the names in their first arguments."""
    found = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return [
        (ast.unparse(call.func), {name.id for name in ast.walk(ast.Tuple(call.args[:1])) if isinstance(name, ast.Name)})
        for call in found
    ]


def only(statements: list[ast.stmt], call: str) -> int:
    """The place of the one statement that calls it, which is for kernels that may overlap."""
    (place,) = [index for index, statement in enumerate(statements) if call in ast.unparse(statement)]
    assert ast.unparse(statements[place]).startswith("if MAY_OVERLAP:")
    return place


def begins_with_another(body: list[ast.stmt]) -> bool:
    """Whether the first thing is a function that waits for it, and is tested itself."""
    functions = {function for function, _ in calls(body[0])}
    return bool(functions & {kernel.name for kernel in overlapping_kernels()})


@pytest.mark.parametrize("kernel", overlapping_kernels(), ids=lambda kernel: kernel.name)
def test_a_kernel_waits_before_it_touches_what_a_step_makes(kernel: ast.FunctionDef) -> None:
    body = kernel.body[bool(ast.get_docstring(kernel)) :]
    if begins_with_another(body):
        return
    if kernel.name in LAUNCHES_EITHER_WAY:
        last = max(index for index, statement in enumerate(body) if LAUNCH in ast.unparse(statement))
        assert last > only(body, WAIT)
        del body[last]
    launch, wait = only(body, LAUNCH), only(body, WAIT)
    text = ast.unparse(kernel)
    assert (launch <= wait) == (kernel.name not in LAUNCHES_LAST)
    assert (text.index(WAIT) < text.index(LAUNCH)) == (kernel.name in WAITS_FIRST | LAUNCHES_LAST)
    before = [statement for index, statement in enumerate(body[:wait]) if index != launch]
    may_read = CONSTANTS | READ_EARLY.get(kernel.name, set())
    for statement in before:
        assert not any(isinstance(node, ast.Return) for node in ast.walk(statement))
        for function, names in calls(statement):
            is_own = function == "tl.store" and kernel.name in WAITS_LAST
            assert is_own or ("store" not in function and "atomic" not in function)
            assert is_own or function in HARMLESS or function.endswith(".to") or names & may_read
    assert kernel.name not in WAITS_LAST or body[wait] is body[-1]


def test_nothing_overlaps_on_a_cpu() -> None:
    assert launch_options(torch.device("cpu")) == {"MAY_OVERLAP": False}
    assert len(overlapping_kernels()) >= 10
