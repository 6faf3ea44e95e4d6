"""The files of one run directory: run.json, the journal, the parquet tables, metrics.json and report.md.

Belongs here: names, atomic writing, appending, tolerant reading. Does not belong here: what a value means (records.py),
its column type (record_tables.py), any metric (reports/).

    journal.jsonl    append-only, flushed a line: {"kind": "request", ...} for each finished request with its verify
                     steps and sample, {"kind": "engine_steps", ...} for the engine's steps before it
    *.parquet        the same records as tables, made from the journal when the run ends

A killed run has only the journal; its last line may be torn and is then left out.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TextIO

import numpy as np

from specbench.errors import UserError
from specbench.record_columns import (
    ENGINE_STEP_NUMBERS,
    VERIFY_STEP_NUMBERS,
    ColumnBatches,
    EngineStepColumns,
    VerifyStepColumns,
    step_lists,
)
from specbench.record_reading import read_record
from specbench.record_tables import read_engine_steps, read_requests, read_samples, read_verify_steps, write_table
from specbench.records import (
    SCHEMA_VERSION,
    DataIdentity,
    EngineStep,
    LosslessnessCell,
    LosslessnessCheck,
    ModelIdentity,
    OutputCheck,
    RequestRecord,
    RunRecord,
    SampleRecord,
    TaskResult,
    VerifyStep,
)
from specbench.redaction import redact

RUN_FILE = "run.json"
#: Of run.json's configuration: what every reader looks into.
_GROUPS = ("model", "spec", "parallel", "engine", "cache", "eval", "sampling", "load", "report")
JOURNAL_FILE = "journal.jsonl"
METRICS_FILE = "metrics.json"
REPORT_FILE = "report.md"
#: Read at once when looking for the end of a journal's last whole line.
JOURNAL_TAIL_BYTES = 1 << 20
#: Steps of the engine that a kill can lose, at most, besides those behind the last finished request.
ENGINE_STEPS_A_LINE = 256
TABLE_FILES = ("requests.parquet", "verify_steps.parquet", "engine_steps.parquet", "samples.parquet")


@dataclass(slots=True)
class EventLog:
    """All that a run recorded, in order of finishing. Warm-up requests are here, their samples are not.

    Steps are columns when they come from files; lists of records will do. Compute on `VerifyStepColumns.of(...)`.
    """

    requests: list[RequestRecord] = field(default_factory=list)
    verify_steps: Sequence[VerifyStep] = field(default_factory=list)
    engine_steps: Sequence[EngineStep] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)


class Journal:
    """The open journal of a running run. A finished request is handed to the system before the call returns.

    Steps of the engine wait for the next request or for ENGINE_STEPS_A_LINE of them: a line a step would cost a small
    model's step a percent.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine_steps: list[EngineStep] = []
        with _writing(path):
            self._file = _open_for_append(path)

    def append_request(
        self,
        request: RequestRecord,
        verify_steps: Sequence[VerifyStep],
        sample: SampleRecord | None,
        first_engine_step: int = 0,
    ) -> None:
        """One finished request, failed ones included. `sample` is None where nothing is kept of its text;
        `first_engine_step` is the number of the engine's step 0 in the whole run."""
        self._write_engine_steps()
        self._append(
            {
                "kind": "request",
                "request": _shallow(request),
                "verify_steps": step_lists(verify_steps, first_engine_step),
                "sample": None if sample is None else _shallow(sample),
            }
        )

    def append_engine_step(self, step: EngineStep) -> None:
        """One step of the engine."""
        self._engine_steps.append(step)
        if len(self._engine_steps) >= ENGINE_STEPS_A_LINE:
            self._write_engine_steps()

    def close(self) -> None:
        self._write_engine_steps()
        self._file.close()

    def _write_engine_steps(self) -> None:
        if self._engine_steps:
            columns = {name: list(map(attrgetter(name), self._engine_steps)) for name in ENGINE_STEP_NUMBERS}
            self._engine_steps.clear()
            self._append({"kind": "engine_steps", "engine_steps": columns})

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, entry: dict) -> None:
        line = json.dumps(entry, ensure_ascii=False, separators=(",", ":"), default=list)  # an array of ids
        with _writing(self._path):
            self._file.write(line + "\n")
            self._file.flush()


