"""Which checkpoint runs for the `model` group: a folder, a repository on the hub, or the packaged one.

Belongs here: from names to a folder and an identity. Does not belong here: what is in the folder (engine/checkpoints/).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbench.errors import UserError
from specbench.run_config import WITH_PACKAGED, ModelConfig

PACKAGED_NAME = "inkling-nano"
HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")

_ASSETS = Path(__file__).resolve().parent / "assets"
PACKAGED_CHECKPOINT = _ASSETS / "inkling_nano"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A checkpoint's folder and what to call it."""

    #: As the user asked: the group's option, or the checkpoint that was named.
    requested: str
    #: Names directories, titles and exports.
    ran: str
    path: Path
    revision: str | None
    packaged: bool

    @property
    def is_fallback(self) -> bool:
        """Something else runs than what was asked for."""
        return self.packaged and self.requested != "inkling_nano"


def choose_model(config: ModelConfig) -> ModelChoice:
    """The checkpoint that the configuration means; UserError when it can't be found."""
    if config.checkpoint is None:
        return _packaged(config)
    return _find(config.checkpoint, config.revision, config.name, "model.checkpoint")


def choose_draft(checkpoint: str) -> ModelChoice:
    """The checkpoint of a draft model; UserError when it can't be found."""
    if Path(checkpoint) == PACKAGED_CHECKPOINT:
        return ModelChoice(PACKAGED_NAME, PACKAGED_NAME, PACKAGED_CHECKPOINT, None, packaged=True)
    return _find(checkpoint, None, checkpoint, "spec.checkpoint")


def _find(checkpoint: str, revision: str | None, requested: str, key: str) -> ModelChoice:
    """A folder or a repository that the setting `key` names."""
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        return ModelChoice(requested, folder.resolve().name, folder.resolve(), revision, packaged=False)
    if folder.exists() or not _looks_like_repository(checkpoint):
        raise UserError(f"{key}: {checkpoint} is not a folder with a checkpoint; name one")
    path, revision = _download(checkpoint, revision, key)
    return ModelChoice(requested, checkpoint.replace("/", "--"), path, revision, packaged=False)


def _packaged(config: ModelConfig) -> ModelChoice:
    assert config.name in WITH_PACKAGED, "run_config refuses other models without a checkpoint"
    if not (PACKAGED_CHECKPOINT / "config.json").is_file():
        raise UserError(
            f"model.checkpoint: unset, and the packaged checkpoint is missing from {PACKAGED_CHECKPOINT}; install "
            "specbench again or say model.checkpoint=DIR"
        )
    return ModelChoice(config.name, PACKAGED_NAME, PACKAGED_CHECKPOINT, None, packaged=True)


def _looks_like_repository(name: str) -> bool:
    """owner/name, and no way to read it as a path."""
    owner, slash, repository = name.partition("/")
    return bool(owner and slash and repository) and "/" not in repository and owner not in (".", "..", "~")


def _download(repository: str, revision: str | None, key: str) -> tuple[Path, str]:
    """A snapshot of the repository in the hub's cache, and the commit it is."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=list(HUB_FILES), etag_timeout=5))
    except Exception as error:  # the hub's client raises its own, requests' and the system's errors
        raise UserError(
            f"{key}: {repository} is no folder here, and can't be had from the hub "
            f"({type(error).__name__}); name a folder"
        ) from error
    return path, path.name


def packaged_sha256() -> str | None:
    """The packaged checkpoint's hash as recorded when it was made; None where none was."""
    try:
        return (PACKAGED_CHECKPOINT / "sha256.txt").read_text(encoding="utf-8").split()[0]
    except (OSError, IndexError):
        return None
