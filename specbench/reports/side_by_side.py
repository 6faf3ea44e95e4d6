"""Tables with one column a run, in the shape that pull requests use; of a single run too.

Belongs here: rows and cells of those tables. Does not belong here: tests (changes.py), sentences around a table.

A cell of a run is its own figure whatever the comparison; a difference is written behind the runs, one column for each
new run, from unrounded values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specbench.reports.acceptance import ratio
from specbench.reports.acceptance_sections import previous_rows
from specbench.reports.cells import list_cell
from specbench.reports.changes import Change, PairChanges, bucket_figure, category_figure
from specbench.reports.compared_run import ComparedRun
from specbench.reports.figures import (
    ACCEPTANCE_LENGTH,
    ACCEPTANCE_RATE,
    ACCURACY,
    NO_POSITION,
    OUTPUT_THROUGHPUT,
    Figure,
    as_percent,
    benchmark_figures,
    grouped,
    hundredths,
    latency_figures,
    tenths,
    whole,
)
from specbench.reports.number_format import NOT_MEASURED, slash_joined
from specbench.reports.sample_sums import BELOW_K
from specbench.reports.table import Cell, ReportTable, label_cell, text_cell

#: A 99th percentile of fewer requests than this is marked.
MIN_REQUESTS_OF_P99 = 100

_CHECK_NAMES = {
    "identical": "identical",
    "near_ties": "near ties",
    "mismatch": "MISMATCH",
    "not_checked": "not checked",
    "not_applicable": "not applicable",
}
#: Which count of requests stands behind a status.
_CHECK_COUNTS = {"identical": "identical", "near_ties": "near_ties", "mismatch": "mismatches"}


def benchmark_table(runs: Sequence[ComparedRun], changes: Sequence[PairChanges] = ()) -> ReportTable:
    """Speed under the output check that vouches for it, drafts, positions. `changes` are those of runs[1:]."""
    most = max(run.num_speculative_tokens for run in runs)
    figures = benchmark_figures(most)
    rows = [_check_row(runs, changes), *(_row(figure, runs, changes) for figure in figures), *_load_rows(runs, changes)]
    return ReportTable(
        name="benchmark",
        title="Benchmark",
        header=_header("Metric", runs, changes),
        rows=tuple(rows),
        notes=_p99_notes(runs),
    )


#: A dimension of accuracy with more values is shown where there is room for all.
MOST_VALUES_SHOWN_FIRST = 4


def pull_request_table(
    runs: Sequence[ComparedRun], changes: Sequence[PairChanges] = (), *, has_joined_positions: bool
) -> ReportTable:
    """Requests and accuracy above the benchmark's rows; positions in one row where there is no room for one each."""
    most = max(run.num_speculative_tokens for run in runs)
    rows = [_text_row("Successful / failed requests", runs, changes, _request_cell)]
    if any(run.metrics["eval"]["total"] is not None for run in runs):
        rows.append(_own_row(ACCURACY, _accuracy_label(runs), runs, changes, _accuracy_cell))
        rows += _dimension_rows(runs, changes, first_only=True)
    rows.append(_check_row(runs, changes))
    rows += [_row(figure, runs, changes) for figure in benchmark_figures(0 if has_joined_positions else most)]
    rows += _load_rows(runs, changes)
    if has_joined_positions and most:
        rows.append(_text_row("Per-position acceptance (%)", runs, changes, _joined_positions))
    header = _header("Metric", runs, changes)
    return ReportTable("pull_request", "Benchmark", header, tuple(rows), notes=_p99_notes(runs))


def evaluation_table(runs: Sequence[ComparedRun], changes: Sequence[PairChanges] = ()) -> ReportTable:
    """Requests, accuracy over all and by category, drafts, cache, then the mean speed of the same requests."""
    rows = [
        _text_row("Successful / failed requests", runs, changes, _request_cell),
        _own_row(ACCURACY, _accuracy_label(runs), runs, changes, _accuracy_cell),
        *_dimension_rows(runs, changes),
        _own_row(ACCEPTANCE_RATE, "Acceptance rate", runs, changes, _percent_cell),
        _row(ACCEPTANCE_LENGTH, runs, changes),
        _text_row("Per-position acceptance (%)", runs, changes, _joined_positions),
        _text_row("Prefix cache hit rate", runs, changes, _cache_cell),
        *(
            _own_row(figure, label, runs, changes, _unit_cell(figure, unit, form))
            for label, figure, unit, form in _MEANS
        ),
    ]
    return ReportTable("evaluation", "Evaluation", _header("Metric", runs, changes), tuple(rows))


