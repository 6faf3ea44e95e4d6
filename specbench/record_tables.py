"""Record types as parquet columns: exactly the fields of records.py, in their order, with the types of docs/records.md.

Belongs here: the column types, records to a table, a table to records or columns. Does not belong here: paths, other
files, metrics. pyarrow is imported inside the functions, so that the command line starts without it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from specbench.errors import UserError
from specbench.record_columns import ENGINE_STEP_NUMBERS, VERIFY_STEP_NUMBERS, EngineStepColumns, VerifyStepColumns
from specbench.records import EngineStep, RequestRecord, SampleRecord, VerifyStep

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

Record = TypeVar("Record", RequestRecord, SampleRecord)

#: Record type -> column -> type; a "?" marks a column that may hold nulls.
COLUMN_TYPES: dict[type, dict[str, str]] = {
    RequestRecord: {
        "request_id": "str",
        "sample_id": "str",
        "turn": "int16",
        "repeat": "int16",
        "is_warmup": "bool",
        "category": "str?",
        "num_prompt_tokens": "int32",
        "num_cached_prompt_tokens": "int32?",
        "num_output_tokens": "int32",
        "finish_reason": "str",
        "arrival_s": "float64",
        "first_scheduled_s": "float64?",
        "first_token_s": "float64?",
        "last_token_s": "float64?",
        "num_preemptions": "int16",
        "error": "str?",
        "scheduled_s": "float64?",
        "client_queue_s": "float64?",
    },
    VerifyStep: {
        "request_id": "str",
        "step": "int32",
        "engine_step": "int64",
        "output_index": "int32",
        "num_drafted": "int16",
        "num_accepted": "int16",
        "num_emitted": "int16",
        "num_discarded": "int16",
        "is_trimmed": "bool",
        "batch_size": "int16",
        "end_s": "float64",
    },
    EngineStep: {
        "engine_step": "int64",
        "start_s": "float64",
        "end_s": "float64",
        "num_prefill_tokens": "int32",
        "num_decode_requests": "int32",
        "num_tokens": "int32",
        "schedule_s": "float64",
        "target_s": "float64?",
        "verify_s": "float64?",
        "draft_s": "float64?",
        "kv_blocks_used": "int32",
        "num_preempted": "int32",
        "num_evicted_blocks": "int32",
        "idle_s": "float64?",
    },
    SampleRecord: {
        "sample_id": "str",
        "turn": "int16",
        "repeat": "int16",
        "prompt": "str?",
        "prompt_token_ids": "list[int32]?",
        "output_text": "str",
        "reasoning_text": "str",
        "output_token_ids": "list[int32]",
        "reference": "str?",
        "extracted": "map[str, str?]",
        "score": "map[str, float64?]",
        "is_truncated": "bool",
        "category": "str?",
        "choices": "list[str]",
        "groups": "map[str, str]",
        "loglikelihood": "float64?",
        "is_greedy": "bool?",
    },
}

#: Rows of a parquet row group, and of what is written at once.
ROWS_A_GROUP = 1 << 20
#: Rows that are read at once where each becomes a record.
ROWS_A_BATCH = 1024

_MAP_COLUMNS = ("extracted", "score", "groups")
_TOKEN_COLUMNS = ("prompt_token_ids", "output_token_ids")


def arrow_schema(record_type: type) -> pyarrow.Schema:
    """The parquet schema of one record type."""
    import pyarrow as pa

    arrow_types = {
        "str": pa.string(),
        "bool": pa.bool_(),
        "int16": pa.int16(),
        "int32": pa.int32(),
        "int64": pa.int64(),
        "float64": pa.float64(),
        "list[int32]": pa.list_(pa.int32()),
        "list[str]": pa.list_(pa.string()),
        "map[str, str]": pa.map_(pa.string(), pa.string()),
        "map[str, str?]": pa.map_(pa.string(), pa.string()),
        "map[str, float64?]": pa.map_(pa.string(), pa.float64()),
    }
    return pa.schema(
        [
            pa.field(name, arrow_types[kind.removesuffix("?")], nullable=kind.endswith("?"))
            for name, kind in COLUMN_TYPES[record_type].items()
        ]
    )


def write_table(path: Path, record_type: type, records: Sequence) -> None:
    """Write `records`, a list or columns, as one parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(record_type)
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, max(len(records), 1), ROWS_A_GROUP):
            columns = _arrow_columns(schema, record_type, records, slice(start, start + ROWS_A_GROUP))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def read_requests(path: Path) -> list[RequestRecord]:
    """requests.parquet; other columns or types are a user error, here as in the other readers."""
    return _read_rows(path, RequestRecord)


def read_samples(path: Path) -> list[SampleRecord]:
    """samples.parquet, token ids as array("i")."""
    return _read_rows(path, SampleRecord)


