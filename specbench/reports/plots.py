"""The plots of one run, each from figures that the report prints or from the log behind them.

Belongs here: what is plotted. Does not belong here: looks and files (plot_style.py), plots over several runs
(sweep_plots.py). A plot that would be empty is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specbench.record_columns import EngineStepColumns
from specbench.reports.latency import (
    end_to_end,
    gaps_between_emissions,
    is_completed,
    time_per_output_token,
    time_to_first_token,
)
from specbench.reports.plot_style import DASHES, FAINT, INK, MARKERS, SERIES, Plot, style
from specbench.reports.step_columns import StepColumns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Inches.
WIDTH, HEIGHT = 6.4, 3.2
#: A cell of the heat map with fewer steps than this is printed pale, as it is marked in the report's tables.
SMALL_COUNT = 20
#: Positions up to which a heat map has room for numbers.
MAX_NUMBERED_POSITIONS = 12
#: Spans of time: at most so many, and enough steps in each that an empty one means a pause.
MAX_TIME_BINS, STEPS_A_TIME_BIN = 120, 8
NUM_CATEGORIES = 30
#: Above 100 %, so that marks at 100 % are whole.
PERCENT_TOP = 103

_Draw = Callable[[], Plot | None]


def run_plots(metrics: dict, columns: StepColumns, engine_steps: EngineStepColumns) -> list[Plot]:
    """All plots of one run that have something to show."""
    draws: tuple[_Draw, ...] = (
        lambda: acceptance_by_position(metrics),
        lambda: accepted_histogram(metrics),
        lambda: acceptance_given_previous(metrics),
        lambda: acceptance_by_output_position(metrics),
        lambda: acceptance_by_category(metrics),
        lambda: autocorrelation(metrics),
        lambda: latency_distribution(columns),
        lambda: timeline(columns, engine_steps, metrics["load"]["steady_state"]["windows_s"]),
    )
    with style():
        drawn = [draw() for draw in draws]
    return [plot for plot in drawn if plot is not None]


def acceptance_by_position(metrics: dict) -> Plot | None:
    """Share of drafts accepted at each position, of all and given the previous position, with intervals."""
    acceptance = metrics["acceptance"]
    if not acceptance["drafts"]:
        return None
    figure, axes = new_figure()
    series = (("of all drafts", "per_position"), ("given the previous position", "per_position_conditional"))
    for index, (label, key) in enumerate(series):
        paths = [f"acceptance.{key}[{position}]" for position in range(len(acceptance[key]))]
        _points(axes, index, acceptance[key], [metrics["intervals"].get(path) for path in paths], label)
    axes.set_xlabel("Position of the draft")
    axes.set_ylabel("Accepted (%)")
    whole_numbers(axes, len(acceptance["per_position"]))
    axes.set_ylim(0, PERCENT_TOP)
    legend_above(axes)
    caption = "Acceptance by position, of all drafts and given the previous position; bars are 95 % intervals."
    return Plot("acceptance_by_position", "Acceptance by position", caption, "Acceptance by position", figure)


def accepted_histogram(metrics: dict) -> Plot | None:
    """Share of steps by how many drafts they accepted."""
    steps = np.array(metrics["acceptance"]["accepted_histogram"])
    if not steps.sum():
        return None
    figure, axes = new_figure()
    share = 100 * steps / steps.sum()
    bars = axes.bar(range(len(steps)), share, color=SERIES[0], width=0.8)
    if len(steps) <= MAX_NUMBERED_POSITIONS + 1:
        axes.bar_label(bars, [f"{one:.1f}" for one in share], padding=2, color=INK, fontsize=8)
    whole_numbers(axes, len(steps))
    axes.set_xlabel("Drafts accepted by a step")
    axes.set_ylabel("Share of steps (%)")
    axes.grid(visible=False, axis="x")
    return Plot(
        "accepted_histogram",
        "Accepted drafts a step",
        f"How many drafts a step accepted, over {steps.sum():,} steps.",
        "Accepted drafts a step",
        figure,
    )


def acceptance_given_previous(metrics: dict) -> Plot | None:
    """A heat map: given the previous position (columns) and what the previous step accepted (rows)."""
    buckets = [bucket for bucket in metrics["acceptance"]["by_previous"] if bucket["drafts"]]
    if not buckets:
        return None
    rates = np.array([or_nan(bucket["per_position_conditional"]) for bucket in buckets])
    reached = np.array([bucket["reached_position"] for bucket in buckets])
    figure, axes = new_figure(height=max(HEIGHT, 1.2 + 0.32 * min(len(buckets), 20)))
    # Brightness alone carries the value, so it reads without colour.
    image = axes.pcolormesh(rates, cmap="cividis", vmin=0, vmax=1)
    axes.invert_yaxis()
    columns, rows = _ticks(rates.shape[1]), _ticks(len(buckets))
    axes.set_xticks(columns + 0.5, [str(position) for position in columns])
    axes.set_yticks(rows + 0.5, [_previous_label(buckets[row]["previous"]) for row in rows])
    axes.set_xlabel("Position of the draft")
    axes.set_ylabel("Accepted by the previous step")
    axes.grid(visible=False)
    if rates.shape[1] <= MAX_NUMBERED_POSITIONS:
        _number_cells(axes, rates, reached)
    bar = figure.colorbar(image, ax=axes, format=lambda value, _: f"{100 * value:.0f}")
    bar.set_label("Accepted given the previous position (%)")
    return Plot(
        "acceptance_given_previous",
        "Acceptance given the previous step",
        f"Acceptance at each position given the previous one, by what the request's previous step accepted. Cells of "
        f"fewer than {SMALL_COUNT} steps are in brackets.",
        "Acceptance given the previous step",
        figure,
    )


def acceptance_by_output_position(metrics: dict) -> Plot | None:
    """Acceptance length against where in the output a step began, and how many drafts each bucket holds."""
    buckets = metrics["acceptance"].get("by_output_position", [])
    if len(buckets) < 2:
        return None
    figure, (upper, lower) = new_figures(2, height_ratios=(3, 1))
    places = range(len(buckets))
    lengths = np.array([bucket["acceptance_length"] for bucket in buckets])
    is_small = np.array([bucket["drafts"] < SMALL_COUNT for bucket in buckets])
    upper.plot(places, lengths, color=SERIES[0], marker="o")
    upper.plot(np.flatnonzero(is_small), lengths[is_small], "o", color=SERIES[0], markerfacecolor=FAINT)
    upper.set_ylabel("Acceptance length")
    upper.set_ylim(bottom=1)
    lower.bar(places, [bucket["drafts"] for bucket in buckets], color=FAINT, width=0.8)
    lower.set_ylabel("Drafts")
    lower.set_xticks(places, [bucket["bucket"].replace(" to ", "–").replace(" and more", "+") for bucket in buckets])
    lower.tick_params(axis="x", labelrotation=30)
    lower.set_xlabel("Output position of the step's first token")
    caption = (
        "Acceptance length against the output position; buckets further out hold fewer and longer requests. Grey "
        f"points stand on fewer than {SMALL_COUNT} drafts."
    )
    title = "Acceptance against output position"
    return Plot("acceptance_by_output_position", title, caption, "Acceptance by condition", figure)


def acceptance_by_category(metrics: dict) -> Plot | None:
    """Acceptance length of each category, with intervals."""
    entries = {name: one for name, one in metrics["acceptance"]["by_category"].items() if one["drafts"]}
    if not 2 <= len(entries) <= NUM_CATEGORIES:
        return None
    names = sorted(entries, key=lambda name: entries[name]["acceptance_length"])
    lengths = np.array([entries[name]["acceptance_length"] for name in names])
    intervals = [metrics["intervals"].get(f"acceptance.by_category.{name}.acceptance_length") for name in names]
    figure, axes = new_figure(height=1.0 + 0.26 * len(names))
    error = [half_widths(value, interval) for value, interval in zip(lengths, intervals, strict=True)]
    axes.errorbar(lengths, range(len(names)), xerr=np.array(error).T, fmt="o", color=SERIES[0], capsize=2)
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("Acceptance length")
    caption = "Acceptance length of each category; bars are 95 % intervals, where one could be had."
    return Plot("acceptance_by_category", "Acceptance by category", caption, "Acceptance by category", figure)


def autocorrelation(metrics: dict) -> Plot | None:
    """Autocorrelation of accepted counts against the lag in steps."""
    acceptance = metrics["acceptance"]
    series = (
        ("pooled", acceptance["autocorrelation"]),
        ("request means removed", acceptance["autocorrelation_within_request"]),
    )
    if all(value is None for _, values in series for value in values):
        return None
    figure, axes = new_figure()
    for index, (label, values) in enumerate(series):
        lags = np.arange(1, len(values) + 1)
        axes.plot(lags, or_nan(values), color=SERIES[index], marker=MARKERS[index], ls=DASHES[index], label=label)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xticks(lags)
    axes.set_xlabel("Lag (steps of one request)")
    axes.set_ylabel("Autocorrelation of accepted")
    legend_above(axes)
    caption = "Autocorrelation of the accepted drafts of steps that lie a lag apart in one request."
    return Plot("autocorrelation", "Autocorrelation of accepted drafts", caption, "Acceptance", figure)


def latency_distribution(columns: StepColumns) -> Plot | None:
    """Share of requests (or steps) that were at least as fast, against milliseconds on a log scale."""
    completed = [request for request in columns.requests if is_completed(request)]
    gap_s, _ = gaps_between_emissions(columns)
    series = {
        "TTFT": time_to_first_token(completed),
        "TPOT": time_per_output_token(completed),
        "ITL per step": gap_s,
        "E2EL": end_to_end(completed),
    }
    figure, axes = new_figure()
    num_drawn = 0
    for index, (label, values) in enumerate(series.items()):
        milliseconds = 1000 * values[values > 0]
        if len(milliseconds):
            num_drawn += 1
            x, share = share_at_most(milliseconds)
            axes.plot(x, share, color=SERIES[index], linestyle=DASHES[index], label=label)
    if not num_drawn:
        return None
    milliseconds_axis(axes)
    axes.set_xlabel("Milliseconds")
    axes.set_ylabel("Share at most that long (%)")
    legend_above(axes)
    caption = (
        "Distribution of latencies: the share of completed requests, or of their steps, that took at most so long."
    )
    return Plot("latency_distribution", "Latency", caption, "Speed", figure)


def timeline(
    columns: StepColumns, engine_steps: EngineStepColumns, steady_windows_s: Sequence[Sequence[float]]
) -> Plot | None:
    """Output tokens a second and requests at once over the run; `steady_windows_s` since the first arrival."""
    if len(columns.end_s) < 2:
        return None
    start_s = min(request.arrival_s for request in columns.requests)
    at_s, batch = _batch_over_time(columns, engine_steps, start_s)
    num_bins = min(MAX_TIME_BINS, 1 + len(at_s) // STEPS_A_TIME_BIN)
    first_s = np.array([one.first_token_s for one in columns.requests if one.first_token_s is not None]) - start_s
    last_s = max(columns.end_s.max() - start_s, first_s.max(initial=0.0), 1e-9)
    edges = np.linspace(0, last_s, num_bins + 1)
    tokens, _ = np.histogram(columns.end_s - start_s, edges, weights=columns.num_emitted)
    tokens = tokens + np.histogram(first_s, edges)[0]
    figure, (upper, lower) = new_figures(2)
    upper.stairs(tokens / np.diff(edges), edges, color=SERIES[0], linewidth=1.2)
    upper.set_ylabel("Output tokens/s")
    total, _ = np.histogram(at_s, edges, weights=batch)
    count, _ = np.histogram(at_s, edges)
    lower.stairs(np.divide(total, count, out=np.full(len(total), np.nan), where=count > 0), edges, color=SERIES[1])
    lower.set_ylabel("Requests at once")
    lower.set_xlabel("Seconds since the first arrival")
    for axes in (upper, lower):
        axes.set_ylim(bottom=0)
        for low_s, high_s in steady_windows_s:
            axes.axvspan(low_s, high_s, color=FAINT, alpha=0.25, linewidth=0, zorder=0)
    caption = f"Output tokens a second, and the mean number of requests in a step, in {num_bins} spans of time."
    if steady_windows_s:
        caption += " Shaded: the steady state."
    return Plot("timeline", "Throughput and batch over time", caption, "Speed", figure)


def _batch_over_time(
    columns: StepColumns, engine_steps: EngineStepColumns, start_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, requests that decoded) of each engine step from `start_s` on; of each verify step without them."""
    if len(engine_steps):
        at_s, batch = engine_steps.end_s - start_s, engine_steps.num_decode_requests
        return at_s[at_s >= 0], batch[at_s >= 0]
    return columns.end_s - start_s, columns.batch_size


