"""report.md of one run: what ran, verdict, accuracy, speed, and the sections on drafts.

Belongs here: the order of the report and the words of its first four sections. Does not belong here: formulas, the
sections on drafts (acceptance_sections.py), how the output check is put (output_check_text.py).

The output check stands beside every speed figure, and a packaged model or data is named in the title.
"""

from __future__ import annotations

from specbench.records import DataIdentity, ModelIdentity, RunRecord
from specbench.reports.acceptance_sections import acceptance_sections
from specbench.reports.condition_sections import condition_section
from specbench.reports.cost_section import cost_section
from specbench.reports.health_section import health_section, health_sentence
from specbench.reports.identities import broken_identities
from specbench.reports.latency import MIN_REQUESTS_OF_P99
from specbench.reports.markdown_table import markdown_table
from specbench.reports.number_format import NOT_MEASURED, count, decimal, percent_of, percent_range
from specbench.reports.output_check_text import check_differences, check_sentence
from specbench.reports.table import section_markdown

LATENCY_LABELS = {
    "ttft_ms": "TTFT (ms)",
    "tpot_ms": "TPOT (ms)",
    "itl_step_ms": "ITL per step (ms)",
    "itl_token_ms": "ITL per token (ms)",
    "e2el_ms": "E2EL (ms)",
}

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


def report_markdown(run: RunRecord, metrics: dict) -> str:
    """The report of one run, from run.json and metrics.json."""
    head = f"# {model_title(run.model)}\n\n{_subtitle(run)}"
    health = section_markdown(health_section(metrics["health"]))
    own = [_what_ran(run), _verdict(run, metrics), health, _accuracy(run, metrics), _speed(run, metrics)]
    acceptance = metrics["acceptance"]
    cost = section_markdown(cost_section(metrics["cost_model"]))
    drafts = [*acceptance_sections(acceptance, metrics["intervals"]), condition_section(acceptance)]
    sections = [head, *own, cost, *drafts]
    return "\n\n".join(section for section in sections if section) + "\n"


def model_title(model: ModelIdentity) -> str:
    """What ran, and what it is not: `inkling-nano (packaged, 5.8 M parameters): not Inkling`."""
    if not model.packaged:
        return model.ran
    size = "" if model.num_parameters is None else f", {model.num_parameters / 1e6:.1f} M parameters"
    family = model.requested.replace("-", "_").split("_")[0].capitalize()
    return f"{model.ran} (packaged{size}): not {family}"


def data_title(data: DataIdentity, eval_name: str) -> str:
    """Which samples ran: `nano_problems: made-up problems, not GSM8K`."""
    return f"{data.name}: made-up problems, not {eval_name.upper()}" if data.packaged else data.name


def is_unfinished(run: RunRecord) -> bool:
    return run.status == "running"


def _subtitle(run: RunRecord) -> str:
    return f"{run.config['spec']['name']} on {data_title(run.data, run.config['eval']['name'])}"


def _what_ran(run: RunRecord) -> str:
    model, data = run.model, run.data
    code = f"{run.version}, commit {run.commit or NOT_MEASURED}{' with changes' if run.is_dirty else ''}"
    rows = [
        ("Model requested", model.requested),
        ("Model ran", model_title(model)),
        ("Checkpoint", _at(model.path, model.revision, model.sha256)),
        *_draft_model(run.draft_model),
        ("Data", f"{data_title(data, run.config['eval']['name'])}; {count(data.num_samples)} samples"),
        ("Data file", _at(data.path, data.revision, data.sha256)),
        ("Hardware", _flat(run.hardware)),
        *((f"Setting: {group}", _flat(values)) for group, values in run.config.items()),
        ("Packages", _flat(run.packages)),
        ("specbench", code),
        ("Command", run.command),
        ("Started, finished", f"{run.started_at}, {run.finished_at or NOT_MEASURED}"),
        ("Acceptance source", run.acceptance_source),
    ]
    return "## What ran\n\n" + markdown_table(("", "Value"), rows, num_text_columns=2)


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


def _verdict(run: RunRecord, metrics: dict) -> str:
    lines = [*_status_lines(run, metrics), f"- Output check: {check_sentence(run.output_check)}"]
    lines += [f"- {_requests_sentence(metrics['requests'])}", f"- {_identities_sentence(metrics)}"]
    lines.append(f"- Health: {health_sentence(metrics['health'])}")
    lines += [f"- Notice: {notice}" for notice in run.notices]
    parts = ["## Verdict", "\n".join(lines), *check_differences(run.output_check), _identities_table(metrics)]
    return "\n\n".join(parts)