def _shallow(record: RequestRecord | SampleRecord) -> dict[str, object]:
    """Its fields as they are: `asdict` would copy every token id, which takes longer than writing them."""
    return {column.name: getattr(record, column.name) for column in fields(record)}


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's directory. Make it with `create` or `open`."""

    path: Path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """A directory for a new run. One that already holds a run is refused; an empty one is taken."""
        for name in (RUN_FILE, JOURNAL_FILE):
            if (path / name).exists():
                raise UserError(f"{path}: already holds a run ({name}); name another directory")
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise UserError(f"{path}: cannot be written (Permission denied); name another place with output_root=DIR")
        return cls(path)

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of a run that was started before."""
        if not (path / RUN_FILE).is_file():
            raise UserError(f"{path}: not a run directory, it has no {RUN_FILE}")
        return cls(path)

    def write_run(self, run: RunRecord) -> None:
        """Write run.json, without secrets."""
        content = json.dumps(redact(asdict(run)), indent=2, ensure_ascii=False, allow_nan=False)
        self.write_file(RUN_FILE, content + "\n")

    def read_run(self) -> RunRecord:
        """run.json; another schema version, an unknown or a missing key is a user error."""
        return _run_from_json(self.path / RUN_FILE)

    def open_journal(self) -> Journal:
        """The journal for appending; what a killed run left torn at its end is cut off first."""
        return Journal(self.path / JOURNAL_FILE)

    def read_journal(self) -> EventLog:
        """The event log from the journal alone; no journal is an empty log."""
        path = self.path / JOURNAL_FILE
        return _JournalReader(path).read() if path.exists() else EventLog()

    def write_tables(self, log: EventLog) -> None:
        """Write the four parquet tables."""
        self._write_table("requests.parquet", RequestRecord, log.requests)
        self._write_table("verify_steps.parquet", VerifyStep, log.verify_steps)
        self._write_table("engine_steps.parquet", EngineStep, log.engine_steps)
        self._write_table("samples.parquet", SampleRecord, log.samples)

    def read_tables(self) -> EventLog:
        """The event log from the four parquet tables."""
        return EventLog(
            requests=read_requests(self.path / "requests.parquet"),
            verify_steps=read_verify_steps(self.path / "verify_steps.parquet"),
            engine_steps=read_engine_steps(self.path / "engine_steps.parquet"),
            samples=read_samples(self.path / "samples.parquet"),
        )

    def read_event_log(self) -> EventLog:
        """From the tables of a run that ended, else from the journal: a killed or resumed run may have old tables."""
        has_tables = all((self.path / name).exists() for name in TABLE_FILES)
        if has_tables and self.read_run().status != "running":
            return self.read_tables()
        return self.read_journal()

    def finalise(self) -> EventLog:
        """Turn the journal into the tables. The journal stays."""
        log = self.read_journal()
        self.write_tables(log)
        return log

    def write_file(self, name: str, content: str | bytes) -> None:
        """A file beside the records, in a folder where `name` says so."""
        path = self.path / name
        with _writing(path):
            path.parent.mkdir(exist_ok=True)
        with _replacing(path) as partial:
            partial.write_bytes(content.encode() if isinstance(content, str) else content)

    def _write_table(self, name: str, record_type: type, records: Sequence) -> None:
        with _replacing(self.path / name) as partial:
            write_table(partial, record_type, records)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """What the system refuses inside becomes one line for the user."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"{path}: cannot be written ({reason}); name another place with output_root=DIR") from error


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place at the end: a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    with _writing(path):
        yield partial
        os.replace(partial, path)


