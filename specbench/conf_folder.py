"""The configuration's folder as it lies on disk, read without Hydra: groups, their options, and how to run each.

Does not belong here: composing (cli.py), what a value means (run_config.py).
"""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """conf/: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "conf"
    return inside if inside.is_dir() else package.parent / "conf"


def groups() -> dict[str, list[str]]:
    """Group -> its options. A file whose name begins with "_" is what options of its group start from."""
    return {
        folder.name: sorted(path.stem for path in folder.glob("[!_]*.yaml"))
        for folder in sorted(conf_dir().iterdir())
        if folder.is_dir()
    }


def groups_text() -> str:
    return "\n".join(f"  {name:<11}{', '.join(options)}" for name, options in groups().items())


def how_to(path: Path) -> str:
    """The first comment of an option's file that is not for Hydra: how to run it."""
    comments = (line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    return next(comment for comment in comments if not comment.startswith("@"))