def latency_table(runs: Sequence[ComparedRun], changes: Sequence[PairChanges] = ()) -> ReportTable:
    """Mean, median, p90 and p99 of every latency."""
    rows = tuple(_row(figure, runs, changes) for figure in latency_figures())
    return ReportTable("latency", "Latency in full", _header("Metric", runs, changes), rows, notes=_p99_notes(runs))


def bucket_table(runs: Sequence[ComparedRun], changes: Sequence[PairChanges] = ()) -> ReportTable | None:
    """Drafts and position 0 given what the request's previous step accepted; None where no run drafted."""
    drafting = [run for run in runs if run.is_drafted]
    if not drafting:
        return None
    buckets = [_buckets(run) for run in runs]
    columns = [name for run in runs for name in (f"{run.label}: drafts", f"{run.label}: position 0 (%)")]
    rows = [
        (
            text_cell(label),
            *(cell for one in buckets for cell in _bucket_cells(one.get(label))),
            *_bucket_changes(label, buckets, changes),
        )
        for label in _bucket_labels(drafting)
        if any(label in one for one in buckets)
    ]
    return ReportTable(
        name="given_previous",
        title="Position 0 given the previous step",
        header=("Accepted by the previous step", *columns, *_delta_names(runs, changes)),
        rows=tuple(rows),
        notes=('"All with a previous step" takes the drafts whose request\'s previous step drafted too.',),
    )


def conditional_table(runs: Sequence[ComparedRun]) -> ReportTable | None:
    """Each position given that the one before was accepted: over all drafts, and behind a step accepted whole."""
    drafting = [run for run in runs if run.is_drafted]
    if not drafting:
        return None
    most = max(run.num_speculative_tokens for run in drafting)
    rows = []
    for run in drafting:
        acceptance, k = run.metrics["acceptance"], run.num_speculative_tokens
        behind_whole = next(bucket for bucket in acceptance["by_previous"] if bucket["previous"] == k)
        for label, bucket in (
            (f"{run.label}, all drafts", acceptance),
            (f"{run.label}, after {k} accepted", behind_whole),
        ):
            rates = bucket["per_position_conditional"]
            drafts = bucket["drafts"]
            rows.append((text_cell(label), Cell(drafts, grouped(drafts)), *(_rate_cell(rates, i) for i in range(most))))
    header = ("Given the previous position (%)", "Drafts", *(f"Pos {position}" for position in range(most)))
    return ReportTable("given_previous_position", "Positions given the previous position", header, tuple(rows))


def category_table(runs: Sequence[ComparedRun], changes: Sequence[PairChanges] = ()) -> ReportTable | None:
    """Acceptance length and rate by category; None where no run has categories."""
    by_run = [run.metrics["acceptance"]["by_category"] for run in runs]
    names = list(dict.fromkeys(name for one in by_run for name in one))
    if not names:
        return None
    rows = [
        (
            text_cell(name),
            *(cell for one in by_run for cell in _category_cells(one.get(name))),
            *_category_changes(name, by_run, changes),
        )
        for name in names
    ]
    columns = [name for run in runs for name in (f"{run.label}: drafts", f"{run.label}: length")]
    header = ("Category", *columns, *_delta_names(runs, changes))
    return ReportTable("categories", "Acceptance length by category", header, tuple(rows))


def change_text(change: Change) -> str:
    """The difference, and better or worse where a test says so; the ground where it is void."""
    if change.void:
        return "void"
    text = change.figure.change_text(change.change)
    return f"{text} ({change.verdict})" if change.verdict in ("better", "worse") else text


