"""The sections on cost: "Where the time goes" of one run, and the cost of a step over the runs of a sweep.

Belongs here: tables and sentences from what cost_model.py computed. Does not belong here: any figure.
"""

from __future__ import annotations

from specbench.reports.cells import count_cell, decimal_cell, list_cell, percent_cell
from specbench.reports.number_format import NOT_MEASURED, count, decimal, percent
from specbench.reports.table import Cell, ReportTable, Section, text_cell

TITLE = "Where the time goes"

_KINDS = {
    "decode_s": "Steps of decode alone",
    "decode_with_prompt_s": "Steps of decode and prompt chunks",
    "prompt_s": "Steps of prompts alone",
    "between_s": "Idle: no request in decode",
}
_PARTS = {"target_s": "Target", "verify_s": "Verification", "draft_s": "Drafting", "host_s": "Host"}
_LAW_NAMES = {
    "fitted": "fitted",
    "rows": "all growth from rows",
    "requests": "rows cost what prompt rows do, the rest is of requests",
}
_PART_NAMES = {"target": "target and verification", "draft_pass": "one draft pass", "host": "host"}


def cost_section(cost: dict) -> Section:
    """Of one run, from the `cost_model` block."""
    if cost["time"] is None:
        return Section(TITLE, (f"Not measured: {cost['reason']}.",))
    blocks: list[str | ReportTable] = [_time_table(cost["time"]), _batch_table(cost["by_batch"])]
    if cost["reason"] is not None:
        blocks.append(f"No law of cost: {cost['reason']}.")
    else:
        blocks += [_law_table(cost["laws"]), _prediction_table(cost), *_sentences(cost)]
    return Section(TITLE, tuple(block for block in blocks if isinstance(block, str) or block.rows))


def _time_table(time: dict) -> ReportTable:
    duration, in_steps = time["duration_s"], sum(time[kind] for kind in _KINDS) - time["between_s"]
    rows = [_time_row(label, time[name], duration, "of the run") for name, label in _KINDS.items()]
    rows += [_time_row(label, time[name], in_steps, "of all steps") for name, label in _PARTS.items()]
    note = (
        "Host is what target, verification and drafting leave of a step: scheduling, text, records, and the wait until "
        "the next step starts. Parts that nothing timed are n/a."
    )
    return ReportTable("time", "Time", ("", "Seconds", "Share", "of"), tuple(rows), 1, (note,))


def _time_row(label: str, seconds: float | None, whole: float, of: str) -> tuple[Cell, ...]:
    share = seconds / whole if seconds is not None and whole else None
    return text_cell(label), decimal_cell(seconds), percent_cell(share), text_cell(of)


def _batch_table(by_batch: list[dict]) -> ReportTable:
    header = (
        "Requests",
        "Steps",
        "Rows",
        "Step (ms)",
        "Target",
        "Verification",
        "Drafting",
        "Host",
        "Tokens a request",
    )
    names = ("step_ms", "target_ms", "verify_ms", "draft_ms", "host_ms", "tokens_per_request_step")
    rows = tuple(
        (
            count_cell(row["batch"]),
            count_cell(row["steps"]),
            decimal_cell(row["rows"], 1),
            *(decimal_cell(row[name]) for name in names),
        )
        for row in by_batch
    )
    note = "Steps of decode alone, at the commonest batch sizes; means in milliseconds."
    return ReportTable("step_cost_by_batch", "Cost of a step by batch", header, rows, 0, (note,))


def _law_table(laws: list[dict]) -> ReportTable:
    header = ("Law", "Part", "A step", "A request", "A row", "√rows", "A prompt row", "A prompt chunk", "Residual")
    names = ("step_ms", "request_ms", "row_ms", "root_row_ms", "prompt_row_ms", "prompt_chunk_ms")
    rows = tuple(
        (
            text_cell(_LAW_NAMES[law["name"]]),
            text_cell(_PART_NAMES[part]),
            *(decimal_cell(law[part][name], 3) for name in names),
            percent_cell(law[part]["residual"]),
        )
        for law in laws
        for part in _PART_NAMES
        if law[part] is not None
    )
    notes = ["Milliseconds; residual is the median error of a fitted step.", *_left_out_notes(laws)]
    if len(laws) > 1:
        notes.append(
            "Every request drafts the same number of tokens, so rows grow with requests and a cost that grows with "
            "both may belong to either: both laws fit, what they predict is a range."
        )
    return ReportTable("cost_law", "Law of cost", header, rows, 2, tuple(notes))


def _left_out_notes(laws: list[dict]) -> list[str]:
    """Of each part on its own, by the law that leaves out more of it."""
    shares = {
        label: max((law[part]["left_out_share"] for law in laws if law[part] is not None), default=0.0)
        for part, label in _PART_NAMES.items()
    }
    named = [f"{percent(share)} of the time of {label}" for label, share in shares.items() if share]
    return [f"Steps that lie far off were left out of the fit of a part: {', '.join(named)}."] if named else []


def _prediction_table(cost: dict) -> ReportTable:
    tokens = {one["k"]: one for one in cost["tokens_per_step"]}
    rows = tuple(
        (
            count_cell(prediction["batch"]),
            count_cell(entry["k"]),
            decimal_cell(tokens[entry["k"]]["tokens"]),
            _range_cell(tokens[entry["k"]]["low"], tokens[entry["k"]]["high"]),
            _range_cell(entry["step_ms_low"], entry["step_ms_high"]),
            _range_cell(entry["speedup_low"], entry["speedup_high"]),
            _range_cell(entry["against_this_run_low"], entry["against_this_run_high"]),
        )
        for prediction in cost["predictions"]
        for entry in prediction["by_k"]
        if len(prediction["by_k"]) > 1
    )
    header = ("Requests", "k", "Tokens a step", "at least, at most", "Step (ms)", "Speed-up", "Against this run")
    notes = (
        "Predicted for steps of decode. Tokens a step: this run's text cut into steps of fewer drafts; the bounds take "
        "each token that was never drafted for a miss and for a hit. Speed-up: against k = 0.",
    )
    return ReportTable("predicted_speedup", "Predicted for every k", header, rows, 0, notes)


