"""`speculation_profile.json`, schema 1.0: how good a drafter is, for what plans with it.

Belongs here: its keys, from a run's metrics. Does not belong here: formulas of ours.

It travels with a checkpoint, so it has names of checkpoints and no paths, and it says that it was measured, under what
conditions, and whether its own numbers agree.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.errors import UserError
from specbench.records import RunRecord
from specbench.reports.markdown import data_title, model_title
from specbench.reports.report_files import Report

SCHEMA_VERSION = "1.0"
#: Largest difference between the mean length and the one that the rates imply.
TOLERANCE = 0.02


def export_profile(report: Report) -> dict:
    """The profile; UserError of a run that has none to give."""
    run, acceptance = report.run, report.metrics["acceptance"]
    k = acceptance["num_speculative_tokens"]
    if not acceptance["drafts"] or not acceptance["per_position"]:
        raise UserError(f"{report.directory}: has no acceptance by position, so there is no profile of its drafter")
    marginal = acceptance["per_position"]
    return {
        "schema_version": SCHEMA_VERSION,
        "measured": True,
        "method": run.config["spec"]["method"],
        "draft_checkpoint": {"name": model_title(run.model), "sha256": run.model.sha256},
        "target_model": {"name": model_title(run.model), "sha256": run.model.sha256},
        "num_speculative_tokens": k,
        "block_size": None,
        "max_supported_k": max(k, run.model.num_modules),
        "verification_method": _verification_method(run),
        "conditional_accept_rates": _rounded(_given_previous(marginal)),
        "marginal_accept_rates": _rounded(marginal),
        "mean_accept_length": round(acceptance["acceptance_length"], 6),
        "mean_accept_length_per_request": _rounded([acceptance["per_request_mean_length"]])[0],
        # Another k starts its steps at other tokens, so one measurement says nothing certain of another k.
        "accept_length_model": "measured_per_k",
        "accept_length_by_k": {str(k): round(acceptance["acceptance_length"], 6)},
        "acceptance_length_histogram": {
            str(accepted + 1): steps for accepted, steps in enumerate(acceptance["accepted_histogram"]) if steps
        },
        "per_category": {
            name: {"mean_accept_length": round(one["acceptance_length"], 6), "drafts": one["drafts"]}
            for name, one in acceptance["by_category"].items()
            if one["drafts"]
        }
        or None,
        "measurement_conditions": _conditions(report),
        "validation": _validation(marginal, acceptance["acceptance_length"]),
    }


def _given_previous(marginal: list[float]) -> list[float]:
    """Ratios of neighbours, as the schema has it: both lists must give each other."""
    return [rate / before if before else 0.0 for rate, before in zip(marginal, [1.0, *marginal[:-1]], strict=True)]


def _verification_method(run: RunRecord) -> str:
    method = run.config["spec"].get("rejection_sample_method")
    return "longest_prefix" if method in (None, "standard") else method


def _conditions(report: Report) -> dict:
    run, config = report.run, report.run.config
    return {
        "dataset": data_title(run.data, config["eval"]["name"]),
        "num_samples": run.data.num_samples,
        "engine": f"specbench {run.version}, {config.get('engine', {}).get('name')}",
        "concurrency": config.get("load", {}).get("concurrency"),
        "temperature": config.get("sampling", {}).get("temperature"),
        "tensor_parallel_size": config["parallel"]["tensor_parallel_size"],
        "hardware": run.hardware.get("gpus") or run.hardware.get("cpu"),
        "acceptance_source": run.acceptance_source,
        "measured_at": run.started_at,
    }


def _validation(marginal: list[float], mean_length: float) -> dict:
    implied = 1 + sum(marginal)
    difference = abs(implied - mean_length)
    rising = [
        {"position": place, "value": marginal[place], "previous": marginal[place - 1]}
        for place in range(1, len(marginal))
        if marginal[place] > marginal[place - 1]
    ]
    return {
        "mean_consistency": {
            "implied_mean_accept_length": round(implied, 6),
            "reported_mean_accept_length": round(mean_length, 6),
            "abs_delta": round(difference, 6),
            "tolerance": TOLERANCE,
            "passed": difference <= TOLERANCE,
        },
        "marginal_monotonicity": {"passed": not rising, "violations": rising},
    }


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 6) for value in values]
