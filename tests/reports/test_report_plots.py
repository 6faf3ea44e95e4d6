"""Plots show what the metrics say, leave out what is empty, and read in light, dark and without colour."""

from __future__ import annotations

import copy
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from specbench.record_columns import EngineStepColumns
from specbench.records import EngineStep
from specbench.reports.compared_run import compared_run
from specbench.reports.comparison_plots import comparison_plots
from specbench.reports.metrics import compute_metrics, metrics_of
from specbench.reports.plot_style import DARK, SERIES, png_bytes, svg_text
from specbench.reports.plots import acceptance_by_position, latency_distribution, run_plots, timeline
from specbench.reports.step_columns import step_columns
from specbench.reports.sweep_plots import SweepPoint, acceptance_against_k, pareto, pareto_front
from specbench.run_directory import EventLog
from tests.reports.event_logs import make_request, make_run, simulate

NAMES = [
    "acceptance_by_position",
    "accepted_histogram",
    "acceptance_given_previous",
    "acceptance_by_output_position",
    "acceptance_by_category",
    "autocorrelation",
    "latency_distribution",
    "timeline",
]


def plots_of(log: EventLog, **run: object) -> list:
    metrics = compute_metrics(make_run(**run), log)
    engine_steps = EngineStepColumns.of(log.engine_steps)
    return run_plots(metrics, step_columns(log.requests, log.verify_steps), engine_steps)


@pytest.fixture(scope="module")
def log() -> EventLog:
    return simulate(seed=5, num_requests=60)


@pytest.fixture(scope="module")
def plots(log) -> list:
    return plots_of(log, num_speculative_tokens=4)


def test_a_run_with_everything_has_every_plot(plots):
    assert [plot.name for plot in plots] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_svg_is_well_formed_says_what_it_shows_and_names_nothing_outside(plots, name):
    plot = next(plot for plot in plots if plot.name == name)
    text = svg_text(plot)
    root = ET.fromstring(text)
    assert root.tag.endswith("svg") and root.get("aria-label") == plot.caption
    assert not re.search(r'(href|src|url)\s*[=(]\s*["\']?(https?:|//)', text)
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)) and all(one.startswith(f"{name}-") for one in ids)
    assert set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", text)) <= set(ids)
    assert svg_text(plot) == text and "mathdefault" not in text


@pytest.mark.parametrize("name", NAMES)
def test_every_colour_but_the_heat_map_s_has_a_dark_counterpart(plots, name):
    text = svg_text(next(plot for plot in plots if plot.name == name)).split("</style>", 1)[1]
    colours = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text))
    if name != "acceptance_given_previous":
        assert colours <= set(DARK)
    assert colours & set(DARK)


def test_png_is_drawn_on_white(plots):
    from io import BytesIO

    from PIL import Image

    image = Image.open(BytesIO(png_bytes(plots[0]))).convert("RGB")
    assert image.width > 600 and image.getpixel((1, 1)) == (255, 255, 255)


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    channels = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("colour", SERIES)
def test_series_stand_out_on_a_light_and_on_a_dark_page(colour):
    assert contrast(colour, "#ffffff") >= 2.9 and contrast(DARK[colour], "#0d1117") >= 4.5


def test_points_are_the_figures_and_bars_their_intervals(log):
    metrics = compute_metrics(make_run(4), log)
    (axes,) = acceptance_by_position(metrics).figure.axes
    for container, key in zip(axes.containers, ("per_position", "per_position_conditional"), strict=True):
        drawn = container.lines[0].get_ydata()
        np.testing.assert_allclose(drawn, 100 * np.array(metrics["acceptance"][key]))
        segments = container.lines[2][0].get_segments()
        low, high = metrics["intervals"][f"acceptance.{key}[2]"]
        np.testing.assert_allclose([segments[2][0][1], segments[2][1][1]], [100 * low, 100 * high])


def test_nothing_to_show_is_no_plot():
    assert plots_of(EventLog()) == []
    assert plots_of(EventLog([make_request("a", first_token_s=None, last_token_s=None, finish_reason="error")])) == []
    off = simulate(seed=1, k=0)
    names = [plot.name for plot in plots_of(off, num_speculative_tokens=None, method="none")]
    assert names == ["latency_distribution", "timeline"]


def test_latencies_within_one_decade_have_ticks_that_read():
    requests = [make_request(f"r{index}", first_token_s=0.2 + 0.01 * index, last_token_s=0.4) for index in range(9)]
    (plot,) = plots_of(EventLog(requests))
    assert "mathdefault" not in svg_text(plot) and ">200</text>" in svg_text(plot)


