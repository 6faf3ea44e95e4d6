"""The files of a report: formats, places, and that every one comes from the event log to the last digit."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from specbench.errors import UserError
from specbench.reports.html import report_html
from specbench.reports.report_files import ALWAYS, FOLDER_FORMATS, FORMATS, TEXT_FORMATS, export, recompute
from specbench.run_config import ALWAYS_WRITTEN, REPORT_FORMATS
from specbench.run_directory import RunDirectory
from tests.reports.event_logs import make_run, simulate


def make_directory(path, *formats: str) -> RunDirectory:
    directory = RunDirectory.create(path)
    run = make_run(4)
    run.config["report"] = {"name": "default", "formats": list(formats)}
    directory.write_run(run)
    directory.write_tables(simulate(seed=3, num_requests=25))
    return directory


RATE_TERM = "Rate: remaining difference within matched history"
VOID_TAGS = ("meta", "br", "hr", "img")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return recompute(make_directory(tmp_path_factory.mktemp("report") / "run").path)


class Page(HTMLParser):
    """Tags that were opened, and whether each was closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_formats_of_the_configuration_are_those_that_can_be_written():
    assert set(ALWAYS) == set(ALWAYS_WRITTEN) and set(FORMATS) == {*ALWAYS_WRITTEN, *REPORT_FORMATS}
    assert set(TEXT_FORMATS) | set(FOLDER_FORMATS) <= set(FORMATS)


def test_a_report_writes_what_its_run_asks_for(tmp_path):
    plain = make_directory(tmp_path / "plain")
    before = {path.name for path in plain.path.iterdir()}
    recompute(plain.path)
    assert {path.name for path in plain.path.iterdir()} - before == {"metrics.json", "report.md"}
    full = make_directory(tmp_path / "full", "html", "svg", "png")
    recompute(full.path)
    assert (full.path / "report.html").is_file()
    stems = {path.stem for path in (full.path / "plots").glob("*.svg")}
    assert stems == {path.stem for path in (full.path / "plots").glob("*.png")} and len(stems) >= 6


def test_every_file_comes_out_the_same_to_the_last_byte(tmp_path):
    directory = make_directory(tmp_path / "run", "html", "svg")
    recompute(directory.path)
    first = {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()}
    for path in first:
        if path.suffix in (".md", ".json", ".html", ".svg") and path.name != "run.json":
            path.unlink()
    recompute(directory.path)
    assert {path: path.read_bytes() for path in directory.path.rglob("*") if path.is_file()} == first


def test_plots_that_are_no_more_are_removed(tmp_path):
    directory = make_directory(tmp_path / "run", "svg")
    directory.write_file("plots/of_an_earlier_version.svg", "<svg/>")
    directory.write_file("plots/notes.txt", "mine")
    recompute(directory.path)
    assert not (directory.path / "plots" / "of_an_earlier_version.svg").exists()
    assert (directory.path / "plots" / "notes.txt").exists()


def test_the_page_stands_alone_and_holds_every_section_table_and_plot(report):
    page = Page(report.text("html"))
    assert page.open == []
    tags = [tag for tag, _ in page.tags]
    assert tags.count("h2") == len(re.findall(r"^## ", report.markdown, re.MULTILINE))
    assert tags.count("table") == len(re.findall(r"^\|[ :|-]+\|$", report.markdown, re.MULTILINE))
    assert tags.count("svg") == len(report.plots) and not {"script", "link", "img", "iframe"} & set(tags)
    outside = [value for _, attributes in page.tags for value in attributes.values() if value and "//" in value]
    assert [value for value in outside if not value.startswith("http://www.w3.org/")] == []


def test_each_plot_has_a_section_of_its_name(report):
    titles = set(re.findall(r"^## (.*)", report.markdown, re.MULTILINE))
    assert {plot.section for plot in report.plots} <= titles


