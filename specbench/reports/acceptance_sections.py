"""The sections of report.md that speak of drafts: acceptance, positions, previous step, histogram, categories.

Belongs here: those sections as text, from the blocks `acceptance` and `intervals` of metrics.json. Does not belong
here: formulas.
"""

from __future__ import annotations

from collections.abc import Callable

from specbench.reports.acceptance import ratio
from specbench.reports.cells import (
    EMPTY,
    count_cell,
    decimal_cell,
    decimal_range_cell,
    percent_cell,
    percent_of_cell,
    percent_range_cell,
    slash_joined_cell,
)
from specbench.reports.number_format import NOT_MEASURED, count
from specbench.reports.sample_sums import BELOW_K, WITH_PREVIOUS, category_path
from specbench.reports.table import Cell, ReportTable, Section, label_cell, text_cell

TITLES = (
    "Acceptance",
    "Acceptance by position",
    "Acceptance given the previous step",
    "Accepted drafts a step",
    "Acceptance by category",
)

#: A rate of fewer drafts is marked: a single draft moves it by 5 points or more.
MIN_DRAFTS_UNMARKED = 20
SMALL_COUNT_NOTE = f"\\* of fewer than {MIN_DRAFTS_UNMARKED} drafts."

#: Metric path -> [low, high]
Intervals = dict[str, list[float]]
INTERVAL = "95% interval"
INTERVAL_NOTE = (
    "Intervals come from drawing samples anew, all turns and repeats of one together, not adjusted for how many are "
    "printed; n/a where fewer than 20 samples count, or where they show no spread."
)


def acceptance_sections(acceptance: dict, intervals: Intervals) -> list[Section]:
    """The sections in the order of the report. Categories come only where requests have one."""
    titles = TITLES if acceptance["by_category"] else TITLES[:-1]
    if acceptance["acceptance_length"] is None:
        reason = "speculation was off" if acceptance["drafts"] is None else "no step of this run had drafts"
        return [Section(title, (f"Nothing was drafted: {reason}.",)) for title in titles]
    if not acceptance["by_previous"]:
        return _sections_of_sums(acceptance, intervals)
    bodies: tuple[_Body, ...] = (_pooled, _by_position, _by_previous, _histogram, _by_category)
    return [Section(title, body(acceptance, intervals)) for title, body in zip(titles, bodies, strict=False)]


def _sections_of_sums(acceptance: dict, intervals: Intervals) -> list[Section]:
    """As far as a source gives them that counts over all steps, or even only tells a mean."""
    bodies = {"Acceptance": _pooled(acceptance, intervals)}
    if acceptance["accepted_at_position"]:
        bodies["Acceptance by position"] = _by_position(acceptance, intervals)
        bodies["Accepted drafts a step"] = _histogram(acceptance, intervals)
    missing = ("Not measured: it takes each step by itself, or counts of each position.",)
    return [Section(title, bodies.get(title, missing)) for title in TITLES[:-1]]


_Blocks = tuple[str | ReportTable, ...]
_Body = Callable[[dict, Intervals], _Blocks]


def _pooled(acceptance: dict, intervals: Intervals) -> _Blocks:
    rate, length, mean_length = (
        intervals.get(f"acceptance.{name}")
        for name in ("acceptance_rate", "acceptance_length", "per_request_mean_length")
    )
    rows = (
        ("Speculative tokens (k)", count_cell(acceptance["num_speculative_tokens"]), EMPTY),
        ("Acceptance rate", percent_cell(acceptance["acceptance_rate"]), percent_range_cell(rate)),
        ("Acceptance length", decimal_cell(acceptance["acceptance_length"]), decimal_range_cell(length)),
        (
            "Acceptance length, mean of requests",
            decimal_cell(acceptance["per_request_mean_length"]),
            decimal_range_cell(mean_length),
        ),
        ("Drafts", count_cell(acceptance["drafts"]), EMPTY),
        ("Draft tokens", count_cell(acceptance["draft_tokens"]), EMPTY),
        ("Accepted tokens", count_cell(acceptance["accepted_tokens"]), EMPTY),
    )
    notes = (
        "Acceptance rate = accepted / draft tokens; acceptance length = 1 + accepted / drafts, with the bonus token; "
        "a step with nothing drafted is not a draft. Counts are as verified: a draft accepted behind a stop counts, "
        "though its token is discarded.",
        INTERVAL_NOTE,
    )
    table = ReportTable("acceptance", "Over all drafts", ("Metric", "Value", INTERVAL), _labelled(rows), notes=notes)
    return (table, _autocorrelation(acceptance)) if acceptance["autocorrelation"] else (table,)


