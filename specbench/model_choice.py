"""Which checkpoint runs for the `model` group: a folder, a repository on the hub, or the packaged one.

Belongs here: from names to a folder and an identity. Does not belong here: what is in the folder (engine/checkpoints/).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from specbench.errors import UserError, near_name
from specbench.run_config import SHAPES, WITH_PACKAGED, ModelConfig

PACKAGED_NAME = "inkling-nano"
#: Without weights, and with them.
SMALL_HUB_FILES = ("*.json", "*.jinja", "*.model", "*.txt")
HUB_FILES = ("*.safetensors", *SMALL_HUB_FILES)

_ASSETS = Path(__file__).resolve().parent / "assets"
PACKAGED_CHECKPOINT = _ASSETS / "inkling_nano"
SHAPES_FOLDER = _ASSETS / "shapes"


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
    if config.load == "random":
        return _find_shape(config.checkpoint, config.revision, config.name, "model.checkpoint")
    return _find(config.checkpoint, config.revision, config.name, "model.checkpoint")


def choose_draft(checkpoint: str, load: str) -> ModelChoice:
    """The checkpoint of a draft model; UserError when it can't be found."""
    if load == "random":
        return _find_shape(checkpoint, None, checkpoint, "spec.checkpoint")
    if Path(checkpoint) == PACKAGED_CHECKPOINT:
        return ModelChoice(PACKAGED_NAME, PACKAGED_NAME, PACKAGED_CHECKPOINT, None, packaged=True)
    return _find(checkpoint, None, checkpoint, "spec.checkpoint")


def _find_shape(checkpoint: str, revision: str | None, requested: str, key: str) -> ModelChoice:
    """config.json for random weights: a shape of our own, a folder, or a repository whose weights are left there."""
    if checkpoint in SHAPES and not Path(checkpoint).is_dir():
        _check_no_revision(revision, f"{checkpoint} is a shape of specbench")
        folder = SHAPES_FOLDER / checkpoint
        return ModelChoice(requested, _random_name(checkpoint), folder, None, packaged=False)
    if not Path(checkpoint).expanduser().is_dir() and "/" not in checkpoint:
        raise UserError(f"{key}: {checkpoint} is no folder, and no shape of specbench; {near_name(checkpoint, SHAPES)}")
    found = _find(checkpoint, revision, requested, key, SMALL_HUB_FILES)
    return replace(found, ran=_random_name(found.ran))


def _random_name(name: str) -> str:
    return f"{name}-random-weights"


def _find(
    checkpoint: str, revision: str | None, requested: str, key: str, hub_files: tuple[str, ...] = HUB_FILES
) -> ModelChoice:
    """A folder or a repository that the setting `key` names."""
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        _check_no_revision(revision, f"{checkpoint} is a folder")
        return ModelChoice(requested, folder.resolve().name, folder.resolve(), None, packaged=False)
    if checkpoint in SHAPES:
        raise UserError(f"{key}: {checkpoint} is a shape of specbench, without weights; say model.load=random")
    if folder.exists() or not _looks_like_repository(checkpoint):
        raise UserError(f"{key}: {checkpoint} is not a folder with a checkpoint; name one")
    path, revision = _download(checkpoint, revision, key, hub_files)
    return ModelChoice(requested, checkpoint.replace("/", "--"), path, revision, packaged=False)


def _packaged(config: ModelConfig) -> ModelChoice:
    assert config.name in WITH_PACKAGED, "run_config refuses other models without a checkpoint"
    if not (PACKAGED_CHECKPOINT / "config.json").is_file():
        raise UserError(
            f"model.checkpoint: unset, and the packaged checkpoint is missing from {PACKAGED_CHECKPOINT}; install "
            "specbench again or say model.checkpoint=DIR"
        )
    _check_no_revision(config.revision, f"{PACKAGED_NAME} comes with specbench")
    return ModelChoice(config.name, PACKAGED_NAME, PACKAGED_CHECKPOINT, None, packaged=True)


def _check_no_revision(revision: str | None, why: str) -> None:
    """What is not from the hub is what it is: run.json would name a revision that nobody looked at."""
    if revision is not None:
        raise UserError(
            f"model.revision: {why}, and only a repository on the hub has revisions; leave it out, or name a repository"
        )


def _looks_like_repository(name: str) -> bool:
    """owner/name, and no way to read it as a path."""
    owner, slash, repository = name.partition("/")
    return bool(owner and slash and repository) and "/" not in repository and owner not in (".", "..", "~")


def _download(repository: str, revision: str | None, key: str, files: tuple[str, ...]) -> tuple[Path, str]:
    """A snapshot of the repository in the hub's cache, and the commit it is."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repository, revision=revision, allow_patterns=list(files), etag_timeout=5))
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
