"""Where a run took place: hardware and its state, packages, and specbench's own commit.

Belongs here: reading the machine, tolerantly; what cannot be read is None or absent, never a guess. Does not belong
here: judging it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "numpy",
    "pyarrow",
    "hydra-core",
    "soundfile",
    "soxr",
)
#: A process that used less than this share of one core is not worth a line.
HEAVY_CORE_SHARE = 0.1

_PACKAGE_DIR = Path(__file__).resolve().parent
_GPU_STATE = ("clocks.sm", "clocks.mem", "temperature.gpu", "utilization.gpu", "clocks_event_reasons.active")


def hardware() -> dict:
    """What does not change while a run goes on."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "core_quota": _core_quota(),
        "memory_bytes": memory_bytes(),
        "gpus": [{"name": name, "memory": memory, "driver": driver} for name, memory, driver in _gpus()],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def memory_bytes() -> int | None:
    """Memory that this process may use: the machine's, or its control group's limit."""
    found = [_meminfo("MemTotal"), _number("/sys/fs/cgroup/memory.max")]
    return min((value for value in found if value is not None), default=None)


def free_memory_bytes() -> int | None:
    """Memory that is not in use now."""
    free = _meminfo("MemAvailable")
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    if free is None or limit is None or used is None:
        return free
    return min(free, limit - used)


def state() -> dict:
    """What may change while a run goes on: load, clocks, throttling."""
    return {
        "load_average": list(os.getloadavg()),
        "cpu_mhz": _cpu_mhz(),
        "cpu_throttle_count": _number("/sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count"),
        "gpus": [dict(zip(_GPU_STATE, row, strict=True)) for row in _nvidia_smi(_GPU_STATE)],
    }


def packages() -> dict[str, str]:
    """Versions of what decides a run's numbers; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True, slots=True)
class Commit:
    """The commit of specbench's own checkout, None outside one, and whether files differ from it."""

    commit: str | None
    is_dirty: bool | None


def commit() -> Commit:
    """Of the checkout that this package runs from: an installed copy inside another project's checkout has none."""
    top = _git("rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != _PACKAGE_DIR.parent:
        return Commit(None, None)
    changed = _git("status", "--porcelain")
    return Commit(_git("rev-parse", "HEAD"), None if changed is None else changed != "")


def source_sha256() -> str:
    """Over this package's source files: changes with any commit and any edit that matters to a run."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE_DIR.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE_DIR).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


class ProcessWatch:
    """Which other processes took CPU time between its making and `heavy`."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._at_start = dict(_cpu_seconds())

    def heavy(self) -> list[dict]:
        """Name and cores used of each other process above HEAVY_CORE_SHARE, the heaviest first."""
        elapsed_s = max(time.monotonic() - self._started_s, 1e-9)
        cores = {
            key: (now - self._at_start.get(key, 0.0)) / elapsed_s
            for key, now in _cpu_seconds()
            if key[0] != os.getpid()
        }
        heavy = sorted((key for key, used in cores.items() if used >= HEAVY_CORE_SHARE), key=lambda key: -cores[key])
        return [{"pid": pid, "name": name, "cores": round(cores[pid, name], 2)} for pid, name in heavy[:10]]


def _cpu_seconds() -> Iterable[tuple[tuple[int, str], float]]:
    """(pid, name) and the CPU seconds it has used, for each process that can be seen."""
    tick = os.sysconf("SC_CLK_TCK")
    for stat in Path("/proc").glob("[0-9]*/stat"):
        text = _read(stat)
        if text is None:
            continue
        name, fields = text[text.find("(") + 1 : text.rfind(")")], text[text.rfind(")") + 2 :].split()
        yield (int(stat.parent.name), name), (int(fields[11]) + int(fields[12])) / tick


def _cpu_name() -> str:
    for line in (_read("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_mhz() -> float | None:
    """The mean over the cores, where the kernel tells."""
    found = [
        float(line.partition(":")[2])
        for line in (_read("/proc/cpuinfo") or "").splitlines()
        if line.startswith("cpu MHz")
    ]
    return round(sum(found) / len(found), 1) if found else None


def _core_quota() -> float | None:
    """Cores that the control group allows; None where there is no limit."""
    quota, _, period = (_read("/sys/fs/cgroup/cpu.max") or "max").partition(" ")
    return None if quota.strip() == "max" else int(quota) / int(period)


def _meminfo(key: str) -> int | None:
    for line in (_read("/proc/meminfo") or "").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return None


def _gpus() -> list[list[str]]:
    return _nvidia_smi(("name", "memory.total", "driver_version"))


def _nvidia_smi(columns: tuple[str, ...]) -> list[list[str]]:
    """One row a GPU; no rows where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    text = _output(["nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (text or "").splitlines()]
    return [row for row in rows if len(row) == len(columns)]


def _git(*arguments: str) -> str | None:
    return _output(["git", "-C", str(_PACKAGE_DIR), *arguments])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _number(path: str) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: str | Path) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
