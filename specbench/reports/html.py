"""A markdown report as one HTML page that needs nothing else: no network, no script, no file beside it.

Belongs here: the page around a report, and plots put into its sections. Does not belong here: what a report says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from specbench.reports.plot_style import Plot, svg_text

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --line: #d1d9e0; --shade: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --line: #3d444d; --shade: #151b23; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; }
h2 { font-size: 1.3rem; margin-top: 2.5rem; padding-bottom: .2rem; border-bottom: 1px solid var(--line); }
code, pre { font: .9em ui-monospace, monospace; background: var(--shade); border-radius: 4px; padding: .1em .3em; }
pre { overflow-x: auto; padding: .7em; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border: 1px solid var(--line); vertical-align: top; text-align: left;
  white-space: nowrap; }
th { background: var(--shade); }
td.long { white-space: normal; min-width: 16rem; max-width: 42rem; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; }
figure svg { max-width: 100%; height: auto; }
figcaption { font-size: .85rem; opacity: .8; }
@media print { .table { overflow-x: visible; } h2 { break-after: avoid; } figure, table { break-inside: avoid; } }
"""
#: Cells with more characters than this may be broken into lines.
_LONG_CELL = 60


def report_html(markdown: str, plots: Sequence[Plot]) -> str:
    """The page. Each plot stands at the end of the section that it names; plots of no section come last."""
    sections = re.split(r"^(?=## )", markdown, flags=re.MULTILINE)
    titles = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    body = []
    for place, section in enumerate(sections):
        body.append(_html(section))
        # A report that goes on with a comparison has sections of one title twice: the first is the run's own.
        if titles[place] not in titles[:place]:
            body += [_figure(plot) for plot in plots if plot.section == titles[place]]
    body += [_figure(plot) for plot in plots if plot.section not in titles]
    title = escape(titles[0].removeprefix("# "))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{''.join(body)}</body>\n</html>\n"
    )


def _html(markdown: str) -> str:
    """Markdown with tables as HTML. What looks like HTML in it is text: outputs of models end up in reports."""
    from markdown_it import MarkdownIt

    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    html = html.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")
    return re.sub(rf"<td>([^<]{{{_LONG_CELL},}})</td>", r'<td class="long">\1</td>', html)


def _figure(plot: Plot) -> str:
    return f"<figure>\n{svg_text(plot)}<figcaption>{escape(plot.caption)}</figcaption>\n</figure>\n"
