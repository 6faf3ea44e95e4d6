"""Rows of the user's own: prompts that are run as they stand and not scored.

Belongs here: the row format and its checks. Does not belong here: scoring; there is none.

A row holds exactly one of
    "prompt"            a text, passed to the tokenizer as it is
    "messages"          [{"role": "system" | "user" | "assistant", "content": text}, ...], not ending in an assistant's
    "prompt_token_ids"  whole numbers
    "turns"             [text, ...], what the user says turn by turn: a later one follows the model's own answer
and, if wanted, "id" (else the row's number, from 0), "category", "max_output_tokens" (else eval.max_output_tokens),
"reference" (kept beside the output), "timestamp" (for load=trace load.trace=FILE of the same file) and "audio" (files
of clips, from the rows' own folder on: heard before the text of the first user message, or at the markers of a
"prompt"). Any other key is an error, so that a misspelt one is not lost.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from specbench.errors import UserError, near_name
from specbench.evals.rows import Row, read_rows
from specbench.evals.task import EvalModel, Sample, Task, fewer_samples_notice
from specbench.generate import Message
from specbench.records import DataIdentity
from specbench.run_config import EvalConfig

ROLES = ("system", "user", "assistant")
_FORMS = ("prompt", "messages", "prompt_token_ids", "turns")
_KEYS = (*_FORMS, "id", "category", "max_output_tokens", "reference", "timestamp", "audio")


def load_prompts(config: EvalConfig, model: EvalModel) -> Task:
    """The task; `model` makes no difference to rows of the user's own."""
    if config.data is None:
        raise UserError("eval=prompts has no data of its own: give eval.data=FILE.jsonl")
    if config.scorer is not None:
        raise UserError(f"eval.scorer: prompts are not scored: leave out {config.scorer}")
    file = read_rows(config.data, "eval.data")
    folder = file.path.parent
    available = tuple(_sample(row, index, config.max_output_tokens, folder) for index, row in enumerate(file.rows))
    _check_ids_differ(file.rows, available)
    chosen = tuple(zip(file.rows, available, strict=True))[: config.num_samples]
    samples = tuple(one for row, sample in chosen for one in _in_turns(row, sample))
    sha256 = _sha256(file.sha256, samples)
    data = DataIdentity("prompts", str(file.path), None, sha256, packaged=False, num_samples=len(chosen))
    notices = fewer_samples_notice(config.num_samples, len(available))
    return Task("prompts", data, samples, (), None, config.stop or (), notices)


def _sha256(of_rows: str, samples: tuple[Sample, ...]) -> str:
    """The file's hash, and that of the clips that its rows name."""
    clips = [clip for sample in samples for clip in sample.audio if isinstance(clip, Path) and clip.is_file()]
    if not clips:
        return of_rows
    digest = hashlib.sha256(of_rows.encode())
    for clip in clips:
        digest.update(hashlib.sha256(clip.read_bytes()).digest())
    return digest.hexdigest()


def _sample(row: Row, index: int, max_output_tokens: int, folder: Path) -> Sample:
    for key in row.value:
        if key not in _KEYS:
            raise UserError(f'{row.where}: unknown key "{key}": {near_name(key, _KEYS)}')
    forms = [key for key in _FORMS if key in row.value]
    if len(forms) != 1:
        found = " and ".join(forms) or "none"
        raise UserError(f"{row.where}: exactly one of {', '.join(_FORMS)} is needed, found {found}")
    return Sample(
        sample_id=_sample_id(row, index),
        max_output_tokens=_max_output_tokens(row, max_output_tokens),
        prompt=row.text("prompt") if "prompt" in row.value else None,
        messages=_messages(row) if "messages" in row.value or "turns" in row.value else None,
        prompt_token_ids=_token_ids(row) if "prompt_token_ids" in row.value else None,
        reference=row.text("reference") if "reference" in row.value else None,
        category=row.text("category") if "category" in row.value else None,
        audio=_clips(row, folder) if "audio" in row.value else (),
    )


def _sample_id(row: Row, index: int) -> str:
    if "id" not in row.value:
        return str(index)
    value = row.value["id"]
    return str(value) if _is_whole(value) else row.text("id")


def _max_output_tokens(row: Row, default: int) -> int:
    if "max_output_tokens" not in row.value:
        return default
    value = row.value["max_output_tokens"]
    if not _is_whole(value) or value < 1:
        raise UserError(f'{row.where}: "max_output_tokens" must be a whole number of 1 or more')
    return value


def _in_turns(row: Row, sample: Sample) -> list[Sample]:
    """The sample, and one more for each later turn."""
    later = _turns(row)[1:] if "turns" in row.value else []
    return [
        sample,
        *(replace(sample, turn=turn, messages=(message,), audio=()) for turn, message in enumerate(later, start=1)),
    ]


def _turns(row: Row) -> list[Message]:
    value = row.value["turns"]
    if not isinstance(value, list) or not value or not all(isinstance(one, str) and one.strip() for one in value):
        raise UserError(f'{row.where}: "turns" must be a list of at least one text that is not blank')
    return [{"role": "user", "content": row.checked(text)} for text in value]


def _messages(row: Row) -> tuple[Message, ...]:
    if "turns" in row.value:
        return tuple(_turns(row)[:1])
    value = row.value["messages"]
    if not isinstance(value, list) or not value:
        raise UserError(f'{row.where}: "messages" must be a list of at least one message')
    messages = tuple(_message(row, message) for message in value)
    if messages[-1]["role"] == "assistant":
        raise UserError(f'{row.where}: the last of "messages" is the assistant\'s: there is nothing to answer')
    return messages


def _message(row: Row, message: object) -> Message:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise UserError(f'{row.where}: each message must be {{"role": ..., "content": ...}} and nothing more')
    if message["role"] not in ROLES:
        raise UserError(f"{row.where}: unknown role {message['role']!r}: use {', '.join(ROLES)}")
    if not isinstance(message["content"], str):
        raise UserError(f"{row.where}: the content of each message must be a text")
    return {"role": message["role"], "content": row.checked(message["content"])}


def _token_ids(row: Row) -> tuple[int, ...]:
    value = row.value["prompt_token_ids"]
    if not isinstance(value, list) or not value or not all(_is_whole(item) and item >= 0 for item in value):
        raise UserError(f'{row.where}: "prompt_token_ids" must be a list of at least one whole number, none below 0')
    return tuple(value)


def _clips(row: Row, folder: Path) -> tuple[Path, ...]:
    """Whether they can be heard is seen when their request runs: one that can't fails alone."""
    value = row.value["audio"]
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name.strip() for name in value):
        raise UserError(f'{row.where}: "audio" must be a list of at least one file name')
    return tuple(folder / row.checked(name) for name in value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_ids_differ(rows: tuple[Row, ...], samples: tuple[Sample, ...]) -> None:
    first: dict[str, str] = {}
    for row, sample in zip(rows, samples, strict=True):
        if sample.sample_id in first:
            raise UserError(f"{row.where}: the id {sample.sample_id!r} is taken by {first[sample.sample_id]}")
        first[sample.sample_id] = row.where
