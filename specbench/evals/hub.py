"""Rows of a data set on the hub.

Belongs here: fetching them, and one line where that fails. Does not belong here: what the rows mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specbench.errors import UserError
from specbench.evals.rows import Row


@dataclass(frozen=True, slots=True)
class HubRows:
    """Rows in their order, and the hash of their content."""

    rows: tuple[Row, ...]
    sha256: str


def download_rows(dataset: str, config: str | None, split: str, advice: str) -> HubRows:
    """All rows of a split; where they can't be had, `advice` says what to do."""
    import datasets  # slow to import, and not needed with a file

    try:
        with without_warnings():
            table = datasets.load_dataset(dataset, config, split=split)
    except Exception as error:  # the library raises a type of its own for each way to fail
        raise UserError(f"eval.data: can't get {dataset} from the hub ({type(error).__name__}): {advice}") from error
    rows = tuple(Row(f"{dataset} {split} row {index}", dict(value)) for index, value in enumerate(table))
    content = "".join(json.dumps(row.value, sort_keys=True) + "\n" for row in rows)
    return HubRows(rows, hashlib.sha256(content.encode()).hexdigest())


@contextmanager
def without_warnings() -> Iterator[None]:
    """Of the hub's library, which says of each of its retries what one line says of all."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
