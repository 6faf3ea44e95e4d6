"""Reading config.json: fields that are missing, of a wrong kind or not implemented are told by file and key. No torch.

Belongs here: what every family asks of a JSON object. Does not belong here: any field of a family.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from specbench.engine.checkpoints.checkpoint import CONFIG_FILE, Checkpoint, read_json
from specbench.errors import UserError

#: What no number of a model comes near, and no arithmetic with it overflows at.
_LARGEST = 1e12
#: The same of layers and of experts: names of their tensors are laid out before any is looked for.
_MAX_LAYERS, _MAX_EXPERTS = 10_000, 10_000


class ConfigSection:
    """One JSON object of config.json. A field that is null counts as absent."""

    def __init__(self, file: Path, name: str, values: dict[str, Any]) -> None:
        self._file = file
        self._name = name
        self._values = values

    def number(self, *spellings: str, default: float | None = None) -> Any:
        """The first spelling that is present and not null: a positive number; `default` where there is one."""
        value = self.optional(*spellings)
        if value is None and default is not None:
            return default
        if value is None:
            self.fail(spellings[0], f"missing (spellings known: {', '.join(spellings)}); add it")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _LARGEST:
            self.fail(spellings[0], f"expected a positive number, found {value!r}; correct it")
        return value

    def count(self, *spellings: str, default: int | None = None, most: int | None = None) -> int:
        """A positive whole number; `default` where it is absent and the architecture has one."""
        value = self.number(*spellings, default=default)
        if not isinstance(value, int):
            self.fail(spellings[0], f"expected a whole number, found {value!r}; correct it")
        if most is not None and value > most:
            self.fail(spellings[0], f"expected at most {most:,}, found {value}; correct it")
        return value

    def experts(self, *spellings: str) -> int:
        """How many a layer has."""
        return self.count(*spellings, most=_MAX_EXPERTS)

    def num_layers(self, key: str = "num_hidden_layers", default: int | None = None) -> int:
        """Layers, or modules; `default` where it is absent, which may be none."""
        if default is not None and not self.whole(key, default):
            return 0
        return self.count(key, default=default, most=_MAX_LAYERS)

    def whole(self, key: str, default: int) -> int:
        """A whole number, 0 included; `default` where it is absent."""
        value = self.optional(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            self.fail(key, f"expected a whole number, found {value!r}; correct it")
        return value

    def indices(self, key: str) -> list[int] | None:
        """A list of whole numbers, such as those of layers; None where it is absent."""
        values = self.optional(key)
        if values is not None and not (isinstance(values, list) and all(type(value) is int for value in values)):
            self.fail(key, f"expected a list of whole numbers, found {values!r}; correct it")
        return values

    def kinds(self, key: str, known: Sequence[str], num_layers: int) -> list[str] | None:
        """One of the known names for each layer; None where it is absent."""
        values = self.optional(key)
        if values is not None and not (
            isinstance(values, list) and len(values) == num_layers and all(value in known for value in values)
        ):
            self.fail(key, f"expected {num_layers} of {tuple(known)}, found {values}; correct it")
        return values

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.optional(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, f"expected true or false, found {value!r}; correct it")
        return value

    def optional(self, *spellings: str) -> Any:
        """The first spelling that is present and not null, else None."""
        for spelling in spellings:
            if self._values.get(spelling) is not None:
                return self._values[spelling]
        return None

    def check_fixed(self, key: str, value: Any) -> None:
        """Raise where the field is present with another value than the only one that is implemented."""
        if key in self._values and self._values[key] != value:
            self.fail(key, f"{self._values[key]!r} is not implemented, only {value!r}; use another checkpoint")

    def subsection(self, key: str) -> ConfigSection | None:
        """The JSON object in a field; None where it is absent."""
        values = self.optional(key)
        if values is None:
            return None
        if not isinstance(values, dict):
            self.fail(key, f"expected an object, found {values!r}; correct it")
        return ConfigSection(self._file, f"{self._name}{key}.", values)

    def fail(self, key: str, problem: str) -> NoReturn:
        raise UserError(f"{self._file}: key {self._name}{key}: {problem}")


def top_section(checkpoint: Checkpoint) -> ConfigSection:
    """All of config.json."""
    return ConfigSection(checkpoint.path / CONFIG_FILE, "", checkpoint.config)


def eos_token_ids(checkpoint: Checkpoint, files: Sequence[str]) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id` of the first of these JSON files that has it."""
    for name in files:
        file = checkpoint.path / name
        values = checkpoint.config if name == CONFIG_FILE else read_json(file) if file.exists() else {}
        eos = values.get("eos_token_id")
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
            raise UserError(f"{file}: key eos_token_id: expected an id or a list of ids, found {eos!r}; correct it")
        return tuple(ids)
    return ()