def _labelled(rows: tuple[tuple, ...]) -> tuple[tuple[Cell, ...], ...]:
    """Rows whose first entry is a text."""
    return tuple((label_cell(row[0]), *row[1:]) for row in rows)


def _autocorrelation(acceptance: dict) -> ReportTable:
    """Accepted counts of steps `lag` apart in one request, as a table of two rows."""
    pooled, within = acceptance["autocorrelation"], acceptance["autocorrelation_within_request"]
    header = ("Autocorrelation of accepted at lag", *(str(lag + 1) for lag in range(len(pooled))))
    rows = (("pooled", *map(decimal_cell, pooled)), ("request means removed", *map(decimal_cell, within)))
    return ReportTable("autocorrelation", "Autocorrelation", header, _labelled(rows))


def _by_position(acceptance: dict, intervals: Intervals) -> _Blocks:
    """Unconditional and given the previous position; the joined line is the form that pull requests use."""
    rows = tuple(
        (
            text_cell(f"Position {position}"),
            count_cell(accepted),
            percent_cell(unconditional),
            percent_range_cell(intervals.get(f"acceptance.per_position[{position}]")),
            percent_cell(conditional),
            percent_range_cell(intervals.get(f"acceptance.per_position_conditional[{position}]")),
        )
        for position, (accepted, unconditional, conditional) in enumerate(
            zip(
                acceptance["accepted_at_position"],
                acceptance["per_position"],
                acceptance["per_position_conditional"],
                strict=True,
            )
        )
    )
    joined = (
        ("Per-position acceptance (%)", slash_joined_cell(acceptance["per_position"])),
        ("Given the previous position (%)", slash_joined_cell(acceptance["per_position_conditional"])),
    )
    header = ("Position", "Accepted", "Of all drafts", INTERVAL, "Given the previous position", INTERVAL)
    return (
        ReportTable("acceptance_by_position", "By position", header, rows),
        ReportTable("acceptance_by_position_joined", "In one line", ("Metric", "Value"), _labelled(joined), 2),
    )


def _by_previous(acceptance: dict, intervals: Intervals) -> _Blocks:
    """The split by what the request's previous step accepted, its totals, then the positions inside each bucket."""
    buckets = previous_rows(acceptance)
    rows = tuple(
        (
            text_cell(label),
            count_cell(bucket["drafts"]),
            marked(percent_cell(_position_0(bucket)), bucket["drafts"]),
            percent_range_cell(intervals.get(f"{bucket['path']}.per_position[0]")),
            marked(decimal_cell(bucket["acceptance_length"]), bucket["drafts"]),
        )
        for label, bucket in buckets
    )
    header = ("Accepted by the previous step", "Drafts", "Position 0", INTERVAL, "Acceptance length")
    note = '"All with a previous step" takes the drafts whose request\'s previous step drafted too.'
    title = "Position 0 and length"
    return (
        ReportTable("acceptance_given_previous", title, header, rows, notes=(note,)),
        _heat_map(acceptance, buckets),
    )


def _heat_map(acceptance: dict, buckets: list[tuple[str, dict]]) -> ReportTable:
    """Rate at position i after the previous step accepted j, with the drafts that reached i in parentheses."""
    header = ("Given the previous position", *(f"Pos {i}" for i in range(acceptance["num_speculative_tokens"])))
    rows = tuple((text_cell(label), *_reached_cells(bucket)) for label, bucket in buckets)
    note = (
        "In parentheses: the drafts that reached the position. The row of a chain that never broke should be flat or "
        "rising; the other rows start where text is hard, and rise. " + SMALL_COUNT_NOTE
    )
    title = "Every position given the one before it"
    reached = tuple(
        (f"Pos {i} drafts", tuple(bucket["reached_position"][i] for _, bucket in buckets))
        for i in range(acceptance["num_speculative_tokens"])
    )
    name = "acceptance_given_previous_by_position"
    return ReportTable(name, title, header, rows, notes=(note,), file_columns=reached)