def _open_for_append(path: Path) -> TextIO:
    """Open for appending, after cutting off a last line that has no end."""
    if path.exists():
        os.truncate(path, _whole_lines_bytes(path))
    return path.open("a", encoding="utf-8")


def _whole_lines_bytes(path: Path) -> int:
    """Bytes up to the last line's end: what follows it was torn by a kill."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - JOURNAL_TAIL_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


class _JournalReader:
    """Reads every line that has its end, without keeping an object a step."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._requests: list[RequestRecord] = []
        self._samples: list[SampleRecord] = []
        self._num_steps: list[int] = []
        self._verify_steps = ColumnBatches(VERIFY_STEP_NUMBERS)
        self._engine_steps = ColumnBatches(ENGINE_STEP_NUMBERS)

    def read(self) -> EventLog:
        """The whole log; a damaged line is a user error that names it."""
        num_lines = 0
        try:
            with self._path.open("rb") as file:
                for line in file:
                    num_lines += 1
                    if line.endswith(b"\n"):
                        self._add(json.loads(line))
            return self._log()
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{self._path}:{num_lines}: not a journal line ({reason}); was the file changed?"
            ) from error

    def _add(self, entry: dict) -> None:
        kind = entry.pop("kind")
        if kind == "engine_steps":
            self._engine_steps.add_piece(entry["engine_steps"])
            return
        if kind != "request":
            raise ValueError(f"unknown kind {kind!r}")
        request = read_record(RequestRecord, entry["request"])
        sample = None if entry["sample"] is None else read_record(SampleRecord, entry["sample"])
        self._verify_steps.add_piece(entry["verify_steps"])
        self._requests.append(request)
        self._num_steps.append(len(entry["verify_steps"]["step"]))
        if sample is not None and not request.is_warmup:
            self._samples.append(_packed(sample))

    def _log(self) -> EventLog:
        request = np.repeat(np.arange(len(self._requests)), self._num_steps)
        request_ids = [request.request_id for request in self._requests]
        return EventLog(
            requests=self._requests,
            verify_steps=VerifyStepColumns(request_ids, request, **self._verify_steps.arrays()),
            engine_steps=EngineStepColumns(**self._engine_steps.arrays()),
            samples=self._samples,
        )


def _packed(sample: SampleRecord) -> SampleRecord:
    """The same sample with its token ids in 4 bytes each, as it is read from a table."""
    prompt = sample.prompt_token_ids
    return replace(
        sample,
        prompt_token_ids=None if prompt is None else array("i", prompt),
        output_token_ids=array("i", sample.output_token_ids),
    )


def _run_from_json(path: Path) -> RunRecord:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        found = content.get("schema_version") if isinstance(content, dict) else None
        raise UserError(
            f"{path}: schema_version is {found!r}, this specbench reads {SCHEMA_VERSION}; use the version that wrote it"
        )
    try:
        check, draft, lossless = content["output_check"], content.get("draft_model"), content.get("losslessness")
        values = {
            **content,
            "model": read_record(ModelIdentity, content["model"]),
            "data": read_record(DataIdentity, content["data"]),
            "output_check": None if check is None else read_record(OutputCheck, check),
            "losslessness": None if lossless is None else _losslessness(lossless),
            "task_results": [read_record(TaskResult, result) for result in content.get("task_results", [])],
            "draft_model": None if draft is None else read_record(ModelIdentity, draft),
        }
        run = read_record(RunRecord, values)
        for name in _GROUPS:
            if not isinstance(run.config.get(name, {}), dict):
                raise TypeError(f"config.{name} is {run.config[name]!r}")
        return run
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a run record ({type(error).__name__}: {error})") from error


def _losslessness(content: dict) -> LosslessnessCheck:
    cells = [read_record(LosslessnessCell, cell) for cell in content["cells"]]
    return read_record(LosslessnessCheck, {**content, "cells": cells})