def share_at_most(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(value, percent of values up to it): at every value where they are few, else at 400 values of even ratio."""
    if len(values) <= 400:
        return np.sort(values), 100 * np.arange(1, len(values) + 1) / len(values)
    edges = np.geomspace(values.min(), values.max() * (1 + 1e-9), 401)
    counts, _ = np.histogram(values, edges)
    return edges[1:], 100 * np.cumsum(counts) / len(values)


def _points(
    axes: Axes, index: int, values: Sequence[float | None], intervals: Sequence[Sequence[float] | None], label: str
) -> None:
    """One series of fractions as percentages, with intervals where there are any; series stand beside each other."""
    places = np.arange(len(values)) + 0.06 * (2 * index - 1)
    percents = 100 * or_nan(values)
    error = [half_widths(value, interval) for value, interval in zip(or_nan(values), intervals, strict=True)]
    axes.errorbar(
        places,
        percents,
        yerr=100 * np.array(error).T,
        color=SERIES[index],
        marker=MARKERS[index],
        linestyle=DASHES[index],
        capsize=2,
        label=label,
    )


def half_widths(value: float, interval: Sequence[float] | None) -> tuple[float, float]:
    """How far an interval reaches below and above a value; nothing without one."""
    return (0.0, 0.0) if interval is None else (max(0.0, value - interval[0]), max(0.0, interval[1] - value))


def _number_cells(axes: Axes, rates: np.ndarray, reached: np.ndarray) -> None:
    for (row, column), rate in np.ndenumerate(rates):
        if np.isnan(rate):
            continue
        text = f"{100 * rate:.0f}"
        text = f"({text})" if reached[row, column] < SMALL_COUNT else text
        color = "#000000" if rate > 0.55 else "#ffffff"
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", color=color, fontsize=8)


def _ticks(num: int) -> np.ndarray:
    """At most twenty or so of 0 .. num - 1, evenly apart."""
    return np.arange(0, num, -(-num // 20))


def _previous_label(previous: int | None) -> str:
    return {None: "no previous step", -1: "nothing drafted"}.get(previous, str(previous))


def or_nan(values: Sequence[float | None]) -> np.ndarray:
    """[n] What was not measured is NaN."""
    return np.array([np.nan if value is None else value for value in values], np.float64)


def milliseconds_axis(axes: Axes) -> None:
    """Milliseconds on a log scale against a share in percent."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(0, PERCENT_TOP)


def whole_numbers(axes: Axes, num: int) -> None:
    """An x axis of 0 .. num - 1, every one of them where they are few."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))
    axes.set_xlim(-0.6, num - 0.4)


def legend_above(axes: Axes) -> None:
    """A legend that can't cover what is drawn."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, borderaxespad=0.2)


def new_figure(height: float = HEIGHT) -> tuple[Figure, Axes]:
    """A figure of one panel."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def new_figures(
    num_rows: int, height_ratios: Sequence[float] | None = None, *, shares_x: bool = True
) -> tuple[Figure, np.ndarray]:
    """Panels above each other."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, HEIGHT * (0.65 + 0.3 * num_rows)), layout="constrained")
    return figure, figure.subplots(num_rows, sharex=shares_x, height_ratios=height_ratios)
