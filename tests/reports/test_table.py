"""A table keeps what it says unrounded beside how it is written."""

from __future__ import annotations

from specbench.reports.cells import points_range_cell
from specbench.reports.table import (
    Cell,
    ReportTable,
    Section,
    label_cell,
    section_markdown,
    table_csv,
    table_markdown,
    tables_of,
    text_cell,
)

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


def test_csv_has_unrounded_values_and_no_two_columns_of_one_name():
    rows = (
        (text_cell('a, "b"'), Cell(1 / 3, "33.33%"), Cell(None, "n/a")),
        (text_cell("c"), Cell(7, "7*"), text_cell("x")),
    )
    table = ReportTable("t", "T", ("Name", "Rate", "Rate"), rows)
    assert table_csv(table) == f'Name,Rate,Rate (2)\n"a, ""b""",{1 / 3!r},\nc,7,x\n'


def test_tables_come_in_the_order_of_their_sections():
    other = ReportTable("other", "Other", ("A",), ())
    assert tables_of([Section("S", ("text", TABLE)), Section("R", (other,))]) == [TABLE, other]


def test_csv_names_fractions_and_has_columns_of_its_own():
    table = ReportTable(
        "t",
        "T",
        ("Metric", "base: position 0 (%)", "Interval"),
        ((label_cell("Acceptance rate (%)"), Cell(0.5, "50.00"), points_range_cell((-0.1, 0.25))),),
        file_columns=(("Pos 0 drafts", (12,)),),
    )
    assert (
        table_markdown(table).splitlines()[2] == "| Acceptance rate (%) |                50.00 | -10.00 to +25.00 pts |"
    )
    assert table_csv(table) == (
        'Metric,base: position 0,Interval,Pos 0 drafts\nAcceptance rate,0.5,"[-0.1, 0.25]",12\n'
    )
