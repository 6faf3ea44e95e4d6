"""The section of report.md on the load, from the `load` block of metrics.json.

Belongs here: that section as text. Does not belong here: figures (load_metrics.py).
"""

from __future__ import annotations

from specbench.records import RunRecord
from specbench.reports.cells import count_cell, decimal_cell, percent_of_cell
from specbench.reports.load_metrics import STEADY_SHARE
from specbench.reports.number_format import decimal, p_value, percent
from specbench.reports.table import Cell, ReportTable, Section, text_cell

_CLIENT_LABELS = {"lag_ms": "Lag of submission (ms)", "client_queue_ms": "Client queueing (ms)"}
_SLO_LABELS = {"slo_ttft_ms": "TTFT", "slo_tpot_ms": "TPOT", "slo_e2el_ms": "E2EL"}


def load_section(run: RunRecord, load: dict) -> list[Section]:
    """Nothing for a run of which no load is known."""
    if load["name"] is None:
        return []
    settings = run.config["load"]
    keys = ("concurrency", "rate_from", "rate", "burstiness", "burst_size", "ramp_s", "trace", "time_scale")
    told = ", ".join(f"{key}={settings[key]}" for key in keys if settings.get(key) is not None)
    blocks: list[str | ReportTable] = [f"`{load['name']}`" + (f", {told}" if told else "")]
    if load["lag_ms"]["n"]:
        blocks += [_client_table(load), *_gaps_sentence(load["gaps"])]
    if load["goodput"]["total"] is not None:
        blocks.append(_goodput_table(load["goodput"], load["client_queue_ms"]["mean"]))
    return [Section("Load", (*blocks, *_steady_state(load, is_resumed=run.num_segments > 1)))]


def _client_table(load: dict) -> ReportTable:
    rows = tuple(_client_row(label, load[name]) for name, label in _CLIENT_LABELS.items())
    note = (
        "Both are before the submission that TTFT and E2EL count from: waiting for a place, and the client's own delay."
    )
    return ReportTable("client", "Before submission", ("Client", "n", "Mean", "P50", "P90", "P99"), rows, notes=(note,))


def _client_row(label: str, entry: dict) -> tuple[Cell, ...]:
    figures = (decimal_cell(entry[name]) for name in ("mean", "p50", "p90", "p99"))
    return (text_cell(label), count_cell(entry["n"]), *figures)


def _gaps_sentence(gaps: dict) -> list[str]:
    if not gaps["n"]:
        return []
    law = "" if gaps["p_value"] is None else f"; against the load's own law p = {p_value(gaps['p_value'])}"
    variation = decimal(gaps["variation"])
    return [f"Gaps between arrivals: mean {decimal(gaps['mean_s'], 4)} s, coefficient of variation {variation}{law}."]


def _goodput_table(goodput: dict, mean_queue_ms: float | None) -> ReportTable:
    limits = ", ".join(
        f"{label} <= {goodput[name]:g} ms" for name, label in _SLO_LABELS.items() if goodput[name] is not None
    )
    rows = (
        (text_cell("Requests within every SLO"), percent_of_cell(goodput["met"], goodput["total"])),
        (text_cell("Goodput (req/s)"), decimal_cell(goodput["request_per_s"])),
    )
    notes = [f"{limits}; failed requests meet none."]
    if mean_queue_ms:
        notes.append(
            f"SLOs count from submission: before it, requests waited {decimal(mean_queue_ms)} ms in the client on "
            "average for one of load.concurrency's places, and that wait is outside them."
        )
    return ReportTable("goodput", "Goodput", ("Goodput", "Value"), rows, notes=tuple(notes))


def _steady_state(load: dict, *, is_resumed: bool) -> tuple[str | ReportTable, ...]:
    if is_resumed:
        return ("Steady state: not measured, because the run was resumed, and in between nothing ran.",)
    steady = load["steady_state"]
    rule = (
        f"from the first to the last moment with {100 * STEADY_SHARE:g}% of load.concurrency out"
        if load["name"] == "closed"
        else "from the first request that ended to the last one of the timetable that arrived"
    )
    if not steady["windows_s"]:
        return (f"No steady state ({rule}).",)
    windows = ", ".join(f"{decimal(low)} to {decimal(high)}" for low, high in steady["windows_s"])
    rows = (
        (text_cell("Window (s since the first arrival)"), text_cell(windows)),
        (text_cell("Share of the run's time"), Cell(steady["share"], percent(steady["share"]))),
        (text_cell("Requests out, mean"), decimal_cell(steady["mean_in_flight"])),
        (text_cell("Output token throughput (tok/s)"), decimal_cell(steady["output_token_per_s"])),
    )
    note = f"Without start-up and drain: {rule}."
    return (ReportTable("steady_state", "Steady state", ("Steady state", "Value"), rows, notes=(note,)),)
