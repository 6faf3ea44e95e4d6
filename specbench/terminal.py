"""What a run shows at the terminal: progress on stderr, the closing table and the report's path on stdout.

Belongs here: display. Does not belong here: any figure of its own; what progress shows is an estimate, and only the
report is measured. Where stderr is no terminal there is no live display, and panels become plain lines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from specbench.generate import GenerateResult
from specbench.record_columns import step_lists
from specbench.records import EngineStep, RunRecord
from specbench.reports.table import ReportTable
from specbench.reports.terminal_summary import SummaryRow, summary_rows

#: Redrawing takes time from the run: this often and no more.
REFRESH_S = 0.25
ROW_STYLES = {"plain": "", "good": "green", "bad": "bold red"}


def say(line: str) -> None:
    """One plain line on stderr."""
    print(line, file=sys.stderr, flush=True)


def status(line: str) -> None:
    """What is going on, for those who watch: nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        say(line)


def panel(lines: Sequence[str]) -> None:
    """What the reader of any figure must know first."""
    if not lines:
        return
    if sys.stderr.isatty():
        Console(stderr=True).print(Panel("\n".join(lines), border_style="yellow", expand=False, highlight=False))
        return
    for line in lines:
        say(line)


class LiveProgress:
    """Done of total, tokens a second and the running acceptance length, redrawn by the run's own callbacks."""

    def __init__(self, label: str, total: int) -> None:
        self._progress = Progress(
            TextColumn(label),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task(label, total=total, speed="")
        self._started_s = self._drawn_s = time.monotonic()
        self._num_done = self._num_tokens = self._num_drafted_steps = self._num_accepted = 0

    def __enter__(self) -> LiveProgress:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draw()
        self._progress.stop()

    def finished(self, result: GenerateResult) -> None:
        """One request more."""
        self._num_done += 1
        self._num_tokens += result.record.num_output_tokens
        lists = step_lists(result.verify_steps)
        self._num_drafted_steps += sum(num_drafted > 0 for num_drafted in lists["num_drafted"])
        self._num_accepted += sum(lists["num_accepted"])
        self._draw_if_due()

    def stepped(self, step: EngineStep) -> None:
        """One step more: a chance to redraw."""
        self._draw_if_due()

    def _draw_if_due(self) -> None:
        if time.monotonic() - self._drawn_s >= REFRESH_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.monotonic()
        speed = f"{self._num_tokens / max(self._drawn_s - self._started_s, 1e-9):,.0f} tokens/s"
        if self._num_drafted_steps:
            speed += f"  acceptance length {1 + self._num_accepted / self._num_drafted_steps:.2f}"
        self._progress.update(self._task, completed=self._num_done, speed=speed, refresh=True)


def print_closing_table(run: RunRecord, metrics: dict, notices: Iterable[str], files: Iterable[Path]) -> None:
    """The headline figures of one run, the notices that have not been shown yet, and where the rest is."""
    rows = summary_rows(run, metrics)
    if sys.stdout.isatty():
        Console(highlight=False).print(_drawn(rows))
    else:
        for row in rows:
            print(f"{row.label:<33}{row.value}")
    for notice in notices:
        print(f"note: {notice}")
    for path in files:
        print(f"report: {path}")


def _drawn(rows: Iterable[SummaryRow]) -> Table:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(row.label, Text(row.value, style=ROW_STYLES[row.level]), end_section=row.is_section_end)
    return table


def print_table(table: ReportTable) -> None:
    """A table of a report and its notes: tabs between the cells where stdout is no terminal."""
    rows = [[cell.text for cell in row] for row in table.rows]
    if not sys.stdout.isatty():
        for row in (table.header, *rows):
            print("\t".join(row))
    else:
        drawn = Table()
        for column, name in enumerate(table.header):
            drawn.add_column(name, overflow="fold", justify="left" if column < table.num_text_columns else "right")
        for row in rows:
            drawn.add_row(*map(Text, row))
        Console(highlight=False).print(drawn)
    for note in table.notes:
        print(f"note: {note}")