def check_text(run: ComparedRun) -> str:
    """The output check in few words, and how many requests are so: `near ties (2 of 32)`, the others identical."""
    check = run.metrics["checks"]["output"]
    name, counted = _CHECK_NAMES[check["status"]], _CHECK_COUNTS.get(check["status"])
    return name if counted is None or not check["compared"] else f"{name} ({check[counted]} of {check['compared']})"


def _header(first: str, runs: Sequence[ComparedRun], changes: Sequence[PairChanges]) -> tuple[str, ...]:
    return (first, *(run.label for run in runs), *_delta_names(runs, changes))


def _delta_names(runs: Sequence[ComparedRun], changes: Sequence[PairChanges]) -> list[str]:
    """One new run needs no name beside its Δ."""
    return ["Δ"] if len(changes) == 1 else [f"Δ {run.label}" for run in runs[1 : 1 + len(changes)]]


def _row(figure: Figure, runs: Sequence[ComparedRun], changes: Sequence[PairChanges]) -> tuple[Cell, ...]:
    return _own_row(figure, figure.label, runs, changes, lambda run: _figure_cell(figure, run))


def _own_row(
    figure: Figure,
    label: str,
    runs: Sequence[ComparedRun],
    changes: Sequence[PairChanges],
    cell_of: Callable[[ComparedRun], Cell],
) -> tuple[Cell, ...]:
    """A row whose difference is that of `figure`, with cells of its own."""
    return (
        label_cell(label),
        *(cell_of(run) for run in runs),
        *_figure_changes(figure, runs, changes),
    )


def _figure_changes(figure: Figure, runs: Sequence[ComparedRun], changes: Sequence[PairChanges]) -> list[Cell]:
    base, *others = (figure.value(run.metrics) for run in runs)
    return [_change_cell(pair.of(figure, base, value)) for pair, value in zip(changes, others, strict=False)]


def _text_row(
    label: str, runs: Sequence[ComparedRun], changes: Sequence[PairChanges], cell_of: Callable[[ComparedRun], Cell]
) -> tuple[Cell, ...]:
    """A row of which no difference is taken."""
    return (label_cell(label), *(cell_of(run) for run in runs), *(Cell(None, "") for _ in changes))


def _load_rows(runs: Sequence[ComparedRun], changes: Sequence[PairChanges]) -> list[tuple[Cell, ...]]:
    """Where any run has an SLO or a timetable."""
    rows = []
    if any(run.metrics["load"]["goodput"]["total"] is not None for run in runs):
        rows.append(_text_row("Goodput (req/s)", runs, changes, _goodput_cell))
    if any(run.metrics["load"]["client_queue_ms"]["n"] for run in runs):
        rows.append(_text_row("Mean client queueing (ms)", runs, changes, _client_queue_cell))
    return rows


def _goodput_cell(run: ComparedRun) -> Cell:
    """With the share of requests; two runs may have been given different SLOs, which are among their settings."""
    goodput = run.metrics["load"]["goodput"]
    rate = goodput["request_per_s"]
    if rate is None:
        return Cell(None, NOT_MEASURED)
    return Cell(rate, f"{hundredths(rate)} ({as_percent(goodput['share'])}%)")


def _client_queue_cell(run: ComparedRun) -> Cell:
    mean_ms = run.metrics["load"]["client_queue_ms"]["mean"]
    return Cell(mean_ms, NOT_MEASURED if mean_ms is None else hundredths(mean_ms))


def _change_cell(change: Change) -> Cell:
    return Cell(change.change, change_text(change))


def _figure_cell(figure: Figure, run: ComparedRun) -> Cell:
    cell = figure.cell(run.metrics)
    if figure.path.endswith(".p99") and cell.value is not None and _is_p99_marked(run):
        return Cell(cell.value, cell.text + "*")
    return cell


def _is_p99_marked(run: ComparedRun) -> bool:
    return 0 < run.metrics["requests"]["completed"] < MIN_REQUESTS_OF_P99


def _p99_notes(runs: Sequence[ComparedRun]) -> tuple[str, ...]:
    if not any(_is_p99_marked(run) for run in runs):
        return ()
    return (f"\\* of fewer than {MIN_REQUESTS_OF_P99} requests: little more than the largest value.",)


