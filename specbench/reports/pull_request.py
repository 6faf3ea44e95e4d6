"""The report as the body of a pull request: a screenful to read, everything else folded away, no images.

Belongs here: what is shown and what is folded, and the limits on both. Does not belong here: tables (side_by_side.py),
sentences (markdown.py, compare_sections.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reports.compare import Comparison
from specbench.reports.compare_sections import (
    comparison_sections,
    comparison_subtitle,
    comparison_title,
    state_lines,
    verdict_lines,
)
from specbench.reports.compared_run import ComparedRun
from specbench.reports.gates import GateResult
from specbench.reports.markdown import model_title, report_sections, run_title, warning_lines
from specbench.reports.number_format import percent_of, percent_range
from specbench.reports.side_by_side import pull_request_table
from specbench.reports.table import ReportTable, Section, section_markdown, table_markdown

#: Lines of markdown outside the fold.
MAX_VISIBLE_LINES = 40
#: What a host of pull requests takes is 65,536; some are left to whoever pastes this below words of their own.
MAX_CHARACTERS = 60_000
_FOLD, _UNFOLD = "<details>\n<summary>{}</summary>", "</details>"


def run_pull_request(run: ComparedRun, gates: Sequence[GateResult] = ()) -> str:
    """Title, command, verdict and one table of one run; below the fold its report."""
    title = f"{model_title(run.record.model)}: {run_title(run.record)}"
    lines = [*_gate_lines(gates), *warning_lines(run.record, run.metrics), *_accuracy_lines(run.metrics["eval"])]
    sections = report_sections(run.record, run.metrics, gates)
    tables = [pull_request_table([run], has_joined_positions=joined) for joined in (False, True)]
    return _body(title, [run], lines, tables, sections)


def comparison_pull_request(comparison: Comparison, gates: Sequence[GateResult] = ()) -> str:
    """Title, commands, verdict and one table with differences; below the fold the comparison."""
    title = f"{comparison_title(comparison)}: {comparison_subtitle(comparison.base)}"
    runs, changes = comparison.runs, comparison.changes
    tables = [pull_request_table(runs, changes, has_joined_positions=joined) for joined in (False, True)]
    states = state_lines(comparison)  # before gates, of which there may be more than fit
    lines = [*states, *_gate_lines(gates), *(line for line in verdict_lines(comparison) if line not in states)]
    return _body(title, runs, lines, tables, comparison_sections(comparison, gates))


def _gate_lines(gates: Sequence[GateResult]) -> list[str]:
    """Gates that did not pass, one a line; one line for all where all did."""
    if gates and all(gate.outcome == "pass" for gate in gates):
        return [f"Gates: all {len(gates)} pass"]
    return [f"**{gate.sentence}**" for gate in gates if gate.outcome != "pass"]


def _accuracy_lines(accuracy: dict) -> list[str]:
    if accuracy["total"] is None:
        return []
    share = percent_of(accuracy["correct"], accuracy["total"])
    return [f"Accuracy: {share} by `{accuracy['scorer']}`, 95% interval {percent_range(accuracy['interval'])}"]


def _body(
    title: str,
    runs: Sequence[ComparedRun],
    lines: list[str],
    tables: Sequence[ReportTable],
    sections: Sequence[Section],
) -> str:
    """`tables` are the same one with ever fewer rows: the first that fits is shown, with as many lines as still fit."""
    head = [f"### {title}", "", "```", *(" ".join(run.record.command.split()) for run in runs), "```", ""]
    fold = _FOLD.format("Full report").splitlines()
    texts = [table_markdown(table).splitlines() for table in tables]
    room = MAX_VISIBLE_LINES - len(head) - len(fold) - 2  # an empty line behind the verdict and one behind the table
    text = next((text for text in texts if len(text) + len(lines) <= room), texts[-1])
    visible = [*head, *_verdict(lines, max(1, room - len(text))), "", *text, ""]
    top = "\n".join([*visible, *fold, "", ""])
    return top + _folded(sections, MAX_CHARACTERS - len(top)) + f"\n\n{_UNFOLD}\n"


def _verdict(lines: list[str], room: int) -> list[str]:
    """At most `room` lines as a list; the last says how many more are below."""
    shown = lines if len(lines) <= room else lines[: room - 1]
    rest = [f"- … and {len(lines) - len(shown)} more below"] if len(shown) < len(lines) else []
    return [*(f"- {line}" for line in shown), *rest]


def _folded(sections: Sequence[Section], max_characters: int) -> str:
    """The sections in their order as far as they fit, and the titles of those that don't."""
    parts: list[str] = []
    left_out: list[str] = []
    for section in sections:
        # What a model wrote may stand in a table: it must not end the fold.
        text = section_markdown(section).replace("</details", "&lt;/details")
        if left_out or sum(map(len, parts)) + len(text) > max_characters - 1000:
            left_out.append(section.title)
        else:
            parts.append(text)
    if left_out:
        parts.append(f"Left out, for a pull request holds no more: {', '.join(left_out)}. They are in report.md.")
    return "\n\n".join(parts)
