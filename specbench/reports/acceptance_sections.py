"""The sections of report.md that speak of drafts: acceptance, positions, previous step, histogram, categories.

Belongs here: those sections as text, from the blocks `acceptance` and `intervals` of metrics.json. Does not belong
here: formulas.
"""

from __future__ import annotations

from specbench.reports.acceptance import ratio
from specbench.reports.markdown_table import markdown_table
from specbench.reports.number_format import (
    NOT_MEASURED,
    count,
    decimal,
    decimal_range,
    percent,
    percent_of,
    percent_range,
    slash_joined,
)
from specbench.reports.sample_sums import BELOW_K, WITH_PREVIOUS, category_path

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


def acceptance_sections(acceptance: dict, intervals: Intervals) -> list[str]:
    """Headed sections in the order of the report. Categories come only where requests have one."""
    titles = TITLES if acceptance["by_category"] else TITLES[:-1]
    if not acceptance["drafts"]:
        reason = "speculation was off" if acceptance["drafts"] is None else "no step of this run had drafts"
        return [f"## {title}\n\nNothing was drafted: {reason}." for title in titles]
    bodies = (_pooled, _by_position, _by_previous, _histogram, _by_category)
    return [f"## {title}\n\n{body(acceptance, intervals)}" for title, body in zip(titles, bodies, strict=False)]


def _pooled(acceptance: dict, intervals: Intervals) -> str:
    rate, length, mean_length = (
        intervals.get(f"acceptance.{name}")
        for name in ("acceptance_rate", "acceptance_length", "per_request_mean_length")
    )
    mean_of_requests = decimal(acceptance["per_request_mean_length"])
    rows = [
        ("Speculative tokens (k)", count(acceptance["num_speculative_tokens"]), ""),
        ("Acceptance rate", percent(acceptance["acceptance_rate"]), percent_range(rate)),
        ("Acceptance length", decimal(acceptance["acceptance_length"]), decimal_range(length)),
        ("Acceptance length, mean of requests", mean_of_requests, decimal_range(mean_length)),
        ("Drafts", count(acceptance["drafts"]), ""),
        ("Draft tokens", count(acceptance["draft_tokens"]), ""),
        ("Accepted tokens", count(acceptance["accepted_tokens"]), ""),
    ]
    note = (
        "Acceptance rate = accepted / draft tokens; acceptance length = 1 + accepted / drafts, with the bonus token; "
        "a step with nothing drafted is not a draft. Counts are as verified: a draft accepted behind a stop counts, "
        "though its token is discarded."
    )
    table = markdown_table(("Metric", "Value", INTERVAL), rows)
    return "\n\n".join([table, note, INTERVAL_NOTE, _autocorrelation(acceptance)])


def _autocorrelation(acceptance: dict) -> str:
    """Accepted counts of steps `lag` apart in one request, as a table of two rows."""
    pooled, within = acceptance["autocorrelation"], acceptance["autocorrelation_within_request"]
    header = ("Autocorrelation of accepted at lag", *(str(lag + 1) for lag in range(len(pooled))))
    rows = [
        ("pooled", *(decimal(one) for one in pooled)),
        ("request means removed", *(decimal(one) for one in within)),
    ]
    return markdown_table(header, rows)


def _by_position(acceptance: dict, intervals: Intervals) -> str:
    """Unconditional and given the previous position; the joined line is the form that pull requests use."""
    rows = [
        (
            f"Position {position}",
            count(accepted),
            percent(unconditional),
            percent_range(intervals.get(f"acceptance.per_position[{position}]")),
            percent(conditional),
            percent_range(intervals.get(f"acceptance.per_position_conditional[{position}]")),
        )
        for position, (accepted, unconditional, conditional) in enumerate(
            zip(
                acceptance["accepted_at_position"],
                acceptance["per_position"],
                acceptance["per_position_conditional"],
                strict=True,
            )
        )
    ]
    joined = [
        ("Per-position acceptance (%)", slash_joined(acceptance["per_position"])),
        ("Given the previous position (%)", slash_joined(acceptance["per_position_conditional"])),
    ]
    header = ("Position", "Accepted", "Of all drafts", INTERVAL, "Given the previous position", INTERVAL)
    return "\n\n".join([markdown_table(header, rows), markdown_table(("Metric", "Value"), joined, num_text_columns=2)])


