"""Results of other tools into run directories.

Belongs here: telling which tool a file is from, and writing the run directory. Does not belong here: any tool's keys.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from specbench.errors import UserError
from specbench.reports.exchange.imported_run import ImportedRun, imported_record
from specbench.reports.exchange.result_fields import Fields
from specbench.reports.exchange.sglang_bench import import_sglang, is_sglang_result
from specbench.reports.exchange.specdec_bench import ACCEPTANCE_FILE, CONFIGURATION_FILE, TIMING_FILE, import_specdec
from specbench.reports.exchange.vllm_bench import import_vllm, is_vllm_result
from specbench.reports.report_files import recompute
from specbench.run_directory import RUN_FILE, EventLog, RunDirectory

KNOWN = "a result of `vllm bench serve`, a line of SGLang's bench_serving, or a folder of specdec_bench"


@dataclass(frozen=True, slots=True)
class Stated:
    """What the user says of a result that does not say it itself, or not in the words of other runs; None: nothing."""

    model: str | None = None
    label: str | None = None
    data: str | None = None
    tensor_parallel_size: int | None = None


def import_result(source: Path, output: Path, result: int | None, stated: Stated, command: str) -> RunDirectory:
    """Make the run directory `output` of the `result`-th result (from 1) in `source`, with its report."""
    imported = read_result(source, result)
    said = {name: value for name, value in asdict(stated).items() if value is not None}
    notices = [f"Stated at the import, not in the result: {', '.join(said)}"] if said else []
    setup = replace(imported.setup, **said, notices=[*imported.setup.notices, *notices])
    directory = RunDirectory.create(output)
    directory.write_tables(EventLog(requests=imported.requests, samples=imported.samples))
    directory.write_run(imported_record(replace(imported, setup=setup), command))
    recompute(directory.path)
    return directory


def read_result(source: Path, result: int | None) -> ImportedRun:
    """UserError where `source` is nothing that is known, or holds several results and `result` is None."""
    if source.is_dir():
        return _read_folder(source, result)
    fields = _chosen(_objects(source), source, result)
    if is_sglang_result(fields):
        return import_sglang(fields)
    if is_vllm_result(fields):
        return import_vllm(fields)
    raise UserError(f"{source}: not {KNOWN}")


def _read_folder(folder: Path, result: int | None) -> ImportedRun:
    if (folder / RUN_FILE).exists():
        raise UserError(f"{folder}: a run directory of specbench already; say specbench report {folder}")
    acceptance, timing = folder / ACCEPTANCE_FILE, folder / TIMING_FILE
    if not acceptance.exists() and not timing.exists():
        raise UserError(f"{folder}: has neither {ACCEPTANCE_FILE} nor {TIMING_FILE}; wanted: {KNOWN}")
    configuration = folder / CONFIGURATION_FILE
    return import_specdec(_read(acceptance, result), _read(timing, result), _read(configuration, None))


def _read(path: Path, result: int | None) -> Fields:
    """The chosen result of a file of a folder; nothing where there is no such file."""
    return _chosen(_objects(path), path, result) if path.exists() else Fields(str(path), {})


def _objects(path: Path) -> list[dict]:
    """The JSON objects of a file: one, a list of them, or one a line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from error
    try:
        content = json.loads(text)
    except ValueError:
        content = _lines(path, text)
    objects = content if isinstance(content, list) else [content]
    if not objects or not all(isinstance(one, dict) for one in objects):
        raise UserError(f"{path}: holds no JSON object; wanted: {KNOWN}")
    return objects


def _lines(path: Path, text: str) -> list:
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise UserError(f"{path}:{number}: not JSON ({error}); wanted: {KNOWN}") from error
    return found


def _chosen(objects: list[dict], path: Path, result: int | None) -> Fields:
    """The `result`-th, from 1; the only one where that is None."""
    if result is None and len(objects) > 1:
        raise UserError(f"{path}: holds {len(objects)} results; choose one with --result 1 to {len(objects)}")
    index = 1 if result is None else result
    if not 1 <= index <= len(objects):
        raise UserError(f"--result {index}: {path} holds {len(objects)}")
    return Fields(str(path), objects[index - 1])
