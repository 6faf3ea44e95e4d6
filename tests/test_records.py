"""Records, their parquet columns and docs/records.md are one schema."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from specbench.record_tables import COLUMN_TYPES, arrow_schema
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
    VerifyStep,
)

DOCS = (Path(__file__).parent.parent / "docs" / "records.md").read_text(encoding="utf-8")
TABLES = {
    "requests.parquet": RequestRecord,
    "verify_steps.parquet": VerifyStep,
    "engine_steps.parquet": EngineStep,
    "samples.parquet": SampleRecord,
}
#: Annotation -> the column types that may hold it.
HOLDS = {
    int: {"int16", "int32", "int64"},
    int | None: {"int32?"},
    float: {"float64"},
    str: {"str"},
    bool: {"bool"},
    bool | None: {"bool?"},
    str | None: {"str?"},
    float | None: {"float64?"},
    Sequence[int]: {"list[int32]"},
    Sequence[int] | None: {"list[int32]?"},
    dict[str, str | None]: {"map[str, str?]"},
    list[str]: {"list[str]"},
    dict[str, str]: {"map[str, str]"},
    dict[str, float | None]: {"map[str, float64?]"},
}


def documented(heading: str) -> list[list[str]]:
    """Rows of the first table below a heading of docs/records.md."""
    section = DOCS.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")
    ]
    return rows[2:]


@pytest.mark.parametrize(("file", "record_type"), TABLES.items())
def test_documented_columns_are_the_records_columns(file, record_type):
    names = [field.name for field in fields(record_type)]
    assert {row[0]: row[1] for row in documented(file)} == COLUMN_TYPES[record_type]
    assert (
        [row[0] for row in documented(file)]
        == names
        == list(COLUMN_TYPES[record_type])
        == arrow_schema(record_type).names
    )


@pytest.mark.parametrize("record_type", TABLES.values())
def test_column_types_hold_what_the_records_annotate(record_type):
    hints = get_type_hints(record_type)
    for name, kind in COLUMN_TYPES[record_type].items():
        assert kind in HOLDS[hints[name]], name


def test_documented_keys_of_run_json_are_the_run_records():
    rows = {row[0]: row[1] for row in documented("run.json")}
    assert list(rows) == [field.name for field in fields(RunRecord)]
    nested = {
        "model": ModelIdentity,
        "data": DataIdentity,
        "output_check": OutputCheck,
        "losslessness": LosslessnessCheck,
    }
    for name, record_type in nested.items():
        assert rows[name] == ", ".join(field.name for field in fields(record_type))


def test_documented_keys_of_a_losslessness_cell():
    listed = DOCS.split("cells is one test: ")[1].split(". ")[0]
    assert " ".join(listed.split()).split(", ") == [field.name for field in fields(LosslessnessCell)]


def test_documented_keys_of_metrics_json_are_those_computed():
    from specbench.reports.acceptance import acceptance_metrics
    from specbench.reports.conditions import condition_tables
    from specbench.reports.latency import latency_metrics, throughput_metrics
    from specbench.reports.step_columns import step_columns

    columns = step_columns([], [])
    rows = {row[0]: row[1] for row in documented("metrics.json")}
    assert re.findall(r"\w+_ms", rows["latency"]) == list(latency_metrics(columns))
    assert rows["throughput"] == ", ".join(throughput_metrics(columns, 1))
    acceptance = DOCS.split("Acceptance:\n")[1].split("Health:")[0]
    computed = acceptance_metrics(columns, 1) | condition_tables(columns, 1)
    assert re.findall(r"^\| (\w+) \| ", acceptance, re.MULTILINE)[1:] == list(computed)
    assert set(acceptance_metrics(columns, None) | condition_tables(columns, None)) == set(computed)


def test_documented_health_checks_are_those_that_run():
    from specbench.reports.diagnosis import CHECKS

    table = DOCS.split("| check | raised by |")[1].split("\n\n")[0]
    assert re.findall(r"^\| (\w+) \| ", table, re.MULTILINE) == [check.name for check in CHECKS]


def test_documented_keys_of_the_cost_model_are_those_computed():
    from specbench.reports.cost_model import cost_metrics
    from specbench.reports.step_columns import step_columns

    table = DOCS.split("Cost model,")[1].split("Latency:")[0]
    documented_keys = re.findall(r"^\| (\w+) \| ", table, re.MULTILINE)[1:]
    assert documented_keys == list(cost_metrics(step_columns([], []), [], 1))


def test_documented_schema_version():
    assert f"The schema version is {SCHEMA_VERSION};" in DOCS