def _by_previous(acceptance: dict, intervals: Intervals) -> str:
    """The split by what the request's previous step accepted, its totals, then the positions inside each bucket."""
    buckets = previous_rows(acceptance)
    rows = [
        (
            label,
            count(bucket["drafts"]),
            marked(_position_0(bucket), bucket["drafts"]),
            percent_range(intervals.get(f"{bucket['path']}.per_position[0]")),
            marked(decimal(bucket["acceptance_length"]), bucket["drafts"]),
        )
        for label, bucket in buckets
    ]
    header = ("Accepted by the previous step", "Drafts", "Position 0", INTERVAL, "Acceptance length")
    note = '"All with a previous step" takes the drafts whose request\'s previous step drafted too.'
    return "\n\n".join([markdown_table(header, rows), note, _heat_map(acceptance, buckets)])


def _heat_map(acceptance: dict, buckets: list[tuple[str, dict]]) -> str:
    """Rate at position i after the previous step accepted j, with the drafts that reached i in parentheses."""
    header = ("Given the previous position", *(f"Pos {i}" for i in range(acceptance["num_speculative_tokens"])))
    rows = [(label, *_reached_cells(bucket)) for label, bucket in buckets]
    note = (
        "In parentheses: the drafts that reached the position. The row of a chain that never broke should be flat or "
        "rising; the other rows start where text is hard, and rise. " + SMALL_COUNT_NOTE
    )
    return f"{markdown_table(header, rows)}\n\n{note}"


def _reached_cells(bucket: dict) -> list[str]:
    pairs = zip(bucket["per_position_conditional"], bucket["reached_position"], strict=True)
    return [
        f"{marked(percent(rate), reached)} ({count(reached)})" if reached else NOT_MEASURED for rate, reached in pairs
    ]


def marked(text: str, drafts: int) -> str:
    """`text` with a mark where few drafts are behind it."""
    return f"{text}*" if drafts < MIN_DRAFTS_UNMARKED else text


def previous_rows(acceptance: dict) -> list[tuple[str, dict]]:
    """(label, bucket): 0..k, those short of k together, the total of the two, buckets without a previous draft, all.

    Each bucket also has the `path` of its figures in `intervals`.
    """
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


def _position_0(bucket: dict) -> str:
    return percent(ratio(bucket["accepted_at_position"][0], bucket["drafts"]))


def _histogram(acceptance: dict, _intervals: Intervals) -> str:
    drafts = acceptance["drafts"]
    rows = [
        (str(accepted), count(steps), percent(ratio(steps, drafts)))
        for accepted, steps in enumerate(acceptance["accepted_histogram"])
    ]
    return markdown_table(("Accepted", "Steps", "Share"), rows)


def _by_category(acceptance: dict, intervals: Intervals) -> str:
    header = (
        "Category",
        "Drafts",
        "Acceptance rate",
        INTERVAL,
        "Acceptance length",
        INTERVAL,
        "Per-position acceptance (%)",
    )
    rows = [
        (
            name,
            count(entry["drafts"]),
            percent_of(entry["accepted_tokens"], entry["draft_tokens"]),
            percent_range(intervals.get(f"{category_path(name)}.acceptance_rate")),
            marked(decimal(entry["acceptance_length"]), entry["drafts"]),
            decimal_range(intervals.get(f"{category_path(name)}.acceptance_length")),
            slash_joined(entry["per_position"]),
        )
        for name, entry in acceptance["by_category"].items()
    ]
    return markdown_table(header, rows)
