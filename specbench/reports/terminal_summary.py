"""The closing table of a run as plain rows; whoever owns the terminal draws them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specbench.records import LosslessnessCheck, RunRecord, TaskResult
from specbench.reports.health_check import FAILED
from specbench.reports.health_section import health_sentence
from specbench.reports.identities import broken_identities
from specbench.reports.losslessness_section import losslessness_sentence
from specbench.reports.markdown import LATENCY_LABELS, data_title, dimension_title, is_unfinished, model_title
from specbench.reports.number_format import count, decimal, decimal_range, percent, percent_of, slash_joined
from specbench.reports.output_check_text import check_sentence
from specbench.reports.side_by_side import MOST_VALUES_SHOWN_FIRST

#: Of an eval that computes its own results.
MOST_RESULTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One line. `level` is "plain", "good" or "bad"; `is_section_end` asks for a rule below it."""

    label: str
    value: str
    level: str = "plain"
    is_section_end: bool = False


def summary_rows(run: RunRecord, metrics: dict) -> list[SummaryRow]:
    """What ran, verdict, accuracy, speed and acceptance, in the order of the report."""
    return [*_what_ran(run), *_verdict(run, metrics), *_accuracy(run, metrics), *_speed(metrics), *_acceptance(metrics)]


def _what_ran(run: RunRecord) -> list[SummaryRow]:
    state = [SummaryRow("Unfinished", "still going, or killed", "bad")] if is_unfinished(run) else []
    data = data_title(run.data, run.config["eval"]["name"])
    return [SummaryRow("Model", model_title(run.model)), *state, SummaryRow("Data", data, is_section_end=True)]


def _verdict(run: RunRecord, metrics: dict) -> list[SummaryRow]:
    requests, status = metrics["requests"], metrics["checks"]["output"]["status"]
    bad = requests["failed"] + requests["aborted"]
    level = {"identical": "good", "mismatch": "bad"}.get(status, "plain")
    broken = broken_identities(metrics)
    is_failed = any(check["status"] == FAILED for check in metrics["health"])
    ended = f"{count(requests['completed'])} completed" + (f", {count(bad)} failed or aborted" if bad else "")
    return [
        SummaryRow("Output check", check_sentence(run.output_check).replace("**", ""), level),
        *_losslessness(run.losslessness),
        SummaryRow("Identities", f"broken: {', '.join(broken)}" if broken else "hold", "bad" if broken else "good"),
        SummaryRow("Health", health_sentence(metrics["health"]).replace("**", ""), "bad" if is_failed else "plain"),
        SummaryRow("Requests", ended, "bad" if bad else "plain", is_section_end=True),
    ]


def _losslessness(check: LosslessnessCheck | None) -> list[SummaryRow]:
    if check is None:
        return []
    level = {"identical": "good", "consistent": "good", "mismatch": "bad"}.get(check.status, "plain")
    return [SummaryRow("Losslessness", losslessness_sentence(check).replace("**", ""), level)]


def _accuracy(run: RunRecord, metrics: dict) -> list[SummaryRow]:
    rows = [*_counted(metrics["eval"]), *_own_results(run.task_results)]
    return [*rows[:-1], replace(rows[-1], is_section_end=True)] if rows else []


def _own_results(results: Sequence[TaskResult]) -> list[SummaryRow]:
    """What the eval computed itself, as far as it is little."""
    shown = [
        SummaryRow(f"  {one.task}", f"{decimal(one.value, 4)} {one.metric}, {one.filter}")
        for one in results[:MOST_RESULTS_SHOWN]
    ]
    left_out = len(results) - len(shown)
    return [*shown, *([SummaryRow("", f"{left_out} more in the report")] if left_out else [])]


def _counted(accuracy: dict) -> list[SummaryRow]:
    if accuracy["total"] is None:
        return []
    value = f"{percent_of(accuracy['correct'], accuracy['total'])} by {accuracy['scorer']}"
    rows = [SummaryRow("Accuracy", value)]
    dimension, entries = next(iter(accuracy["by"].items()), ("", {}))
    if len(entries) <= MOST_VALUES_SHOWN_FIRST:
        rows += [
            SummaryRow(f"  {dimension_title(dimension)} {name}", percent_of(entry["correct"], entry["total"]))
            for name, entry in entries.items()
        ]
    return rows


def _speed(metrics: dict) -> list[SummaryRow]:
    throughput = metrics["throughput"]
    interval = metrics["intervals"].get("throughput.output_token_per_s")
    over_repeats = "" if interval is None else f" (95% over repeats: {decimal_range(interval)})"
    latencies = [
        SummaryRow(f"{label}, P50", decimal(metrics["latency"][name]["p50"]), is_section_end=name == "e2el_ms")
        for name, label in LATENCY_LABELS.items()
    ]
    return [
        SummaryRow("Duration (s)", decimal(throughput["duration_s"])),
        SummaryRow("Output token throughput (tok/s)", f"{decimal(throughput['output_token_per_s'])}{over_repeats}"),
        *_goodput(metrics["load"]),
        *latencies,
    ]


def _goodput(load: dict) -> list[SummaryRow]:
    goodput, queue_ms = load["goodput"], load["client_queue_ms"]["mean"]
    if goodput["total"] is None:
        return []
    share = percent_of(goodput["met"], goodput["total"])
    outside = f", {decimal(queue_ms)} ms in the client not counted" if queue_ms else ""
    return [SummaryRow("Goodput (req/s)", f"{decimal(goodput['request_per_s'])}, {share} of requests{outside}")]


def _acceptance(metrics: dict) -> list[SummaryRow]:
    acceptance = metrics["acceptance"]
    if not acceptance["drafts"]:
        return [SummaryRow("Acceptance", "nothing was drafted")]
    return [
        SummaryRow("Acceptance rate", percent(acceptance["acceptance_rate"])),
        SummaryRow("Acceptance length", decimal(acceptance["acceptance_length"])),
        SummaryRow("Per-position acceptance (%)", slash_joined(acceptance["per_position"])),
        SummaryRow("Given the previous position (%)", slash_joined(acceptance["per_position_conditional"])),
    ]
