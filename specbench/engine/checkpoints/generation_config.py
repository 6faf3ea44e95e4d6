"""How a checkpoint's makers sample from it: generation_config.json."""

from __future__ import annotations

from pathlib import Path

from specbench.engine.checkpoints.checkpoint import read_json
from specbench.errors import UserError

FILE = "generation_config.json"


def sampling_defaults(checkpoint: Path) -> dict[str, float]:
    """temperature, top_k, top_p, min_p and repetition_penalty: as the file has them, off where it doesn't.

    Sampling is on where the file says `do_sample`, or gives a temperature and does not say; without it, decoding is
    greedy and the filters mean nothing. UserError for a value that is no number.
    """
    file = checkpoint / FILE
    values = read_json(file) if file.exists() else {}
    found: dict[str, float] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    is_sampled = values.get("do_sample", values.get("temperature") is not None)
    for key in found:
        value = values.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"{file}: key {key}: expected a number, found {value!r}; correct it")
        found[key] = int(value) if key == "top_k" else float(value)
    if not is_sampled or found["temperature"] == 0:
        return {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | {
            "repetition_penalty": found["repetition_penalty"]
        }
    return found
