"""report.md of one run: what ran, verdict, accuracy, speed, and the sections on drafts.

Belongs here: the order of the report and the words of its first four sections. Does not belong here: formulas, the
sections on drafts (acceptance_sections.py), how the output check is put (output_check_text.py).

The output check stands beside every speed figure, and a packaged model or data is named in the title.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.records import DataIdentity, ModelIdentity, RunRecord
from specbench.reports.acceptance_sections import acceptance_sections
from specbench.reports.cells import (
    EMPTY,
    count_cell,
    decimal_cell,
    decimal_range_cell,
    percent_of_cell,
    percent_range_cell,
)
from specbench.reports.condition_sections import condition_sections
from specbench.reports.cost_section import cost_section
from specbench.reports.gate_section import gate_section
from specbench.reports.gates import GateResult
from specbench.reports.health_section import health_section, health_sentence, raised
from specbench.reports.identities import broken_identities
from specbench.reports.latency import MIN_REQUESTS_OF_P99
from specbench.reports.layout_check import layout_text
from specbench.reports.load_section import load_section
from specbench.reports.losslessness_section import losslessness_lines, losslessness_sections
from specbench.reports.number_format import NOT_MEASURED, count, decimal, percent_of, percent_range
from specbench.reports.output_check_text import check_differences, check_sentence
from specbench.reports.table import Cell, ReportTable, Section, section_markdown, text_cell
from specbench.reports.task_results_table import task_results_tables

LATENCY_LABELS = {
    "ttft_ms": "TTFT (ms)",
    "tpot_ms": "TPOT (ms)",
    "itl_step_ms": "ITL per step (ms)",
    "itl_token_ms": "ITL per token (ms)",
    "e2el_ms": "E2EL (ms)",
}

#: Evals whose packaged problems imitate another one's.
_IMITATED = {"lm_eval": "GSM8K", "losslessness": "GSM8K", "speed_bench": "SPEED-Bench"}

_THROUGHPUT_LABELS = {
    "duration_s": "Benchmark duration (s)",
    "request_per_s": "Request throughput (req/s)",
    "output_token_per_s": "Output token throughput (tok/s)",
    "output_token_per_s_per_device": "Output token throughput per device (tok/s)",
    "output_token_per_s_per_user": "Output token throughput per user (tok/s)",
    "total_token_per_s": "Total token throughput (tok/s)",
    "verify_step_per_s": "Verify steps (1/s)",
}

_IDENTITY_LABELS = {
    "sum_of_positions": "sum of positions = acceptance length - 1",
    "rate_from_length": "acceptance rate = (acceptance length - 1) / k",
    "generated_tokens": "generated tokens = rows + accepted + first tokens - discarded",
    "tokens_of_each_request": "requests whose tokens are those of their rows = requests",
    "rows_consistent": "rows that agree with themselves = rows",
}


def report_markdown(run: RunRecord, metrics: dict, gates: Sequence[GateResult] = ()) -> str:
    """The report of one run, from run.json and metrics.json."""
    return "\n\n".join([report_head(run), *map(section_markdown, report_sections(run, metrics, gates))]) + "\n"


def report_head(run: RunRecord) -> str:
    """Title and what it is about."""
    return f"# {model_title(run.model)}\n\n{run_title(run)}"


def report_sections(run: RunRecord, metrics: dict, gates: Sequence[GateResult] = ()) -> list[Section]:
    """Every section in the order of the report."""
    return [
        _what_ran(run),
        _verdict(run, metrics),
        *([gate_section(gates)] if gates else []),
        *losslessness_sections(run.losslessness),
        health_section(metrics["health"]),
        _accuracy(run, metrics),
        _speed(run, metrics),
        *load_section(run, metrics["load"]),
        cost_section(metrics["cost_model"]),
        *acceptance_sections(metrics["acceptance"], metrics["intervals"]),
        *condition_sections(metrics["acceptance"], metrics["intervals"]),
    ]


def model_title(model: ModelIdentity) -> str:
    """What ran, and what it is not: `inkling-nano (packaged, 5.8 M parameters): not Inkling`."""
    if not model.packaged:
        return model.ran
    size = "" if model.num_parameters is None else f", {model.num_parameters / 1e6:.1f} M parameters"
    family = model.requested.replace("-", "_").split("_")[0].capitalize()
    return f"{model.ran} (packaged{size}): not {family}"


def data_title(data: DataIdentity, eval_name: str) -> str:
    """Which samples ran: `nano_problems: made-up problems, not GSM8K`."""
    imitated = _IMITATED.get(eval_name, eval_name.upper())
    return f"{data.name}: made-up problems, not {imitated}" if data.packaged else data.name


def is_unfinished(run: RunRecord) -> bool:
    return run.status == "running"


def run_title(run: RunRecord) -> str:
    """`mtp8 on gsm8k`, and how drafts were drawn and accepted where that is not plain."""
    data = data_title(run.data, run.config["eval"]["name"])
    weights = ", random weights (the text means nothing)" if has_random_weights(run) else ""
    return f"{run.config['spec']['name']}{_verification_title(run)} on {data}{weights}"


def is_synthetic(run: RunRecord) -> bool:
    """Whether drafts were accepted by coins of given rates: nothing about the text can be read off such a run."""
    return run.config["spec"].get("rejection_sample_method") == "synthetic"


def has_random_weights(run: RunRecord) -> bool:
    """Whether the model was a shape with weights drawn at random: only speed can be read off such a run."""
    return run.config.get("model", {}).get("load") == "random"


def _verification_title(run: RunRecord) -> str:
    if is_synthetic(run):
        return " with synthetic acceptance (the text means nothing)"
    spec, temperature = run.config["spec"], run.config["sampling"].get("temperature")
    is_drawn = spec.get("draft_sample_method") == "probabilistic" and spec["name"] != "none" and temperature != 0
    return f" with probabilistic drafts, {spec['rejection_sample_method']} verification" if is_drawn else ""


def _what_ran(run: RunRecord) -> Section:
    model, data = run.model, run.data
    code = f"{run.version}, commit {run.commit or NOT_MEASURED}{' with changes' if run.is_dirty else ''}"
    rows = [
        ("Model requested", model.requested),
        ("Model ran", model_title(model)),
        ("Checkpoint", _at(model.path, model.revision, model.sha256)),
        *_draft_model(run.draft_model),
        ("Data", f"{data_title(data, run.config['eval']['name'])}; {count(data.num_samples)} samples"),
        ("Data file", _at(data.path, data.revision, data.sha256)),
        *([("Parallel layout", layout_text(run.config))] if run.acceptance_source == "engine" else []),
        ("Hardware", _flat(run.hardware)),
        *((f"Setting: {group}", _flat(values)) for group, values in run.config.items()),
        ("Packages", _flat(run.packages)),
        ("specbench", code),
        ("Command", run.command),
        ("Started, finished", f"{run.started_at}, {run.finished_at or NOT_MEASURED}"),
        ("Acceptance source", run.acceptance_source),
    ]
    cells = tuple((text_cell(label), text_cell(value)) for label, value in rows)
    return Section("What ran", (ReportTable("what_ran", "What ran", ("", "Value"), cells, 2),))


def _draft_model(draft: ModelIdentity | None) -> list[tuple[str, str]]:
    if draft is None:
        return []
    return [("Draft model", draft.ran), ("Draft checkpoint", _at(draft.path, draft.revision, draft.sha256))]


def _at(path: str | None, revision: str | None, sha256: str | None) -> str:
    parts = [path, f"revision {revision}" if revision else None, f"sha256 {sha256}" if sha256 else None]
    return ", ".join(part for part in parts if part) or NOT_MEASURED


def _flat(value: object) -> str:
    """Plain containers on one line; entries that are unset are left out."""
    if isinstance(value, dict):
        entries = [f"{key}={_flat(entry)}" for key, entry in value.items() if entry not in (None, [], {}, ())]
        return ", ".join(entries) or NOT_MEASURED
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flat(entry) for entry in value) + "]"
    return str(value)


def _verdict(run: RunRecord, metrics: dict) -> Section:
    lines = "\n".join(f"- {line}" for line in verdict_lines(run, metrics))
    return Section("Verdict", (lines, *check_differences(run.output_check), _identities_table(metrics)))


def verdict_lines(run: RunRecord, metrics: dict) -> list[str]:
    """What a reader must know before any figure, a sentence each."""
    return [
        *_status_lines(run, metrics),
        f"Output check: {check_sentence(run.output_check)}",
        *losslessness_lines(run.losslessness),
        _requests_sentence(metrics["requests"]),
        _identities_sentence(metrics),
        f"Health: {health_sentence(metrics['health'])}",
        *(f"Notice: {notice}" for notice in run.notices),
    ]


def warning_lines(run: RunRecord, metrics: dict) -> list[str]:
    """Of these, the output check, and then only what is out of order or not what was asked for."""
    requests, health = metrics["requests"], metrics["health"]
    return [
        *_status_lines(run, metrics),
        f"Output check: {check_sentence(run.output_check)}",
        *losslessness_lines(run.losslessness),
        *([_requests_sentence(requests)] if requests["failed"] + requests["aborted"] else []),
        *([_identities_sentence(metrics)] if broken_identities(metrics) else []),
        *([f"Health: {health_sentence(health)}"] if raised(health) else []),
        *(f"Notice: {notice}" for notice in run.notices),
    ]


def _status_lines(run: RunRecord, metrics: dict) -> list[str]:
    if is_unfinished(run):
        done = count(metrics["requests"]["completed"])
        return [f"**Unfinished**: the run is still going or was killed; these figures cover {done} completed requests."]
    return [] if run.error is None else [f"**Failed**: {run.error}"]


def _requests_sentence(requests: dict) -> str:
    bad = requests["failed"] + requests["aborted"]
    ended = ", ".join(f"{count(requests[state])} {state}" for state in ("completed", "failed", "aborted"))
    failed = f" (**{count(requests['warmup_failed'])} failed**)" if requests["warmup_failed"] else ""
    return f"Requests: {f'**{ended}**' if bad else ended}; {count(requests['warmup'])} of warm-up{failed}, in no figure"


def _identities_sentence(metrics: dict) -> str:
    checks = metrics["checks"]["identities"].values()
    broken = broken_identities(metrics)
    if broken:
        return f"Identities: **BROKEN**: {', '.join(broken)}. No figure below can be trusted."
    held = sum(check["holds"] is True for check in checks)
    return f"Identities of the counters: all {held} that apply hold"


def _identities_table(metrics: dict) -> ReportTable:
    states = {True: "holds", False: "BROKEN", None: "does not apply"}
    rows = tuple(
        (
            text_cell(_IDENTITY_LABELS[name]),
            Cell(check["left"], _side(check["left"])),
            Cell(check["right"], _side(check["right"])),
            Cell(check["holds"], states[check["holds"]]),
        )
        for name, check in metrics["checks"]["identities"].items()
    )
    return ReportTable("identities", "Identities of the counters", ("Identity", "Left", "Right", "State"), rows)


def _side(value: float | None) -> str:
    return decimal(value, 6) if isinstance(value, float) else count(value)


def _accuracy(run: RunRecord, metrics: dict) -> Section:
    accuracy = metrics["eval"]
    data = data_title(run.data, run.config["eval"]["name"])
    if is_synthetic(run):
        refusal = "**Not given**: drafts were accepted by coins (spec.rejection_sample_method=synthetic), not verified."
        return Section("Accuracy", (data, refusal))
    if has_random_weights(run):
        return Section("Accuracy", (data, "**Not given**: the weights are random (model.load=random)."))
    if accuracy["total"] is None:
        return Section("Accuracy", (data, "Nothing was scored.", *task_results_tables(run.task_results)))
    headline = (
        f"**{percent_of(accuracy['correct'], accuracy['total'])}** by the scorer `{accuracy['scorer']}`, "
        f"95% Wilson interval {percent_range(accuracy['interval'])}; failed requests and invalid answers are wrong."
    )
    rows = (
        (text_cell("Invalid (nothing extracted)"), percent_of_cell(accuracy["invalid"], accuracy["total"])),
        (text_cell("Truncated (at the token limit)"), percent_of_cell(accuracy["truncated"], accuracy["total"])),
    )
    shares = ReportTable("answers", "Answers", ("Share of answers", "Value"), rows)
    tables = (shares, _scorers(accuracy), *_dimensions(accuracy["by"]), *task_results_tables(run.task_results))
    return Section("Accuracy", (data, headline, *tables))


def _scorers(accuracy: dict) -> ReportTable:
    rows = tuple(
        (
            text_cell(f"{name} (headline)" if name == accuracy["scorer"] else name),
            percent_of_cell(entry["correct"], entry["total"]),
            percent_of_cell(entry["invalid"], entry["total"]),
        )
        for name, entry in accuracy["scorers"].items()
    )
    return ReportTable("scorers", "Scorers", ("Scorer", "Accuracy", "Invalid"), rows)


def dimension_title(dimension: str) -> str:
    """`sub-category`"""
    return dimension.replace("_", "-")


def _dimensions(by: dict) -> list[ReportTable]:
    return [
        ReportTable(
            f"accuracy_by_{dimension}",
            f"By {dimension_title(dimension)}",
            (dimension_title(dimension).capitalize(), "Accuracy", "95%"),
            tuple(
                (
                    text_cell(value),
                    percent_of_cell(entry["correct"], entry["total"]),
                    percent_range_cell(entry["interval"]),
                )
                for value, entry in entries.items()
            ),
        )
        for dimension, entries in by.items()
    ]


def _speed(run: RunRecord, metrics: dict) -> Section:
    """Speed figures, headed by the output check."""
    check = f"Output check: {check_sentence(run.output_check)}"
    return Section("Speed", (check, _throughput_table(metrics), _latency_table(metrics)))


def _throughput_table(metrics: dict) -> ReportTable:
    """Rates have an interval where there are repeats enough; else there is no column for it."""
    throughput, intervals = metrics["throughput"], metrics["intervals"]
    has_intervals = any(path.startswith("throughput.") for path in intervals)
    rows: list[tuple[Cell, ...]] = [
        (text_cell(label), decimal_cell(throughput[name]), _rate_interval(intervals.get(f"throughput.{name}")))
        for name, label in _THROUGHPUT_LABELS.items()
    ]
    rows += [(*row, EMPTY) for row in _cache_rows(metrics["cache"])]
    header = ("Metric", "Value", "95% over repeats")
    width = 3 if has_intervals else 2
    return ReportTable("throughput", "Throughput", header[:width], tuple(row[:width] for row in rows))


def _rate_interval(interval: Sequence[float] | None) -> Cell:
    return EMPTY if interval is None else decimal_range_cell(interval)


def _cache_rows(cache: dict) -> tuple[tuple[Cell, ...], ...]:
    hits = percent_of_cell(cache["hit_tokens"], cache["query_tokens"])
    return (
        (text_cell("Prefix cache hit rate (tokens)"), hits),
        (text_cell("Prefix cache blocks evicted"), count_cell(cache["evicted_blocks"])),
        (text_cell("Cache blocks in use, at most"), count_cell(cache["most_blocks_used"])),
        (text_cell("Preemptions"), count_cell(cache["preemptions"])),
    )


def _latency_table(metrics: dict) -> ReportTable:
    header = ("Latency", "n", "Mean", "P50", "P90", "P99")
    rows = tuple(_latency_row(label, metrics["latency"][name], metrics) for name, label in LATENCY_LABELS.items())
    notes: tuple[str, ...] = ()
    if _is_p99_marked(metrics):
        completed = count(metrics["requests"]["completed"])
        notes = (f"\\* of {completed} requests, under {MIN_REQUESTS_OF_P99}: little more than the largest value.",)
    return ReportTable("latency", "Latency", header, rows, notes=notes)


def _latency_row(label: str, entry: dict, metrics: dict) -> tuple[Cell, ...]:
    p99 = decimal_cell(entry["p99"])
    if _is_p99_marked(metrics) and entry["n"]:
        p99 = Cell(p99.value, p99.text + "*")
    means = (decimal_cell(entry[name]) for name in ("mean", "p50", "p90"))
    return (text_cell(label), count_cell(entry["n"]), *means, p99)


def _is_p99_marked(metrics: dict) -> bool:
    return 0 < metrics["requests"]["completed"] < MIN_REQUESTS_OF_P99