def _reached_cells(bucket: dict) -> list[Cell]:
    pairs = zip(bucket["per_position_conditional"], bucket["reached_position"], strict=True)
    return [
        Cell(rate, f"{marked(percent_cell(rate), reached).text} ({count(reached)})" if reached else NOT_MEASURED)
        for rate, reached in pairs
    ]


def marked(cell: Cell, drafts: int) -> Cell:
    """`cell` with a mark where few drafts are behind it."""
    return Cell(cell.value, f"{cell.text}*") if drafts < MIN_DRAFTS_UNMARKED else cell


def previous_rows(acceptance: dict) -> list[tuple[str, dict]]:
    """(label, bucket): 0..k, those short of k together, the total of the two, buckets without a previous draft, all.

    Each bucket also has the `path` of its figures in `intervals`.
    """
    if not acceptance["by_previous"]:
        return [("all", acceptance | {"path": "acceptance"})]
    k = acceptance["num_speculative_tokens"]
    by_previous = {
        bucket["previous"]: bucket | {"path": f"acceptance.by_previous[{index}]"}
        for index, bucket in enumerate(acceptance["by_previous"])
    }
    after_drafts = [by_previous[previous] for previous in range(k + 1)]
    rows = [(_bucket_label(previous, k), by_previous[previous]) for previous in range(k + 1)]
    if k > 1:
        rows.append((f"0 to {k - 1} together", _merged(after_drafts[:-1]) | {"path": BELOW_K}))
    rows.append(("all with a previous step", _merged(after_drafts) | {"path": WITH_PREVIOUS}))
    others = (("no previous step", by_previous[None]), ("nothing drafted by it", by_previous[-1]))
    rows.extend((label, bucket) for label, bucket in others if bucket["drafts"])
    return [*rows, ("all", acceptance | {"path": "acceptance"})]


def _bucket_label(previous: int, k: int) -> str:
    if previous == 0:
        return "0 (draft rejected)"
    if previous == k:
        return f"{k} (draft accepted)" if k == 1 else f"{k} (chain never broke)"
    return str(previous)


def _merged(buckets: list[dict]) -> dict:
    """Buckets as one: counts are added, then divided."""
    drafts = sum(bucket["drafts"] for bucket in buckets)
    accepted, reached = (
        [sum(counts) for counts in zip(*(bucket[name] for bucket in buckets), strict=True)]
        for name in ("accepted_at_position", "reached_position")
    )
    mean = ratio(sum(accepted), drafts)
    return {
        "drafts": drafts,
        "acceptance_length": None if mean is None else 1 + mean,
        "accepted_at_position": accepted,
        "reached_position": reached,
        "per_position_conditional": [ratio(*pair) for pair in zip(accepted, reached, strict=True)],
    }


def _position_0(bucket: dict) -> float | None:
    return ratio(bucket["accepted_at_position"][0], bucket["drafts"])


def _histogram(acceptance: dict, _intervals: Intervals) -> _Blocks:
    drafts = acceptance["drafts"]
    rows = tuple(
        (text_cell(str(accepted)), count_cell(steps), percent_cell(ratio(steps, drafts)))
        for accepted, steps in enumerate(acceptance["accepted_histogram"])
    )
    title = "Steps by accepted drafts"
    return (ReportTable("accepted_histogram", title, ("Accepted", "Steps", "Share"), rows),)


def _by_category(acceptance: dict, intervals: Intervals) -> _Blocks:
    header = (
        "Category",
        "Drafts",
        "Acceptance rate",
        INTERVAL,
        "Acceptance length",
        INTERVAL,
        "Per-position acceptance (%)",
    )
    rows = tuple(
        (
            text_cell(name),
            count_cell(entry["drafts"]),
            percent_of_cell(entry["accepted_tokens"], entry["draft_tokens"]),
            percent_range_cell(intervals.get(f"{category_path(name)}.acceptance_rate")),
            marked(decimal_cell(entry["acceptance_length"]), entry["drafts"]),
            decimal_range_cell(intervals.get(f"{category_path(name)}.acceptance_length")),
            slash_joined_cell(entry["per_position"]),
        )
        for name, entry in acceptance["by_category"].items()
    )
    return (ReportTable("acceptance_by_category", "By category", header, rows),)
