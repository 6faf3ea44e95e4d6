"""The sections of report.md that speak of drafts: acceptance, positions, previous step, histogram, categories.

Belongs here: those sections as text, from the `acceptance` block of metrics.json. Does not belong here: formulas.
"""

from __future__ import annotations

from specbench.reports.acceptance import ratio
from specbench.reports.markdown_table import markdown_table
from specbench.reports.number_format import NOT_MEASURED, count, decimal, percent, percent_of, slash_joined

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


def acceptance_sections(acceptance: dict) -> list[str]:
    """Headed sections in the order of the report. Categories come only where requests have one."""
    titles = TITLES if acceptance["by_category"] else TITLES[:-1]
    if not acceptance["drafts"]:
        reason = "speculation was off" if acceptance["drafts"] is None else "no step of this run had drafts"
        return [f"## {title}\n\nNothing was drafted: {reason}." for title in titles]
    bodies = (_pooled, _by_position, _by_previous, _histogram, _by_category)
    return [f"## {title}\n\n{body(acceptance)}" for title, body in zip(titles, bodies, strict=False)]


def _pooled(acceptance: dict) -> str:
    rows = [
        ("Speculative tokens (k)", count(acceptance["num_speculative_tokens"])),
        ("Acceptance rate", percent(acceptance["acceptance_rate"])),
        ("Acceptance length", decimal(acceptance["acceptance_length"])),
        ("Acceptance length, mean of requests", decimal(acceptance["per_request_mean_length"])),
        ("Drafts", count(acceptance["drafts"])),
        ("Draft tokens", count(acceptance["draft_tokens"])),
        ("Accepted tokens", count(acceptance["accepted_tokens"])),
    ]
    note = (
        "Acceptance rate = accepted / draft tokens; acceptance length = 1 + accepted / drafts, with the bonus token; "
        "a step with nothing drafted is not a draft. Counts are as verified: a draft accepted behind a stop counts, "
        "though its token is discarded."
    )
    return "\n\n".join([markdown_table(("Metric", "Value"), rows), note, _autocorrelation(acceptance)])


def _autocorrelation(acceptance: dict) -> str:
    """Accepted counts of steps `lag` apart in one request, as a table of two rows."""
    pooled, within = acceptance["autocorrelation"], acceptance["autocorrelation_within_request"]
    header = ("Autocorrelation of accepted at lag", *(str(lag + 1) for lag in range(len(pooled))))
    rows = [
        ("pooled", *(decimal(one) for one in pooled)),
        ("request means removed", *(decimal(one) for one in within)),
    ]
    return markdown_table(header, rows)


def _by_position(acceptance: dict) -> str:
    """Unconditional and given the previous position; the joined line is the form that pull requests use."""
    rows = [
        (f"Position {position}", count(accepted), percent(unconditional), percent(conditional))
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
    header = ("Position", "Accepted", "Of all drafts", "Given the previous position")
    return "\n\n".join([markdown_table(header, rows), markdown_table(("Metric", "Value"), joined, num_text_columns=2)])


def _by_previous(acceptance: dict) -> str:
    """The split by what the request's previous step accepted, its totals, then the positions inside each bucket."""
    buckets = previous_rows(acceptance)
    rows = [
        (label, count(bucket["drafts"]), *(marked(one, bucket["drafts"]) for one in _previous_figures(bucket)))
        for label, bucket in buckets
    ]
    header = ("Accepted by the previous step", "Drafts", "Position 0", "Acceptance length")
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
    """(label, bucket): 0..k, those short of k together, the total of the two, buckets without a previous draft, all."""
    k = acceptance["num_speculative_tokens"]
    by_previous = {bucket["previous"]: bucket for bucket in acceptance["by_previous"]}
    after_drafts = [by_previous[previous] for previous in range(k + 1)]
    rows = [(_bucket_label(previous, k), by_previous[previous]) for previous in range(k + 1)]
    if k > 1:
        rows.append((f"0 to {k - 1} together", _merged(after_drafts[:-1])))
    rows.append(("all with a previous step", _merged(after_drafts)))
    others = (("no previous step", by_previous[None]), ("nothing drafted by it", by_previous[-1]))
    rows.extend((label, bucket) for label, bucket in others if bucket["drafts"])
    return [*rows, ("all", acceptance)]


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


def _previous_figures(bucket: dict) -> tuple[str, str]:
    return percent(ratio(bucket["accepted_at_position"][0], bucket["drafts"])), decimal(bucket["acceptance_length"])


def _histogram(acceptance: dict) -> str:
    drafts = acceptance["drafts"]
    rows = [
        (str(accepted), count(steps), percent(ratio(steps, drafts)))
        for accepted, steps in enumerate(acceptance["accepted_histogram"])
    ]
    return markdown_table(("Accepted", "Steps", "Share"), rows)


def _by_category(acceptance: dict) -> str:
    header = ("Category", "Drafts", "Acceptance rate", "Acceptance length", "Per-position acceptance (%)")
    rows = [
        (
            name,
            count(entry["drafts"]),
            percent_of(entry["accepted_tokens"], entry["draft_tokens"]),
            marked(decimal(entry["acceptance_length"]), entry["drafts"]),
            slash_joined(entry["per_position"]),
        )
        for name, entry in acceptance["by_category"].items()
    ]
    return markdown_table(header, rows)
