"""What every result of another tool becomes: a finished run that says where it is from and what it lacks.

Belongs here: the envelope of an imported run, and its figures from counts given in sum. Does not belong here: any
tool's format (the other files of this folder), writing (imports.py).

A value that the other tool does not give is None and prints n/a. Where it gives counts, rates are computed from them
by our formulas; figures that it gives only as such are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specbench import __version__
from specbench.records import DataIdentity, ModelIdentity, RequestRecord, RunRecord, SampleRecord
from specbench.reports.acceptance import ratio


@dataclass(frozen=True, slots=True)
class Setup:
    """What another tool's result says about how it was measured; None where it says nothing."""

    #: As the reader will see it: `vllm bench serve`.
    tool: str
    model: str | None = None
    data: str | None = None
    #: Of anything that tells these samples from others.
    data_digest: str | None = None
    num_samples: int = 0
    #: What its way of speculating is called beside other runs.
    label: str | None = None
    #: "none" where speculation is known to have been off.
    method: str | None = None
    num_speculative_tokens: int | None = None
    tensor_parallel_size: int | None = None
    concurrency: int | None = None
    temperature: float | None = None
    hardware: dict = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    started_at: str | None = None
    notices: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """One result of another tool, read."""

    setup: Setup
    #: As in records.RunRecord.
    reported_metrics: dict
    requests: list[RequestRecord] = field(default_factory=list)
    samples: list[SampleRecord] = field(default_factory=list)


def imported_record(imported: ImportedRun, command: str) -> RunRecord:
    """run.json of the imported result."""
    setup = imported.setup
    model = setup.model or "model not stated"
    revision = None if setup.data_digest is None else f"prompts {setup.data_digest[:12]}"
    return RunRecord(
        status="finished",
        config=_config(setup),
        command=command,
        version=__version__,
        commit=None,
        is_dirty=None,
        hardware=setup.hardware,
        packages=setup.packages,
        model=ModelIdentity(model, model, None, None, None, False),
        data=DataIdentity(setup.data or "data not stated", None, revision, None, False, setup.num_samples),
        acceptance_source=setup.tool,
        started_at=setup.started_at or "not stated",
        notices=[f"Imported from a result of {setup.tool}: what it does not give is n/a", *setup.notices],
        reported_metrics=imported.reported_metrics,
    )


def _config(setup: Setup) -> dict:
    """The groups and keys that reports and comparisons read."""
    k = None if setup.method == "none" else setup.num_speculative_tokens
    name = setup.label or f"{setup.method or setup.tool}{'' if k is None else f', k = {k}'}"
    return {
        "model": {"name": setup.model, "checkpoint": None},
        "spec": {"name": name, "method": setup.method, "num_speculative_tokens": setup.num_speculative_tokens},
        "parallel": {"name": None, "tensor_parallel_size": setup.tensor_parallel_size},
        "engine": {"name": setup.tool},
        "eval": {"name": setup.data or "not stated", "scorer": None},
        "sampling": {"name": None, "temperature": setup.temperature, "ignore_eos": None},
        "load": {"name": None, "concurrency": setup.concurrency, "repeats": 1},
        "report": {"name": "default", "formats": ["svg"]},
    }


def acceptance_from_counts(
    num_speculative_tokens: int | None,
    drafts: int,
    draft_tokens: int | None,
    accepted_tokens: int,
    accepted_at_position: list[int] | None,
    per_request_mean_length: float | None = None,
) -> dict:
    """The `acceptance` block as far as sums give it.

    Given the previous position is only known where every draft has k tokens: sums don't say how many drafts were long
    enough to reach a position.
    """
    positions = accepted_at_position or []
    is_full = draft_tokens is not None and num_speculative_tokens and draft_tokens == drafts * num_speculative_tokens
    reached = [drafts, *positions[:-1]] if positions and is_full else [None for _ in positions]
    mean = ratio(accepted_tokens, drafts)
    return {
        "num_speculative_tokens": num_speculative_tokens,
        "drafts": drafts,
        "draft_tokens": draft_tokens,
        "accepted_tokens": accepted_tokens,
        "acceptance_rate": None if draft_tokens is None else ratio(accepted_tokens, draft_tokens),
        "acceptance_length": None if mean is None else 1 + mean,
        "accepted_at_position": positions,
        "reached_position": reached,
        "per_position": [ratio(accepted, drafts) for accepted in positions],
        "per_position_conditional": [
            None if before is None else ratio(accepted, before)
            for accepted, before in zip(positions, reached, strict=True)
        ],
        "accepted_histogram": _steps_by_accepted(drafts, positions),
        "per_request_mean_length": per_request_mean_length,
    }


def _steps_by_accepted(drafts: int, positions: list[int]) -> list[int]:
    """Steps that accepted exactly j: those that accepted j or more, less those that accepted more."""
    pairs = zip([drafts, *positions], [*positions, 0], strict=True) if positions else ()
    return [at_least - more for at_least, more in pairs]


def distribution_of(n: int | None, mean: float | None, p50: float | None, p90: float | None, p99: float | None) -> dict:
    """One entry of the `latency` block, in milliseconds."""
    return {"n": n, "mean": mean, "p50": p50, "p90": p90, "p99": p99}
