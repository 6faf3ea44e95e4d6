"""How plots look, and how they become files: colours for light and dark, SVG, PNG.

Belongs here: the theme and the two writers. Does not belong here: what is plotted (plots.py).

A figure is drawn in the light colours on no background. An SVG carries a rule that swaps them where the reader prefers
dark, so one file serves both, in a page or by itself; a viewer that knows no such rule shows the light ones. A PNG has
a white background. matplotlib is imported inside the functions: it takes half a second.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Text and axes; grid lines and what stays in the background.
INK, FAINT = "#1f2328", "#afb8c1"
#: One a series, told apart by the colour-blind too (after Okabe and Ito), and each with another marker and dash.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKERS = ("o", "s", "^", "D")
DASHES = ("-", "--", ":", "-.")
#: Light colour -> what takes its place on a dark page.
DARK = {
    INK: "#e6edf3",
    FAINT: "#484f58",
    "#0072b2": "#56b4e9",
    "#d55e00": "#f0883e",
    "#009e73": "#3fc99a",
    "#cc79a7": "#e3a1c5",
}
PNG_DPI = 144


@dataclass(frozen=True, slots=True, eq=False)
class Plot:
    """One figure. `name` is its file's stem; `caption` says what it shows to those who can't see it too."""

    name: str
    title: str
    caption: str
    #: Title of the report's section that it belongs to.
    section: str
    figure: Figure

    def __post_init__(self) -> None:
        # Laid out once and for all: every further pass would move things by a hair, and no two files would be equal.
        with _whatever_the_script():
            self.figure.draw_without_rendering()
        self.figure.set_layout_engine("none")


def series_looks(index: int) -> dict[str, Any]:
    """Colour, marker and dash of a series. They repeat, out of step, where there are more series than of each."""
    turn = index // len(SERIES)
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": MARKERS[(index + turn) % len(MARKERS)],
        "linestyle": DASHES[(index + turn) % len(DASHES)],
    }


@contextmanager
def style() -> Iterator[None]:
    """The theme, for everything that is drawn inside."""
    import matplotlib

    settings: dict[Any, Any] = {
        "font.family": "DejaVu Sans",  # comes with matplotlib; a page puts its own font in its place
        "font.size": 9.0,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.5,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
        "lines.linewidth": 1.5,
        "lines.markersize": 4.5,
        "svg.fonttype": "none",  # text stays text: small, searchable, in the reader's font
        "text.parse_math": False,  # a category may be called "$5 or $6"
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
    }
    with matplotlib.rc_context(settings):
        yield


def svg_text(plot: Plot) -> str:
    """The plot as one `<svg>` element, for a file or for a page that holds several. The same plot, the same bytes."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": plot.name, "svg.fonttype": "none"}), _whatever_the_script():
        plot.figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace("'DejaVu Sans'", "system-ui, sans-serif")
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{plot.name}-", text)
    opening, rest = text.split(">", 1)
    label = f' role="img" aria-label="{escape(plot.caption)}"'
    return f"{opening}{label}>\n <title>{escape(plot.title)}</title>\n <style>{_dark_rules()}</style>{rest}"


def png_bytes(plot: Plot) -> bytes:
    """The plot in its light colours on white."""
    buffer = io.BytesIO()
    with _whatever_the_script():
        plot.figure.savefig(buffer, format="png", dpi=PNG_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


@contextmanager
def _whatever_the_script() -> Iterator[None]:
    """No warning of letters that the font lacks: a page shows them in the reader's own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _dark_rules() -> str:
    rules = "".join(
        f'[style*="{part}: {light}"]{{{part}:{dark}!important}}'
        for light, dark in DARK.items()
        for part in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme: dark){{{rules}}}"
