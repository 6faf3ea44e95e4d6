"""What a checkpoint is called in records, and the hash of its bytes."""

from __future__ import annotations

from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, Checkpoint
from specbench.engine.models.registry import num_parameters
from specbench.model_choice import ModelChoice
from specbench.records import ModelIdentity

_KNOWN_HASHES: dict[tuple, str] = {}


def model_identity(choice: ModelChoice, checkpoint: Checkpoint, num_modules: int = 0) -> ModelIdentity:
    return ModelIdentity(
        requested=choice.requested,
        ran=choice.ran,
        path=str(choice.path),
        revision=choice.revision,
        sha256=checkpoint_sha256(checkpoint),
        packaged=choice.packaged,
        num_parameters=num_parameters(checkpoint),
        num_modules=num_modules,
    )


def checkpoint_sha256(checkpoint: Checkpoint) -> str:
    """The checkpoint's hash; read again only when a file has another size or time."""
    files = (checkpoint.path / CONFIG_FILE, *checkpoint.files)
    stamps = tuple((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    if stamps not in _KNOWN_HASHES:
        _KNOWN_HASHES[stamps] = checkpoint.sha256()
    return _KNOWN_HASHES[stamps]
