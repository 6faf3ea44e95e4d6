"""Right drafts for the stub: what plain decoding says, recorded before the run or taken from an earlier one.

Belongs here: from `spec.drafts` to a file of JSON lines that the stub reads. Does not belong here: how drafts are
spoilt (engine/proposers/stub.py), running requests (benchmark.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

from specbench.errors import UserError
from specbench.run_directory import RUN_FILE, RunDirectory

#: spec.drafts: record plain decoding of the run's own requests before it.
AUTO = "auto"
DRAFTS_FILE = "drafts.jsonl"

#: Token ids of a prompt and of what was said to it.
Recorded = tuple[list[int], list[int]]


def check_drafts(drafts: str, checkpoint_sha256: Callable[[], str]) -> None:
    """UserError where spec.drafts names nothing to draft from, or another checkpoint's run.

    `checkpoint_sha256` hashes the checkpoint that is to run; called only where it is needed, since it reads every byte.
    """
    if drafts == AUTO:
        return
    path = Path(drafts)
    if not path.exists():
        raise UserError(f"spec.drafts: {path} does not exist; say auto, or name a run directory or a file")
    if not path.is_dir():
        return
    if not (path / RUN_FILE).is_file():
        raise UserError(f"spec.drafts: {path} is not a run directory, it has no {RUN_FILE}; name one, or a file")
    model = RunDirectory.open(path).read_run().model
    if model.sha256 != (here := checkpoint_sha256()):
        raise UserError(
            f"spec.drafts: {path} ran {model.ran}, another checkpoint (sha256 {str(model.sha256)[:12]}, here "
            f"{here[:12]}); name a run of this one"
        )
    if not recorded_in(path):
        raise UserError(f"spec.drafts: {path} holds no sample with output; name a run that finished")


def recorded_in(run_directory: Path) -> list[Recorded]:
    """Prompts and outputs of a run's samples."""
    samples = RunDirectory.open(run_directory).read_event_log().samples
    return [
        (list(sample.prompt_token_ids), list(sample.output_token_ids))
        for sample in samples
        if sample.prompt_token_ids is not None and len(sample.output_token_ids)
    ]


def drafts_sha256(drafts: Path) -> str:
    """Hash of what spec.drafts names: a file, or a run's samples."""
    if drafts.is_file():
        return hashlib.sha256(drafts.read_bytes()).hexdigest()
    return hashlib.sha256(json.dumps(recorded_in(drafts)).encode()).hexdigest()


def write_drafts(file: Path, recorded: Iterable[Recorded]) -> None:
    lines = (json.dumps({"prompt_token_ids": prompt, "output_token_ids": output}) for prompt, output in recorded)
    text = "".join(line + "\n" for line in lines)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{file}: cannot be written ({error.strerror}); name another place with output_root=DIR"
        ) from error