def _check_row(runs: Sequence[ComparedRun], changes: Sequence[PairChanges]) -> tuple[Cell, ...]:
    return _text_row(
        "Output check", runs, changes, lambda run: Cell(run.metrics["checks"]["output"]["status"], check_text(run))
    )


# ---- Cells of the evaluation


def _request_cell(run: ComparedRun) -> Cell:
    requests = run.metrics["requests"]
    bad = requests["failed"] + requests["aborted"]
    return list_cell((requests["completed"], bad), f"{requests['completed']} / {bad}")


def _accuracy_label(runs: Sequence[ComparedRun]) -> str:
    scorers = dict.fromkeys(run.metrics["eval"]["scorer"] or "none" for run in runs)
    return f"Accuracy (scorer {', '.join(scorers)})"


def _accuracy_cell(run: ComparedRun) -> Cell:
    return _share_cell(run.metrics["eval"])


def _share_cell(entry: dict | None) -> Cell:
    """`95.45% (1259/1319)`"""
    if entry is None or entry["total"] is None:
        return Cell(None, NOT_MEASURED)
    correct = entry["correct"] if isinstance(entry["correct"], int) else f"{entry['correct']:.2f}"
    return Cell(entry["accuracy"], f"{100 * entry['accuracy']:.2f}% ({correct}/{entry['total']})")


def _dimension_rows(
    runs: Sequence[ComparedRun], changes: Sequence[PairChanges], *, first_only: bool = False
) -> list[tuple[Cell, ...]]:
    """Accuracy of each value of each dimension; where there is little room, of the first, if it has few."""
    by_run = [run.metrics["eval"]["by"] for run in runs]
    names = dict.fromkeys((dimension, value) for one in by_run for dimension in one for value in one[dimension])
    if first_only:
        first = next((dimension for dimension, _ in names), None)
        names = dict.fromkeys(name for name in names if name[0] == first)
        if len(names) > MOST_VALUES_SHOWN_FIRST:
            return []
    return [
        (
            text_cell(f"{dimension.replace('_', '-').capitalize()} {value}"),
            *(_share_cell(one.get(dimension, {}).get(value)) for one in by_run),
            *(Cell(None, "") for _ in changes),
        )
        for dimension, value in names
    ]


def _percent_cell(run: ComparedRun) -> Cell:
    rate = run.metrics["acceptance"]["acceptance_rate"]
    return Cell(rate, NOT_MEASURED if rate is None else f"{as_percent(rate)}%")


def _joined_positions(run: ComparedRun) -> Cell:
    rates = run.metrics["acceptance"]["per_position"]
    return list_cell(rates, slash_joined(rates)) if rates else Cell(None, NO_POSITION)


def _cache_cell(run: ComparedRun) -> Cell:
    """A dash where the run had no prefix cache."""
    cache = run.metrics["cache"]
    if cache["hit_rate"] is None:
        return Cell(None, NO_POSITION if cache["query_tokens"] is None else NOT_MEASURED)
    tokens = f"{cache['hit_tokens']:,} / {cache['query_tokens']:,} tokens"
    return Cell(cache["hit_rate"], f"{as_percent(cache['hit_rate'])}% ({tokens})")


def _latency_mean(path: str) -> Figure:
    return next(figure for figure in latency_figures() if figure.path == path)


_MEANS = (
    ("Mean TTFT", _latency_mean("latency.ttft_ms.mean"), "ms", whole),
    ("Mean TPOT", _latency_mean("latency.tpot_ms.mean"), "ms", tenths),
    ("Output throughput", OUTPUT_THROUGHPUT, "tok/s", tenths),
    ("Benchmark duration", benchmark_figures(0)[0], "s", tenths),
)


def _unit_cell(figure: Figure, unit: str, form: Callable[[float], str]) -> Callable[[ComparedRun], Cell]:
    def cell(run: ComparedRun) -> Cell:
        value = figure.value(run.metrics)
        return Cell(value, NOT_MEASURED if value is None else f"{form(value)} {unit}")

    return cell


