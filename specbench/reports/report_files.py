"""The files of one run's report: everything is computed anew from the event log, then written.

Belongs here: which formats there are, what each file is called, where it goes. Does not belong here: figures
(metrics.py), words (markdown.py), looks (plot_style.py, html.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specbench.errors import UserError
from specbench.record_columns import EngineStepColumns
from specbench.records import BASELINE_FOLDER, INTERLEAVED, RunRecord, SampleRecord
from specbench.reports.compare import Comparison, compare
from specbench.reports.compare_sections import comparison_markdown, comparison_sections
from specbench.reports.compared_run import ComparedRun, compared_run, load_run
from specbench.reports.gates import GateResult, judge_comparison, judge_run, parse_gates
from specbench.reports.html import report_html
from specbench.reports.markdown import report_markdown, report_sections
from specbench.reports.metrics import metrics_of
from specbench.reports.plot_style import Plot, png_bytes, svg_text
from specbench.reports.plots import run_plots
from specbench.reports.pull_request import comparison_pull_request, run_pull_request
from specbench.reports.step_columns import StepColumns, step_columns
from specbench.reports.table import table_csv, tables_of
from specbench.run_directory import METRICS_FILE, REPORT_FILE, RunDirectory

HTML_FILE = "report.html"
PULL_REQUEST_FILE = "report_pr.md"
PLOTS_FOLDER = "plots"
TABLES_FOLDER = "tables"


@dataclass(eq=False)
class Report:
    """One run's report in every format, from its records. Plots are drawn once, when they are first asked for."""

    run: RunRecord
    columns: StepColumns
    engine_steps: EngineStepColumns
    samples: Sequence[SampleRecord]
    metrics: dict
    directory: Path
    #: Of the run to compare with.
    baseline: Path | None

    @classmethod
    def of(cls, directory: RunDirectory, baseline: Path | None = None) -> Report:
        """`baseline` stands for the one that the run itself names."""
        run, log = directory.read_run(), directory.read_event_log()
        columns = step_columns(log.requests, log.verify_steps)
        named = run.config.get("report", {}).get("baseline")
        return cls(
            run=run,
            columns=columns,
            engine_steps=EngineStepColumns.of(log.engine_steps),
            samples=log.samples,
            metrics=metrics_of(run, log, columns),
            directory=directory.path,
            baseline=baseline or _named_baseline(named, directory.path),
        )

    @cached_property
    def comparison(self) -> Comparison | None:
        """With the baseline; None without one."""
        base = self._base
        return compare([base, self._compared]) if isinstance(base, ComparedRun) else None

    @cached_property
    def _base(self) -> ComparedRun | str | None:
        """The baseline; why it cannot be read; None where none is named.

        It could be read when this run began. A report must not be lost because it is no longer there.
        """
        if self.baseline is None:
            return None
        try:
            return load_run(self.baseline)
        except UserError as error:
            return str(error)

    @cached_property
    def gates(self) -> list[GateResult]:
        """The run's own gates, judged."""
        gates = parse_gates(self.run.config.get("report", {}).get("gates", ()))
        return judge_run(gates, self._compared) if self.comparison is None else judge_comparison(gates, self.comparison)

    @property
    def compared_runs(self) -> tuple[ComparedRun, ...]:
        """The run, behind its baseline where there is one that can be read."""
        return (self._compared,) if self.comparison is None else self.comparison.runs

    @property
    def _compared(self) -> ComparedRun:
        return compared_run(self.run, self.metrics, self.columns, self.samples, self.engine_steps, str(self.directory))

    @cached_property
    def plots(self) -> list[Plot]:
        return run_plots(self.metrics, self.columns, self.engine_steps)

    @cached_property
    def markdown(self) -> str:
        """The report, and the comparison with the baseline."""
        parts = [report_markdown(self.run, self.metrics, self.gates)]
        if self.comparison is not None:
            parts.append(comparison_markdown(self.comparison))
        elif isinstance(self._base, str):
            parts.append(f"The run to compare with cannot be read: {self._base}\n")
        return "\n".join(parts)

    @property
    def reading_files(self) -> list[Path]:
        """What there is to read in the run's directory, report.md last."""
        written = (*self.run.config.get("report", {}).get("formats", ()), *ALWAYS)
        return [self.directory / name for form, name in READING_FORMATS.items() if form in written]

    @property
    def pull_request(self) -> str:
        """The short form: of the comparison where there is a baseline, else of the run."""
        if self.comparison is not None:
            return comparison_pull_request(self.comparison, self.gates)
        return run_pull_request(self._compared, self.gates)

    def files(self, form: str) -> dict[str, str | bytes]:
        """File name, below a folder where there are several -> content, in one of the FORMATS."""
        return FORMATS[form](self)

    def text(self, form: str) -> str:
        """One of the TEXT_FORMATS."""
        (content,) = self.files(form).values()
        assert isinstance(content, str)
        return content


