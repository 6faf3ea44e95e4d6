"""What this machine can run, and why not: one line a check.

Belongs here: the checks of `specbench doctor`. Does not belong here: mending anything.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specbench import environment, model_choice
from specbench.errors import UserError

HUB = "https://huggingface.co"
HUB_TIMEOUT_S = 3.0
#: What the packaged model needs with room to spare.
NEEDED_MEMORY_BYTES = 2 * 2**30


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    good: bool
    text: str


@dataclass(frozen=True, slots=True)
class Check:
    """One thing to look at. What is not needed for `specbench +model=inkling spec=mtp8 eval=gsm8k` only informs."""

    name: str
    needed: bool
    look: Callable[[], Finding]


def run() -> int:
    """Print every check; 0 when everything that is needed is there."""
    can_run = True
    for check in CHECKS:
        finding = _look(check)
        can_run = can_run and (finding.good or not check.needed)
        mark = "ok  " if finding.good else ("FAIL" if check.needed else "no  ")
        print(f"{mark} {check.name:<12}{finding.text}")
    verdict = "can" if can_run else "can NOT"
    print(f"This machine {verdict} run: specbench +model=inkling spec=mtp8 eval=gsm8k")
    return 0 if can_run else 1


def _look(check: Check) -> Finding:
    """A check that breaks is a finding too: the machine is what is looked at."""
    try:
        return check.look()
    except Exception as error:
        return Finding(False, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    return Finding(good, f"{platform.python_version()}{'' if good else ': 3.11 or newer is needed'}")


def _torch() -> Finding:
    import torch

    return Finding(True, f"{torch.__version__}, {torch.get_num_threads()} threads")


def _cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        return Finding(
            False,
            f"no device seen, torch {f'for CUDA {built}' if built else 'built for CPU only'}: runs are on the CPU",
        )
    devices = range(torch.cuda.device_count())
    names = ", ".join(torch.cuda.get_device_name(index) for index in devices)
    if len(devices) == 1:
        return Finding(True, names)
    can_all = all(torch.cuda.can_device_access_peer(one, other) for one in devices for other in devices if one != other)
    reach = "each reaches" if can_all else "not all reach"
    return Finding(True, f"{names}; {reach} the others' memory")


def _packages() -> Finding:
    names = ("hydra", "omegaconf", "transformers", "tokenizers", "safetensors", "pyarrow", "rich", "soundfile", "soxr")
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing.append(f"{name} ({error})")
    return Finding(not missing, f"missing: {', '.join(missing)}" if missing else ", ".join(names))


def _memory() -> Finding:
    free = environment.free_memory_bytes()
    if free is None:
        return Finding(True, "free memory can't be read here")
    return Finding(
        free >= NEEDED_MEMORY_BYTES, f"{free / 2**30:.1f} GiB free of {(environment.memory_bytes() or 0) / 2**30:.1f}"
    )


def _cores() -> Finding:
    hardware, load = environment.hardware(), os.getloadavg()[0]
    busy = "; other work is running: speed figures will suffer" if load > 0.5 * (hardware["cores"] or 1) else ""
    return Finding(not busy, f"{hardware['cores']} of {hardware['cpu']}, load average {load:.2f}{busy}")


def _checkpoint() -> Finding:
    """Names, shapes and the recorded hash of the packaged checkpoint."""
    from specbench.engine.checkpoints.checkpoint import Checkpoint
    from specbench.engine.models.registry import check_checkpoint, load_model_config

    checkpoint = Checkpoint.open(model_choice.PACKAGED_CHECKPOINT)
    config = load_model_config(checkpoint)
    check_checkpoint(checkpoint, config, config.num_modules)
    found = checkpoint.sha256()
    recorded = model_choice.packaged_sha256()
    if recorded is not None and recorded != found:
        return Finding(False, f"sha256 {found[:12]} is not the recorded {recorded[:12]}: install specbench again")
    intact = "no recorded hash to compare with" if recorded is None else "intact"
    return Finding(True, f"{config.num_modules} MTP modules, sha256 {found[:12]}, {intact}")


def _tokenizer() -> Finding:
    from specbench.engine.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model_choice.PACKAGED_CHECKPOINT)
    if tokenizer is None:
        return Finding(False, f"no tokenizer in {model_choice.PACKAGED_CHECKPOINT}")
    text = "Tom has 12 apples."
    good = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    return Finding(
        good, f"{tokenizer.vocab_size} tokens, {'text comes back as it went in' if good else 'text does not come back'}"
    )


def _problems() -> Finding:
    from specbench.evals.gsm8k import PACKAGED_PROBLEMS

    num_rows = sum(1 for _ in (PACKAGED_PROBLEMS / "test.jsonl").open(encoding="utf-8"))
    return Finding(num_rows > 0, f"{num_rows} packaged")


def _disk() -> Finding:
    try:
        with tempfile.TemporaryDirectory(dir=Path.cwd()):
            return Finding(True, f"{Path.cwd()} can be written")
    except OSError as error:
        raise UserError(f"{Path.cwd()} can't be written ({error.strerror}): say output_root=DIR") from error


def _hub() -> Finding:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return Finding(False, "HF_HUB_OFFLINE=1: give folders and files")
    try:
        with urllib.request.urlopen(urllib.request.Request(HUB, method="HEAD"), timeout=HUB_TIMEOUT_S):
            return Finding(True, "reachable")
    except OSError:
        return Finding(False, "not reachable: give folders and files (model.checkpoint=DIR, eval.data=FILE)")


def _git() -> Finding:
    commit = environment.commit()
    if commit.commit is None:
        return Finding(False, "not run from a checkout: runs record the version only")
    return Finding(not commit.is_dirty, f"commit {commit.commit[:12]}{', with changes' if commit.is_dirty else ''}")


CHECKS = (
    Check("python", True, _python),
    Check("packages", True, _packages),
    Check("torch", True, _torch),
    Check("CUDA", False, _cuda),
    Check("cores", False, _cores),
    Check("memory", True, _memory),
    Check("checkpoint", True, _checkpoint),
    Check("tokenizer", True, _tokenizer),
    Check("problems", True, _problems),
    Check("disk", False, _disk),
    Check("hub", False, _hub),
    Check("git", False, _git),
)
