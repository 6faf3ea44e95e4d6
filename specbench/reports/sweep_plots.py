"""Plots over several runs: throughput against speed per user, and acceptance against k.

Belongs here: those plots, from the metrics.json of each run. Does not belong here: plots of one run (plots.py), looks
and files (plot_style.py), which runs make up a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specbench.reports.plot_style import FAINT, INK, Plot, series_looks, style
from specbench.reports.plots import HEIGHT, PERCENT_TOP, half_widths, legend_above, new_figure, new_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep. Runs of one series are joined by a line."""

    #: What the series is called: `mtp8`.
    series: str
    #: What tells the run apart within its series: `8` for eight requests at once.
    label: str
    #: metrics.json
    metrics: dict


def pareto(points: Sequence[SweepPoint]) -> Plot | None:
    """Output tokens a second of the whole against those of one user; the front is what no other run beats in both."""
    placed = [(point, *_speeds(point)) for point in points]
    measured = [(point, user, total) for point, user, total in placed if user is not None and total is not None]
    if len(measured) < 2:
        return None
    with style():
        figure, axes = new_figure(HEIGHT * 1.25)
        front = pareto_front([(user, total) for _, user, total in measured])
        axes.plot(*np.array(front).T, color=FAINT, linewidth=6, solid_capstyle="round", label="front", zorder=1)
        for index, series in enumerate(dict.fromkeys(point.series for point in points)):
            own = sorted((user, total, point.label) for point, user, total in measured if point.series == series)
            users, totals = [user for user, _, _ in own], [total for _, total, _ in own]
            axes.plot(users, totals, label=series, **series_looks(index))
            for user, total, label in own:
                axes.annotate(label, (user, total), xytext=(4, 4), textcoords="offset points", fontsize=7, color=INK)
        axes.set_xlabel("Output tokens/s of one user")
        axes.set_ylabel("Output tokens/s per device")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        legend_above(axes)
    caption = (
        "Throughput per device against the speed that one user sees; the broad line joins what no run beats in both."
    )
    return Plot("pareto", "Throughput against speed per user", caption, "Sweep", figure)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points, from left to right, that no other one equals or beats in both coordinates."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points), reverse=True):
        if not front or y > front[-1][1]:
            front.append((x, y))
    return front[::-1]


def acceptance_against_k(points: Sequence[SweepPoint]) -> Plot | None:
    """Acceptance length and acceptance rate against the number of drafts a step."""
    drafted = [point for point in points if point.metrics["acceptance"]["drafts"]]
    if len({point.metrics["acceptance"]["num_speculative_tokens"] for point in drafted}) < 2:
        return None
    with style():
        figure, panels = new_figures(2)
        for panel, name in zip(panels, ("acceptance_length", "acceptance_rate"), strict=True):
            for index, series in enumerate(dict.fromkeys(point.series for point in drafted)):
                _against_k(panel, index, series, [point for point in drafted if point.series == series], name)
        panels[0].set_ylabel("Acceptance length")
        panels[0].set_ylim(bottom=1)
        panels[1].set_ylabel("Acceptance rate (%)")
        panels[1].set_ylim(0, PERCENT_TOP)
        panels[1].set_xlabel("Drafts a step (k)")
        panels[1].xaxis.get_major_locator().set_params(integer=True)
        legend_above(panels[0])
    caption = "Acceptance length and rate against the number of drafts a step; bars are 95 % intervals."
    return Plot("acceptance_against_k", "Acceptance against k", caption, "Sweep", figure)


def _against_k(axes: Axes, index: int, series: str, points: Sequence[SweepPoint], name: str) -> None:
    """One series: a figure of `acceptance` against k, with intervals. Rates as percentages."""
    scale = 100 if name == "acceptance_rate" else 1
    ordered = sorted(points, key=lambda point: point.metrics["acceptance"]["num_speculative_tokens"])
    k = [point.metrics["acceptance"]["num_speculative_tokens"] for point in ordered]
    values = [point.metrics["acceptance"][name] for point in ordered]
    intervals = [point.metrics["intervals"].get(f"acceptance.{name}") for point in ordered]
    error = [half_widths(value, interval) for value, interval in zip(values, intervals, strict=True)]
    axes.errorbar(
        k,
        scale * np.array(values),
        yerr=scale * np.array(error).T,
        capsize=2,
        label=series,
        **series_looks(index),
    )


def _speeds(point: SweepPoint) -> tuple[float | None, float | None]:
    throughput = point.metrics["throughput"]
    return throughput["output_token_per_s_per_user"], throughput["output_token_per_s_per_device"]