def _named_baseline(named: str | None, directory: Path) -> Path | None:
    """Where the run lies that report.baseline of the run in `directory` means."""
    if named is None:
        return None
    return directory / BASELINE_FOLDER if named == INTERLEAVED else Path(named)


def _json_files(report: Report) -> dict[str, str | bytes]:
    return {METRICS_FILE: json.dumps(report.metrics, indent=2, ensure_ascii=False, allow_nan=False) + "\n"}


def _csv_files(report: Report) -> dict[str, str | bytes]:
    """A file for each table; those of the comparison with the baseline have it in their names."""
    sections = report_sections(report.run, report.metrics, report.gates)
    named = {table.name: table for table in tables_of(sections)}
    if report.comparison is not None:
        named |= {f"comparison_{table.name}": table for table in tables_of(comparison_sections(report.comparison))}
    return {f"{TABLES_FOLDER}/{name}.csv": table_csv(table) for name, table in named.items()}


def _svg_files(report: Report) -> dict[str, str | bytes]:
    return {f"{PLOTS_FOLDER}/{plot.name}.svg": svg_text(plot) for plot in report.plots}


def _png_files(report: Report) -> dict[str, str | bytes]:
    return {f"{PLOTS_FOLDER}/{plot.name}.png": png_bytes(plot) for plot in report.plots}


#: Format -> its files.
FORMATS: dict[str, Callable[[Report], dict[str, str | bytes]]] = {
    "md": lambda report: {REPORT_FILE: report.markdown},
    "json": _json_files,
    "pr": lambda report: {PULL_REQUEST_FILE: report.pull_request},
    "html": lambda report: {HTML_FILE: report_html(report.markdown, report.plots)},
    "csv": _csv_files,
    "svg": _svg_files,
    "png": _png_files,
}
#: Written with every report.
ALWAYS = ("json", "md")
#: Of one file that reads well on a terminal.
TEXT_FORMATS = ("md", "json", "pr")
#: Of one file that a reader is told of.
READING_FORMATS = {"pr": PULL_REQUEST_FILE, "html": HTML_FILE, "md": REPORT_FILE}
#: Of several files.
FOLDER_FORMATS = ("csv", "svg", "png")


def recompute(run_directory: Path, baseline: Path | None = None) -> Report:
    """The report of a run, anew from its event log alone, written in its directory in the formats that it asks for.

    `baseline` is compared with in place of the run that it names itself.
    """
    directory = RunDirectory.open(run_directory)
    if baseline is not None:
        RunDirectory.open(baseline)
    report = Report.of(directory, baseline)
    for form in dict.fromkeys((*ALWAYS, *report.run.config.get("report", {}).get("formats", ()))):
        write_format(directory, report, form)
    return report


def write_format(directory: RunDirectory, report: Report, form: str) -> list[Path]:
    """Write the files of one format into the run's directory. Those of an earlier report that are no more go."""
    files = report.files(form)
    if form in FOLDER_FORMATS:
        folder = TABLES_FOLDER if form == "csv" else PLOTS_FOLDER
        for path in (directory.path / folder).glob(f"*.{form}"):
            if f"{folder}/{path.name}" not in files:
                path.unlink()
    for name, content in files.items():
        directory.write_file(name, content)
    return [directory.path / name for name in files]


def export(report: Report, form: str, output: Path) -> list[Path]:
    """Write the files of one format to `output`: a folder for FOLDER_FORMATS, else a file."""
    written = []
    for name, content in report.files(form).items():
        path = output / Path(name).name if form in FOLDER_FORMATS else output
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror}); name another place with -o") from error
        written.append(path)
    return written
