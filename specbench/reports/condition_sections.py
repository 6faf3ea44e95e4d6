"""The section of report.md on acceptance by condition, from the `acceptance` block of metrics.json.

Belongs here: that section as text. Does not belong here: buckets and counts (conditions.py).
"""

from __future__ import annotations

from specbench.reports.acceptance_sections import INTERVAL, SMALL_COUNT_NOTE, Intervals, marked
from specbench.reports.cells import (
    count_cell,
    decimal_cell,
    decimal_range_cell,
    percent_cell,
    percent_range_cell,
    slash_joined_cell,
)
from specbench.reports.conditions import condition_path
from specbench.reports.table import Cell, ReportTable, Section, text_cell

_LABELS = {
    "by_turn": "Turn",
    "by_output_position": "Output position",
    "by_prompt_length": "Prompt length",
    "by_cached_fraction": "Cached share of prompt",
    "by_batch_size": "Batch size",
}


def condition_sections(acceptance: dict, intervals: Intervals) -> list[Section]:
    """One table over all conditions; no section where nothing was drafted or seen: those before it say so."""
    has_turns = len(acceptance["by_turn"]) > 1
    labels = {name: label for name, label in _LABELS.items() if name != "by_turn" or has_turns}
    rows = tuple(
        _row(label, bucket, intervals, condition_path(name, place))
        for name, label in labels.items()
        for place, bucket in enumerate(acceptance[name])
    )
    if not rows:
        return []
    header = (
        *("Condition", "Bucket", "Requests", "Drafts", "Rate", INTERVAL, "Length", INTERVAL, "Position 0", INTERVAL),
        "Per-position (%)",
    )
    note = (
        "Output position is that of the first token of a step, batch size the requests of the engine's step. Buckets "
        "hold different requests, so a trend may be theirs; empty buckets are left out. " + SMALL_COUNT_NOTE
    )
    title = "Acceptance by condition"
    return [Section(title, (ReportTable("acceptance_by_condition", title, header, rows, 2, (note,)),))]


def _row(label: str, bucket: dict, intervals: Intervals, path: str) -> tuple[Cell, ...]:
    drafts = bucket["drafts"]
    return (
        text_cell(label),
        text_cell(bucket["bucket"]),
        count_cell(bucket["requests"]),
        count_cell(drafts),
        marked(percent_cell(bucket["acceptance_rate"]), drafts),
        percent_range_cell(intervals.get(f"{path}.acceptance_rate")),
        marked(decimal_cell(bucket["acceptance_length"]), drafts),
        decimal_range_cell(intervals.get(f"{path}.acceptance_length")),
        marked(percent_cell(bucket["per_position"][0]), drafts),
        percent_range_cell(intervals.get(f"{path}.per_position[0]")),
        slash_joined_cell(bucket["per_position"]),
    )
