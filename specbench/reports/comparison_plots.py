"""Plots of runs side by side: acceptance by position and latencies, one series a run.

Belongs here: those plots. Does not belong here: plots of one run (plots.py) or of a sweep (sweep_plots.py), looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specbench.records import RequestRecord
from specbench.reports.compared_run import ComparedRun
from specbench.reports.latency import end_to_end, is_completed, time_per_output_token, time_to_first_token
from specbench.reports.plot_style import Plot, series_looks, style
from specbench.reports.plots import (
    PERCENT_TOP,
    half_widths,
    legend_above,
    milliseconds_axis,
    new_figures,
    or_nan,
    share_at_most,
    whole_numbers,
)

_Seconds = Callable[[Sequence[RequestRecord]], np.ndarray]
_LATENCIES: dict[str, _Seconds] = {"TTFT": time_to_first_token, "TPOT": time_per_output_token, "E2EL": end_to_end}


def comparison_plots(runs: Sequence[ComparedRun]) -> list[Plot]:
    """Those that have something of two runs to show."""
    with style():
        drawn = [_positions(runs), _latencies(runs)]
    return [plot for plot in drawn if plot is not None]


def _positions(runs: Sequence[ComparedRun]) -> Plot | None:
    """Acceptance by position, of all drafts above and given the previous position below, with intervals."""
    drafted = [(index, run) for index, run in enumerate(runs) if run.metrics["acceptance"]["per_position"]]
    if len(drafted) < 2:
        return None
    figure, panels = new_figures(2)
    names = {"per_position": "Of all drafts (%)", "per_position_conditional": "Given the previous\nposition (%)"}
    for axes, (key, label) in zip(panels, names.items(), strict=True):
        for place, (index, run) in enumerate(drafted):
            rates = or_nan(run.metrics["acceptance"][key])
            intervals = [run.metrics["intervals"].get(f"acceptance.{key}[{i}]") for i in range(len(rates))]
            error = [half_widths(rate, interval) for rate, interval in zip(rates, intervals, strict=True)]
            at = np.arange(len(rates)) + 0.08 * (place - (len(drafted) - 1) / 2)
            axes.errorbar(
                at, 100 * rates, yerr=100 * np.array(error).T, capsize=2, label=run.label, **series_looks(index)
            )
        axes.set_ylabel(label)
        axes.set_ylim(0, PERCENT_TOP)
    panels[1].set_xlabel("Position of the draft")
    whole_numbers(panels[1], max(len(run.metrics["acceptance"]["per_position"]) for _, run in drafted))
    legend_above(panels[0])
    caption = "Acceptance by position of each run; bars are its own 95 % intervals, not those of a difference."
    return Plot("positions_of_runs", "Acceptance by position", caption, "Acceptance given the previous step", figure)


def _latencies(runs: Sequence[ComparedRun]) -> Plot | None:
    """Share of requests that took at most so long, a panel for each latency."""
    seconds = {
        name: [measure([one for one in run.columns.requests if is_completed(one)]) for run in runs]
        for name, measure in _LATENCIES.items()
    }
    if sum(any(len(values) for values in one) for one in zip(*seconds.values(), strict=True)) < 2:
        return None
    figure, panels = new_figures(len(seconds), shares_x=False)
    for axes, (name, of_runs) in zip(panels, seconds.items(), strict=True):
        for index, (run, values) in enumerate(zip(runs, of_runs, strict=True)):
            milliseconds = 1000 * values[values > 0]
            if len(milliseconds):
                x, share = share_at_most(milliseconds)
                axes.plot(x, share, label=run.label, **series_looks(index) | {"marker": ""})
        milliseconds_axis(axes)
        axes.set_ylabel(f"{name} (%)")
    panels[-1].set_xlabel("Milliseconds")
    legend_above(panels[0])
    caption = "Share of each run's completed requests that took at most so long."
    return Plot("latencies_of_runs", "Latency", caption, "Latency in full", figure)