def _sentences(cost: dict) -> list[str]:
    predictions = [one for one in cost["predictions"] if len(one["by_k"]) > 1]
    if not predictions:
        return []
    lines = [_prediction_sentence(one) for one in predictions]
    caution = (
        "No step of this run went without drafts, so a step of k = 0 is extrapolated to fewer rows than were seen: a "
        "run with spec=none among the compared measures the speed-up."
    )
    return ["\n".join(f"- {line}" for line in lines), caution]


def _prediction_sentence(prediction: dict) -> str:
    break_even = _range_text(prediction["break_even_tokens_low"], prediction["break_even_tokens_high"])
    perfect = _range_text(prediction["perfect_speedup_low"], prediction["perfect_speedup_high"])
    return (
        f"{_requests(prediction['batch'])}: best {best_k_text(prediction['best_k'])}; break-even at {break_even} "
        f"tokens a step; perfect drafts would give {perfect} times"
    )


def best_k_text(best: list[dict | None]) -> str:
    """`k = 3 (2 to 4 within 2% of it)`, of each law where laws differ."""
    known = [one for one in best if one is not None]
    if len(known) < len(best) or not known:
        return f"k {NOT_MEASURED}"
    flats = {(one["flat_from"], one["flat_to"]) for one in known}
    if len({one["best"] for one in known}) > 1 and len(flats) == 1:
        ((flat_from, flat_to),) = flats
        return f"k between {flat_from} and {flat_to}: all within 2% of each other"
    by_law = list(dict.fromkeys(_best_of_law(one) for one in known))
    return by_law[0] if len(by_law) == 1 else f"{by_law[0]} by one law, {by_law[1]} by the other"


def _best_of_law(one: dict) -> str:
    if one["flat_from"] == one["flat_to"]:
        return f"k = {one['best']} (no other within 2% of it)"
    return f"k = {one['best']} ({one['flat_from']} to {one['flat_to']} within 2% of it)"


# ---- Several runs


def sweep_cost_section(cost: dict) -> Section:
    """Of the runs of a sweep, from what sweep_cost_model returned."""
    title = "Cost of a step, and speed by k"
    if cost["reason"] is not None:
        return Section(title, (f"No law of cost: {cost['reason']}.",))
    tables = [_sweep_table(batch) for batch in cost["batches"]]
    lines = [
        f"- {_requests(one['batch'])}: measured best {one['best_measured'] or NOT_MEASURED}; predicted best "
        f"{best_k_text(one['best_k'])}"
        for one in cost["batches"]
    ]
    return Section(title, (_law_table(cost["laws"]), *tables, "\n".join(lines)))


def _sweep_table(batch: dict) -> ReportTable:
    measured = ("Run", "k", "Steps", "Tokens a step", "Step (ms)", "by law", "Error", "Speed-up", "by law", "Error")
    header = (*measured, f"by {batch['longest']} alone", "Error")
    rows = tuple(_sweep_row(run) for run in batch["runs"])
    note = (
        "Steps of decode alone. Speed-up: tokens a second of a request in decode against the run with k = 0; an error "
        "is that of the prediction, of the middle of a range that does not hold what was measured."
    )
    if all(run["k"] for run in batch["runs"]):
        note += " No run without speculation is among them, so no speed-up was measured."
    name = f"cost_at_{batch['batch']}_requests"
    return ReportTable(name, f"{_requests(batch['batch'])} in decode", header, rows, 1, (note,))


def _sweep_row(run: dict) -> tuple[Cell, ...]:
    return (
        text_cell(run["label"]),
        count_cell(run["k"]),
        count_cell(run["steps"]),
        decimal_cell(run["tokens_per_request_step"]),
        decimal_cell(run["step_ms"]),
        _range_cell(run["law_step_ms_low"], run["law_step_ms_high"]),
        _error_cell(run["step_ms"], run["law_step_ms_low"], run["law_step_ms_high"]),
        decimal_cell(run["speedup"]),
        _range_cell(run["law_speedup_low"], run["law_speedup_high"]),
        _error_cell(run["speedup"], run["law_speedup_low"], run["law_speedup_high"]),
        _range_cell(run["alone_speedup_low"], run["alone_speedup_high"]),
        _error_cell(run["speedup"], run["alone_speedup_low"], run["alone_speedup_high"]),
    )


def _error_cell(measured: float | None, low: float | None, high: float | None) -> Cell:
    if measured is None or low is None or high is None:
        return Cell(None, NOT_MEASURED)
    if low < high and low <= measured <= high:
        return Cell(0.0, "in range")
    error = (low + high) / 2 / measured - 1
    return Cell(error, f"{100 * error:+.1f}%")


def _requests(number: int) -> str:
    return f"{count(number)} request{'' if number == 1 else 's'}"


def _range_cell(low: float | None, high: float | None) -> Cell:
    if low is None or high is None:
        return Cell(None, NOT_MEASURED)
    return list_cell((low, high), _range_text(low, high))


def _range_text(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return NOT_MEASURED
    return decimal(low) if decimal(low) == decimal(high) else f"{decimal(low)} to {decimal(high)}"
