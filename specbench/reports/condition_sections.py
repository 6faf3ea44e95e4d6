"""The section of report.md on acceptance by condition, from the `acceptance` block of metrics.json.

Belongs here: that section as text. Does not belong here: buckets and counts (conditions.py).
"""

from __future__ import annotations

from specbench.reports.acceptance_sections import SMALL_COUNT_NOTE, marked
from specbench.reports.markdown_table import markdown_table
from specbench.reports.number_format import count, decimal, percent, slash_joined

_LABELS = {
    "by_output_position": "Output position",
    "by_prompt_length": "Prompt length",
    "by_cached_fraction": "Cached share of prompt",
    "by_batch_size": "Batch size",
}


def condition_section(acceptance: dict) -> str:
    """One table over all conditions. "" where nothing was drafted: the sections before it say so."""
    if not acceptance["drafts"]:
        return ""
    rows = [_row(label, bucket) for name, label in _LABELS.items() for bucket in acceptance[name]]
    header = ("Condition", "Bucket", "Requests", "Drafts", "Rate", "Length", "Position 0", "Per-position (%)")
    note = (
        "Output position is that of the first token of a step, batch size the requests of the engine's step. Buckets "
        "hold different requests, so a trend may be theirs; empty buckets are left out. " + SMALL_COUNT_NOTE
    )
    return "## Acceptance by condition\n\n" + markdown_table(header, rows, num_text_columns=2) + f"\n\n{note}"


def _row(label: str, bucket: dict) -> tuple[str, ...]:
    drafts = bucket["drafts"]
    return (
        label,
        bucket["bucket"],
        count(bucket["requests"]),
        count(drafts),
        marked(percent(bucket["acceptance_rate"]), drafts),
        marked(decimal(bucket["acceptance_length"]), drafts),
        marked(percent(bucket["per_position"][0]), drafts),
        slash_joined(bucket["per_position"]),
    )