def test_names_are_drawn_as_they_are_whatever_they_hold(recwarn):
    log = simulate(seed=5, num_requests=60)
    names = {"a": "$5 or <6> & $7", "b": "数学"}
    log.requests = [replace(one, category=names.get(one.category or "")) for one in log.requests]
    plot = next(plot for plot in plots_of(log, num_speculative_tokens=4) if plot.name == "acceptance_by_category")
    root = ET.fromstring(svg_text(plot))
    texts = {element.text for element in root.iter() if element.tag.endswith("text")}
    assert set(names.values()) <= texts and png_bytes(plot) and not recwarn.list


def test_one_request_of_one_token_has_its_latency():
    assert [plot.name for plot in plots_of(EventLog([make_request("a")]))] == ["latency_distribution"]


def test_latency_reaches_all_and_time_holds_all_tokens(log):
    columns = step_columns(log.requests, log.verify_steps)
    (axes,) = latency_distribution(columns).figure.axes
    assert all(line.get_ydata()[-1] == pytest.approx(100) for line in axes.lines)
    upper, lower = timeline(columns, EngineStepColumns.of([]), []).figure.axes
    values, edges, _ = upper.patches[0].get_data()
    tokens = sum(request.num_output_tokens for request in columns.requests)
    assert (values * np.diff(edges)).sum() == pytest.approx(tokens)
    assert np.nanmax(lower.patches[0].get_data()[0]) == 1


def test_batch_over_time_is_the_engine_s_where_its_steps_are_recorded(log):
    columns = step_columns(log.requests, log.verify_steps)
    engine_steps = [
        EngineStep(at, float(at), at + 0.5, 0, 5, 5, 0.0, None, None, None, 0, 0, 0) for at in range(-3, 40)
    ]
    _, lower = timeline(columns, EngineStepColumns.of(engine_steps), [[0.0, 1.0]]).figure.axes
    assert np.nanmax(lower.patches[0].get_data()[0]) == 5


def sweep_point(series: str, user: float, total: float, k: int | None = 4, length: float = 2.0) -> SweepPoint:
    metrics = copy.deepcopy(compute_metrics(make_run(4), simulate(seed=0, num_requests=2)))
    metrics["throughput"] |= {"output_token_per_s_per_user": user, "output_token_per_s_per_device": total}
    metrics["acceptance"] |= {"num_speculative_tokens": k, "acceptance_length": length, "drafts": k and 10}
    return SweepPoint(series, "8", metrics)


def test_pareto_front_is_what_nothing_beats():
    assert pareto_front([(1, 9), (2, 8), (2, 7), (1.5, 8.5), (1.4, 8.4), (3, 1)]) == [
        (1, 9),
        (1.5, 8.5),
        (2, 8),
        (3, 1),
    ]
    assert pareto_front([(1, 1), (1, 1)]) == [(1, 1)]


def test_sweep_plots_take_what_was_measured():
    points = [sweep_point("a", 5, 10), sweep_point("a", 3, 20), sweep_point("b", 2, 12), sweep_point("c", None, None)]
    (axes,) = pareto(points).figure.axes
    front, *series = axes.lines
    assert list(front.get_xdata()) == [3, 5] and [line.get_label() for line in series] == ["a", "b", "c"]
    assert pareto(points[:1]) is None and pareto([]) is None


def test_acceptance_against_k_is_ordered_and_needs_two():
    points = [sweep_point("x", 1, 1, k, float(k)) for k in (8, 1, 4)]
    length, rate = acceptance_against_k([*points, sweep_point("off", 1, 1, None)]).figure.axes
    assert list(length.containers[0].lines[0].get_xdata()) == [1, 4, 8]
    assert list(length.containers[0].lines[0].get_ydata()) == [1, 4, 8] and len(rate.containers) == 1
    assert acceptance_against_k(points[:1]) is None


def test_runs_side_by_side_keep_their_looks_and_their_own_intervals(log):
    runs = []
    for k in (4, 4, 2):
        own = simulate(seed=k, num_requests=40, k=k)
        run, columns = make_run(k), step_columns(own.requests, own.verify_steps)
        runs.append(compared_run(run, metrics_of(run, own, columns), columns, [], [], "d"))
    positions, latencies = comparison_plots(runs)
    upper, lower = positions.figure.axes
    assert (
        [len(one.lines[0].get_xdata()) for one in upper.containers]
        == [4, 4, 2]
        == [len(one.lines[0].get_xdata()) for one in lower.containers]
    )
    assert len(latencies.figure.axes) == 3 and all(len(axes.lines) == 3 for axes in latencies.figure.axes)
    assert comparison_plots(runs[:1]) == []
