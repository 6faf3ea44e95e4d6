"""Who may import whom: read from the sources, import by import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "specbench"
MODULES = sorted(PACKAGE.rglob("*.py"))

#: The floors of the package, the ground first. A module may import its own floor and those below it.
FLOORS = (
    ("records", "errors", "signals", "conf_folder", "engine.kernels", "engine.shard"),
    (
        "generate",
        "redaction",
        "record_columns",
        "record_reading",
        "record_tables",
        "outcome",
        "submission",
        "trace",
        "config_values",
        "engine.config",
        "engine.cache_group",
        "engine.proposer_table",
    ),
    ("run_directory", "run_config", "resolved_config"),
    ("engine", "servers", "evals", "arrivals", "reports", "environment", "model_choice", "recorded_drafts"),
    ("plan",),
    ("terminal",),
    ("machinery",),
    ("beside_plain", "measuring"),
    ("benchmark", "doctor"),
    ("sweep",),
    ("commands",),
    ("cli",),
)
#: The same inside the engine.
ENGINE_FLOORS = (
    ("kernels", "shard"),
    ("config", "cache_group", "prefix_keys", "proposer_table"),
    ("layers", "checkpoints", "content", "channels", "chat", "detokenizer", "stop_strings"),
    # Metadata of rows is built alike for the target and for a drafter, so it lies below both.
    ("models", "sampling", "tokenizer", "request", "request_records", "output_stream"),
    ("proposers",),
    ("scheduling", "execution"),
    ("llm_engine", "replay"),
    ("parallel_engine",),
    ("engines",),
)
#: Folder -> what it may import of ours, whatever its floor.
ONLY = {
    "engine": ("engine", "records", "record_columns", "errors", "generate", "submission"),
    "evals": ("evals", "records", "errors", "generate", "run_config"),
    "reports": ("reports", "records", "record_columns", "errors", "run_directory"),
    "engine.kernels": ("engine.kernels",),
    "records": (),
    "errors": (),
}
ONLY_CLI = ("hydra", "omegaconf")
#: Modules that must come without these, so that `--help` and every configuration error come at once.
HEAVY = ("torch", "transformers", "datasets", "pandas", "pyarrow", "scipy", "matplotlib", "markdown_it")
LIGHT = (
    "cli",
    "run_config",
    "errors",
    "records",
    "generate",
    "arrivals",
    "environment",
    "model_choice",
    "plan",
    "benchmark",
)


def dotted(path: Path) -> str:
    """The module's name below specbench."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_top: bool = False) -> Iterator[str]:
    """Absolute names that a module imports. `at_top`: only what is imported with it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in _nodes(tree, at_top):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from _from_names(node)


def _nodes(tree: ast.AST, at_top: bool) -> Iterator[ast.AST]:
    if not at_top:
        yield from ast.walk(tree)
        return
    for child in ast.iter_child_nodes(tree):
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not is_typing and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _nodes(child, at_top=True)


def _from_names(node: ast.ImportFrom) -> Iterator[str]:
    """`from specbench import x` may mean the module specbench.x; any other form names its module."""
    assert node.module is not None
    for alias in node.names:
        inside = PACKAGE.joinpath(*node.module.split(".")[1:], alias.name)
        is_module = node.module.split(".")[0] == "specbench" and (
            inside.is_dir() or inside.with_suffix(".py").is_file()
        )
        yield f"{node.module}.{alias.name}" if is_module else node.module


def ours(path: Path) -> list[str]:
    """Modules of specbench that a module imports, below specbench; the package's own version apart."""
    names = {name for name in imports(path) if name.split(".")[0] == "specbench"}
    return sorted(name.partition(".")[2] for name in names if name != "specbench")


def floor(name: str, floors: tuple[tuple[str, ...], ...]) -> int:
    """The floor of the longest prefix that is named."""
    found = [
        (len(prefix), level) for level, prefixes in enumerate(floors) for prefix in prefixes if is_in(name, prefix)
    ]
    assert found, f"specbench.{name}: has no floor; add it to test_imports.py"
    return max(found)[1]


def is_in(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_direction(path: Path) -> None:
    name = dotted(path)
    if not name:
        return
    for imported in ours(path):
        assert floor(imported, FLOORS) <= floor(name, FLOORS), f"{name} must not import {imported}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "engine").rglob("*.py")), ids=dotted)
def test_direction_inside_the_engine(path: Path) -> None:
    name = dotted(path).partition(".")[2]
    if not name:
        return
    for imported in ours(path):
        if is_in(imported, "engine") and imported != "engine":
            inner = imported.partition(".")[2]
            assert floor(inner, ENGINE_FLOORS) <= floor(name, ENGINE_FLOORS), (
                f"engine.{name} must not import {imported}"
            )


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_closed_circles(path: Path) -> None:
    name = dotted(path)
    for owner, allowed in ONLY.items():
        if is_in(name, owner):
            for imported in ours(path):
                assert any(is_in(imported, prefix) for prefix in allowed), f"{name} must not import {imported}"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_only_the_command_line_knows_hydra(path: Path) -> None:
    if dotted(path) != "cli":
        assert not {name.split(".")[0] for name in imports(path)} & set(ONLY_CLI)


def test_no_circle_of_files() -> None:
    """Imports inside functions and for types included: a file can be read after those that it imports."""
    waiting = {dotted(path): set(ours(path)) - {dotted(path)} for path in MODULES if path.stem != "__init__"}
    while ready := [name for name, needed in waiting.items() if not needed & waiting.keys()]:
        for name in ready:
            del waiting[name]
    assert not waiting, f"files in a circle, or above one: {sorted(waiting)}"


def test_scheduling_knows_no_torch() -> None:
    for path in (PACKAGE / "engine" / "scheduling").glob("*.py"):
        assert "torch" not in {name.split(".")[0] for name in imports(path, at_top=True)}, path


@pytest.mark.parametrize("name", LIGHT)
def test_light_modules_load_nothing_heavy(name: str) -> None:
    """Followed through everything that comes with the import."""
    seen: set[str] = set()
    waiting = [name]
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        path = PACKAGE.joinpath(*current.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        names = list(imports(path, at_top=True))
        assert not {entry.split(".")[0] for entry in names} & set(HEAVY), f"{name} loads {current}, which is heavy"
        waiting += [entry.partition(".")[2] for entry in names if entry.startswith("specbench.")]


def test_no_drawer_for_everything() -> None:
    assert not [path for path in MODULES if path.stem in ("utils", "util", "helpers", "common", "misc")]