# ---- Cells of buckets, positions and categories

_BELOW, _WHOLE = "fewer than k", "k (all of them)"
_WITH_PREVIOUS, _NO_PREVIOUS, _NOTHING_DRAFTED, _ALL = (
    "all with a previous step",
    "no previous step",
    "nothing drafted by it",
    "all",
)


def _buckets(run: ComparedRun) -> dict[str, dict]:
    """Label -> bucket, the totals among them; empty where nothing was drafted."""
    acceptance, k = run.metrics["acceptance"], run.num_speculative_tokens
    if not run.is_drafted:
        return {}
    totals = dict(previous_rows(acceptance))
    by_count = {str(one["previous"]): one for one in acceptance["by_previous"] if one["previous"] in range(k + 1)}
    below = by_count["0"] if k == 1 else totals[f"0 to {k - 1} together"]
    kept = {label: totals[label] for label in (_WITH_PREVIOUS, _NO_PREVIOUS, _NOTHING_DRAFTED, _ALL) if label in totals}
    return {**by_count, _BELOW: below, _WHOLE: by_count[str(k)], **kept}


def _bucket_labels(drafting: Sequence[ComparedRun]) -> list[str]:
    """In the order of rows. Where all runs have one k, its own row stands for "all of them"."""
    ks = {run.num_speculative_tokens for run in drafting}
    counts = [str(accepted) for accepted in range(max(ks) + 1)]
    totals = [_BELOW, _WHOLE] if len(ks) > 1 else [_BELOW] if max(ks) > 1 else []
    return [*counts, *totals, _WITH_PREVIOUS, _NO_PREVIOUS, _NOTHING_DRAFTED, _ALL]


def _bucket_changes(label: str, buckets: Sequence[dict[str, dict]], changes: Sequence[PairChanges]) -> list[Cell]:
    """A count of accepted drafts short of all, above 0, is another class of steps where k is another."""
    path = BELOW_K if label == _BELOW else f"acceptance.by_previous[{2 + int(label)}]" if label.isdigit() else label
    rates = [_position_0(one.get(label)) for one in buckets]
    cells = []
    for pair, rate in zip(changes, rates[1:], strict=True):
        is_same_class = pair.equal_k or label == "0" or not label.isdigit()
        change = pair.of(bucket_figure(path, label), rates[0], rate)
        cells.append(_change_cell(change) if is_same_class else Cell(None, NO_POSITION))
    return cells


def _bucket_cells(bucket: dict | None) -> tuple[Cell, Cell]:
    """Drafts, and the share of them accepted at position 0."""
    if bucket is None:
        return Cell(None, NO_POSITION), Cell(None, NO_POSITION)
    drafts, rate = bucket["drafts"], _position_0(bucket)
    return Cell(drafts, grouped(drafts)), Cell(rate, NOT_MEASURED if rate is None else as_percent(rate))


def _category_changes(name: str, by_run: Sequence[dict], changes: Sequence[PairChanges]) -> list[Cell]:
    lengths = [one[name]["acceptance_length"] if name in one else None for one in by_run]
    figure = category_figure(name)
    return [
        _change_cell(pair.of(figure, lengths[0], length)) for pair, length in zip(changes, lengths[1:], strict=True)
    ]


def _position_0(bucket: dict | None) -> float | None:
    return None if bucket is None else ratio(bucket["accepted_at_position"][0], bucket["drafts"])


def _rate_cell(rates: Sequence[float | None], position: int) -> Cell:
    """A dash behind the run's last position."""
    if position >= len(rates):
        return Cell(None, NO_POSITION)
    rate = rates[position]
    return Cell(rate, NOT_MEASURED if rate is None else as_percent(rate))


def _category_cells(entry: dict | None) -> tuple[Cell, Cell]:
    if entry is None:
        return Cell(None, NOT_MEASURED), Cell(None, NOT_MEASURED)
    length = entry["acceptance_length"]
    return (
        Cell(entry["drafts"], grouped(entry["drafts"])),
        Cell(length, NOT_MEASURED if length is None else hundredths(length)),
    )
