"""A table keeps what it says unrounded beside how it is written."""

from __future__ import annotations

from specbench.reports.table import Cell, ReportTable, Section, section_markdown, table_markdown, text_cell

TABLE = ReportTable(
    "drafts", "Drafts", ("Metric", "base"), ((text_cell("Rate"), Cell(0.12345, "12.35")),), notes=("Of all drafts.",)
)


def test_a_table_is_written_with_its_notes():
    assert table_markdown(TABLE) == "| Metric |  base |\n| ------ | ----: |\n| Rate   | 12.35 |\n\nOf all drafts."


def test_only_a_section_of_several_tables_names_them():
    assert "**Drafts**" not in section_markdown(Section("Acceptance", ("Words.", TABLE)))
    both = section_markdown(Section("Acceptance", (TABLE, TABLE)))
    assert both.startswith("## Acceptance\n\n**Drafts**\n\n| Metric") and both.count("**Drafts**") == 2


def test_no_text_is_not_measured():
    assert text_cell(None) == Cell(None, "n/a")
