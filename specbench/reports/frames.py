"""A run directory as pandas frames, for questions that no report answers: what `specbench.load(DIR)` returns.

Belongs here: records and columns as frames. Does not belong here: any figure (metrics.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specbench.record_columns import ENGINE_STEP_NUMBERS, VERIFY_STEP_NUMBERS, EngineStepColumns, VerifyStepColumns
from specbench.records import RequestRecord, RunRecord, SampleRecord
from specbench.reports.metrics import compute_metrics
from specbench.run_directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, eq=False)
class LoadedRun:
    """One run. The frames have the columns of docs/records.md, warm-up included; what was not measured is null."""

    run: RunRecord
    #: As in metrics.json, computed anew.
    metrics: dict
    requests: pd.DataFrame
    #: `request_id` is categorical.
    verify_steps: pd.DataFrame
    engine_steps: pd.DataFrame
    samples: pd.DataFrame


def load(path: Path) -> LoadedRun:
    """The run in the directory `path`, finished or not; UserError where there is none."""
    import pandas as pd

    directory = RunDirectory.open(path)
    run, log = directory.read_run(), directory.read_event_log()
    engine_steps = EngineStepColumns.of(log.engine_steps)
    return LoadedRun(
        run=run,
        metrics=compute_metrics(run, log),
        requests=_rows(log.requests, RequestRecord),
        verify_steps=_verify_steps(VerifyStepColumns.of(log.verify_steps)),
        engine_steps=pd.DataFrame({name: getattr(engine_steps, name) for name in ENGINE_STEP_NUMBERS}, copy=False),
        samples=_rows(log.samples, SampleRecord),
    )


def _rows(records: Sequence[RequestRecord] | Sequence[SampleRecord], record_type: type) -> pd.DataFrame:
    import pandas as pd

    names = [field.name for field in fields(record_type)]
    return pd.DataFrame({name: [getattr(record, name) for record in records] for name in names})


def _verify_steps(columns: VerifyStepColumns) -> pd.DataFrame:
    import pandas as pd

    codes = columns.request.astype(np.int64, copy=False)
    request_id = pd.Categorical.from_codes(codes, categories=pd.Index(columns.request_ids))
    numbers = {name: getattr(columns, name) for name in VERIFY_STEP_NUMBERS}
    return pd.DataFrame({"request_id": request_id, **numbers}, copy=False)