def _status_lines(run: RunRecord, metrics: dict) -> list[str]:
    if is_unfinished(run):
        done = count(metrics["requests"]["completed"])
        return [
            f"- **Unfinished**: the run is still going or was killed; these figures cover {done} completed requests."
        ]
    return [] if run.error is None else [f"- **Failed**: {run.error}"]


def _requests_sentence(requests: dict) -> str:
    bad = requests["failed"] + requests["aborted"]
    ended = ", ".join(f"{count(requests[state])} {state}" for state in ("completed", "failed", "aborted"))
    return f"Requests: {f'**{ended}**' if bad else ended}; {count(requests['warmup'])} of warm-up, in no figure"


def _identities_sentence(metrics: dict) -> str:
    checks = metrics["checks"]["identities"].values()
    broken = broken_identities(metrics)
    if broken:
        return f"Identities: **BROKEN**: {', '.join(broken)}. No figure below can be trusted."
    held = sum(check["holds"] is True for check in checks)
    return f"Identities of the counters: all {held} that apply hold"


def _identities_table(metrics: dict) -> str:
    states = {True: "holds", False: "BROKEN", None: "does not apply"}
    rows = [
        (_IDENTITY_LABELS[name], _side(check["left"]), _side(check["right"]), states[check["holds"]])
        for name, check in metrics["checks"]["identities"].items()
    ]
    return markdown_table(("Identity", "Left", "Right", "State"), rows)


def _side(value: float | None) -> str:
    return decimal(value, 6) if isinstance(value, float) else count(value)


def _accuracy(run: RunRecord, metrics: dict) -> str:
    accuracy = metrics["eval"]
    title = f"## Accuracy\n\n{data_title(run.data, run.config['eval']['name'])}"
    if accuracy["total"] is None:
        return f"{title}\n\nNothing was scored."
    headline = (
        f"**{percent_of(accuracy['correct'], accuracy['total'])}** by the scorer `{accuracy['scorer']}`, "
        f"95% Wilson interval {percent_range(accuracy['interval'])}; failed requests and invalid answers are wrong."
    )
    rows = [
        ("Invalid (nothing extracted)", percent_of(accuracy["invalid"], accuracy["total"])),
        ("Truncated (at the token limit)", percent_of(accuracy["truncated"], accuracy["total"])),
    ]
    shares = markdown_table(("Share of answers", "Value"), rows)
    return "\n\n".join([title, headline, shares, _scorers(accuracy), *_dimensions(accuracy["by"])])


def _scorers(accuracy: dict) -> str:
    rows = [
        (
            f"{name} (headline)" if name == accuracy["scorer"] else name,
            percent_of(entry["correct"], entry["total"]),
            percent_of(entry["invalid"], entry["total"]),
        )
        for name, entry in accuracy["scorers"].items()
    ]
    return markdown_table(("Scorer", "Accuracy", "Invalid"), rows)


def _dimensions(by: dict) -> list[str]:
    return [
        markdown_table(
            (dimension.capitalize(), "Accuracy"),
            [(value, percent_of(entry["correct"], entry["total"])) for value, entry in entries.items()],
        )
        for dimension, entries in by.items()
    ]


def _speed(run: RunRecord, metrics: dict) -> str:
    """Speed figures, headed by the output check."""
    throughput = metrics["throughput"]
    rates = [(label, decimal(throughput[name])) for name, label in _THROUGHPUT_LABELS.items()]
    cache = percent_of(metrics["cache"]["hit_tokens"], metrics["cache"]["query_tokens"])
    parts = [
        "## Speed",
        f"Output check: {check_sentence(run.output_check)}",
        markdown_table(("Metric", "Value"), [*rates, ("Prefix cache hit rate (tokens)", cache)]),
        _latency_table(metrics),
        *_footnote(metrics),
    ]
    return "\n\n".join(parts)


def _latency_table(metrics: dict) -> str:
    rows = []
    for name, label in LATENCY_LABELS.items():
        entry = metrics["latency"][name]
        p99 = decimal(entry["p99"]) + ("*" if _is_p99_marked(metrics) and entry["n"] else "")
        rows.append(
            (label, count(entry["n"]), decimal(entry["mean"]), decimal(entry["p50"]), decimal(entry["p90"]), p99)
        )
    return markdown_table(("Latency", "n", "Mean", "P50", "P90", "P99"), rows)


def _is_p99_marked(metrics: dict) -> bool:
    return 0 < metrics["requests"]["completed"] < MIN_REQUESTS_OF_P99


def _footnote(metrics: dict) -> list[str]:
    if not _is_p99_marked(metrics):
        return []
    completed = count(metrics["requests"]["completed"])
    return [f"\\* of {completed} requests, under {MIN_REQUESTS_OF_P99}: little more than the largest value."]