def read_verify_steps(path: Path) -> VerifyStepColumns:
    """verify_steps.parquet."""
    with _parquet(path, VerifyStep, dictionary=["request_id"]) as file:
        request_ids, request = _read_codes(file, "request_id")
        return VerifyStepColumns(
            request_ids, request, **{name: _read_numbers(file, name) for name in VERIFY_STEP_NUMBERS}
        )


def read_engine_steps(path: Path) -> EngineStepColumns:
    """engine_steps.parquet."""
    with _parquet(path, EngineStep) as file:
        return EngineStepColumns(**{name: _read_numbers(file, name) for name in ENGINE_STEP_NUMBERS})


@contextmanager
def _parquet(path: Path, record_type: type, dictionary: Sequence[str] = ()) -> Iterator[pyarrow.parquet.ParquetFile]:
    """The open file, once its columns are known to be those of `record_type`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, read_dictionary=list(dictionary)) as file:
            if pq.read_schema(path).remove_metadata() != arrow_schema(record_type):
                raise UserError(
                    f"{path}: its columns are not those of docs/records.md; was it written by another program?"
                )
            yield file
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path}: cannot be read as parquet ({error}); remove it to read the journal instead"
        ) from error


def _read_rows(path: Path, record_type: type[Record]) -> list[Record]:
    """In batches: the texts and token ids of a large run should not be held twice."""
    records: list[Record] = []
    with _parquet(path, record_type) as file:
        for batch in file.iter_batches(batch_size=ROWS_A_BATCH):
            columns = [_from_arrow(field.name, batch.column(field.name)) for field in fields(record_type)]
            records.extend(record_type(*row) for row in zip(*columns, strict=True))
    return records


def _read_numbers(file: pyarrow.parquet.ParquetFile, name: str) -> np.ndarray:
    """[num_rows] One column; a null is NaN. A column at a time, so that no second copy of the table is ever held."""
    values = file.read(columns=[name]).column(name).to_numpy()
    return values if values.dtype in (np.bool_, np.float64) else values.astype(np.int64)


def _read_codes(file: pyarrow.parquet.ParquetFile, name: str) -> tuple[list[str], np.ndarray]:
    """(distinct texts, [num_rows] index of each row's text among them) of a column of texts."""
    import pyarrow as pa

    column = file.read(columns=[name]).column(name).unify_dictionaries()
    if column.num_chunks == 0:
        return [], np.zeros(0, np.int64)
    texts = column.chunk(0).dictionary.to_pylist()
    return texts, pa.chunked_array([chunk.indices for chunk in column.chunks]).to_numpy().astype(np.int64)


def _arrow_columns(schema: pyarrow.Schema, record_type: type, records: Sequence, rows: slice) -> list[pyarrow.Array]:
    """The given rows of `records`, a column for each field of `schema`."""
    if record_type in (VerifyStep, EngineStep):
        columns = VerifyStepColumns.of(records) if record_type is VerifyStep else EngineStepColumns.of(records)
        return [_number_column(columns, field, rows) for field in schema]
    chosen = records[rows]
    return [_to_arrow(field, [getattr(record, field.name) for record in chosen]) for field in schema]


def _number_column(columns: VerifyStepColumns | EngineStepColumns, field: pyarrow.Field, rows: slice) -> pyarrow.Array:
    import pyarrow as pa

    if isinstance(columns, VerifyStepColumns) and field.name == "request_id":
        codes = pa.array(columns.request[rows].astype(np.int32))
        return pa.DictionaryArray.from_arrays(codes, pa.array(columns.request_ids, pa.string())).cast(field.type)
    values = getattr(columns, field.name)[rows]
    return pa.array(values, from_pandas=field.nullable).cast(field.type)


def _to_arrow(field: pyarrow.Field, values: list) -> pyarrow.Array:
    import pyarrow as pa

    if field.name in _MAP_COLUMNS:
        return pa.array([list(value.items()) for value in values], type=field.type)
    if field.name not in _TOKEN_COLUMNS:
        return pa.array(values, type=field.type)
    lengths = [0 if value is None else len(value) for value in values]
    ids = np.concatenate(
        [np.zeros(0, np.int32), *(np.asarray(value, np.int32) for value in values if value is not None)]
    )
    is_null = pa.array([value is None for value in values], pa.bool_())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32))
    return pa.ListArray.from_arrays(offsets, pa.array(ids), type=field.type, mask=is_null)


def _from_arrow(name: str, column: pyarrow.Array) -> list:
    if name in _MAP_COLUMNS:
        return [dict(value) for value in column.to_pylist()]
    if name in _TOKEN_COLUMNS:
        return [array("i", ids.values.to_numpy().tobytes()) if ids.is_valid else None for ids in column]
    return column.to_pylist()
