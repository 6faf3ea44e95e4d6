"""Record types as parquet columns: exactly the fields of records.py, in their order, with the types of docs/records.md.

Belongs here: the column types, records to a table, a table to records. Does not belong here: paths, other files,
metrics. pyarrow is imported inside the functions, so that the command line starts without it.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from specbench.errors import UserError
from specbench.records import EngineStep, RequestRecord, SampleRecord, VerifyStep

if TYPE_CHECKING:
    import pyarrow

Record = TypeVar("Record", RequestRecord, VerifyStep, EngineStep, SampleRecord)

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
        "num_cached_prompt_tokens": "int32",
        "num_output_tokens": "int32",
        "finish_reason": "str",
        "arrival_s": "float64",
        "first_scheduled_s": "float64?",
        "first_token_s": "float64?",
        "last_token_s": "float64?",
        "num_preemptions": "int16",
        "error": "str?",
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
    },
}

_MAP_COLUMNS = ("extracted", "score")


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
        "map[str, str?]": pa.map_(pa.string(), pa.string()),
        "map[str, float64?]": pa.map_(pa.string(), pa.float64()),
    }
    return pa.schema(
        [
            pa.field(name, arrow_types[kind.removesuffix("?")], nullable=kind.endswith("?"))
            for name, kind in COLUMN_TYPES[record_type].items()
        ]
    )


def write_table(path: Path, record_type: type[Record], records: list[Record]) -> None:
    """Write `records` as one parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = arrow_schema(record_type)
    columns = [
        pa.array([_to_arrow(name, getattr(record, name)) for record in records], type=schema.field(name).type)
        for name in schema.names
    ]
    pq.write_table(pa.Table.from_arrays(columns, schema=schema), path)


def read_table(path: Path, record_type: type[Record]) -> list[Record]:
    """Read back what `write_table` wrote; other columns or types are a user error."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path}: cannot be read as parquet ({error}); remove it to read the journal instead"
        ) from error
    if table.schema.remove_metadata() != arrow_schema(record_type):
        raise UserError(f"{path}: its columns are not those of docs/records.md; was it written by another program?")
    columns = [_from_arrow(field.name, table.column(field.name).to_pylist()) for field in fields(record_type)]
    return [record_type(*row) for row in zip(*columns, strict=True)]


def _to_arrow(name: str, value: object) -> object:
    return list(value.items()) if name in _MAP_COLUMNS and isinstance(value, dict) else value


def _from_arrow(name: str, values: list) -> list:
    return [dict(value) for value in values] if name in _MAP_COLUMNS else values
