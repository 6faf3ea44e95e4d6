"""What decides a run's records, as one hash: by it a sweep skips what has run, and resume knows its run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specbench import environment
from specbench.plan.run_plan import Plan
from specbench.recorded_drafts import AUTO, drafts_sha256
from specbench.records import INTERLEAVED, ModelIdentity
from specbench.trace import read_trace


def fingerprint(plan: Plan, model: ModelIdentity) -> dict[str, Any]:
    """What decides a run's records: two runs with equal `sha256` need not both be run."""
    settings = plan.config.to_dict()
    for key in ("output_root", "dry_run", "strict"):
        del settings[key]
    for key in ("gates", "baseline", "objective"):
        if settings["report"][key] != INTERLEAVED:  # which makes it another run
            del settings["report"][key]
    parts = {
        "config": _sha256(settings),
        "code": _sha256([environment.commit().commit, environment.source_sha256()]),
        "checkpoint": model.sha256,
        "drafter": _drafter_sha256(plan),
        "data": _data_sha256(plan),
        "hardware": _sha256(environment.hardware()),
    }
    return {"sha256": _sha256(parts), **parts}


def _data_sha256(plan: Plan) -> str | None:
    """Of the samples, and of the trace where one is replayed."""
    trace = plan.config.load.trace
    return plan.task.data.sha256 if trace is None else _sha256([plan.task.data.sha256, read_trace(trace)])


def _drafter_sha256(plan: Plan) -> str | None:
    """Of what drafts come from besides the checkpoint that runs; None where there is nothing else."""
    draft, drafts = plan.draft_identity(), plan.config.spec.drafts
    if draft is not None:
        return draft.sha256
    return None if drafts is None or drafts == AUTO else drafts_sha256(Path(drafts))


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