def test_a_plot_stands_once_where_two_sections_have_its_title(report):
    text = report_html("# T\n\n## Speed\n\nown\n\n# U\n\n## Speed\n\nboth\n", report.plots)
    assert text.count("<svg") == len(report.plots)
    assert text.index("own") < text.index(report.plots[-1].caption) < text.index("both")


def test_what_a_model_said_is_text_not_html():
    text = report_html("# A <b>title</b>\n\n## S\n\n| a |\n| --- |\n| <script>x</script> & |\n", [])
    assert "<script" not in text and "<b>" not in text and "<title>A &lt;b&gt;title&lt;/b&gt;</title>" in text


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_every_format_goes_where_it_is_told(tmp_path, report, form):
    output = tmp_path / "elsewhere" / "out"
    written = export(report, form, output)
    assert written and all(path.is_file() for path in written)
    assert all(path.parent == output for path in written) if form in FOLDER_FORMATS else written == [output]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path, report):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*name another place with -o"):
        export(report, "md", tmp_path / "file" / "report.md")


def test_every_table_of_the_report_is_a_csv_file_of_its_own(tmp_path, report):
    written = export(report, "csv", tmp_path)
    assert len(written) == len(re.findall(r"^\|[ :|-]+\|$", report.markdown, re.MULTILINE)) == len(set(written))
    with (tmp_path / "acceptance_by_position.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    acceptance = report.metrics["acceptance"]
    assert [float(row["Of all drafts"]) for row in rows] == acceptance["per_position"]
    assert [int(row["Accepted"]) for row in rows] == acceptance["accepted_at_position"]
    assert json.loads(rows[0]["95% interval"]) == report.metrics["intervals"]["acceptance.per_position[0]"]


def test_csv_of_a_comparison_holds_numbers_and_lists(tmp_path):
    for seed, name in enumerate(("base", "new")):
        directory = RunDirectory.create(tmp_path / name)
        directory.write_run(make_run(4))
        log = simulate(seed=seed, num_requests=80)
        log.requests = [replace(one, sample_id=f"s{index}") for index, one in enumerate(log.requests)]
        directory.write_tables(log)
    compared = recompute(tmp_path / "new", tmp_path / "base")
    export(compared, "csv", tmp_path / "tables")
    tables = {path.stem: path.read_text() for path in (tmp_path / "tables").glob("*.csv")}
    assert not [name for name, text in tables.items() if "(%)" in text or " pts" in text]
    rows = {name: list(csv.DictReader(io.StringIO(text))) for name, text in tables.items()}

    def row(table: str, label: str) -> dict[str, str]:
        return next(one for one in rows[table] if next(iter(one.values())) == label)

    found = compared.comparison.pairs[0].decomposition
    for term, name in ((found.mix, "Mix: what the drafts follow"), (found.rate, RATE_TERM)):
        assert json.loads(row("comparison_position_0_terms", name)["95% interval"]) == list(term.interval)
    total = rows["comparison_position_0_classes"][-1]
    assert json.loads(total["95% interval"]) == list(found.total.difference.interval)
    rates = compared.metrics["acceptance"]["per_position"]
    assert json.loads(list(row("comparison_evaluation", "Per-position acceptance").values())[2]) == rates


def test_csv_keeps_counts_and_advice_that_the_report_has_in_words(tmp_path, report):
    export(report, "csv", tmp_path)
    with (tmp_path / "acceptance_given_previous_by_position.csv").open(newline="") as file:
        last = list(csv.DictReader(file))[-1]
    reached = report.metrics["acceptance"]["reached_position"]
    assert [int(last[f"Pos {position} drafts"]) for position in range(4)] == reached
    with (tmp_path / "health.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row, check in zip(rows, report.metrics["health"], strict=True):
        assert row["Status"] == check["status"]
        names = ("Name", "Threshold", "Why it matters", "Where to look")
        assert [row[name] for name in names] == [check[key] for key in ("name", "threshold", "why", "where")]
