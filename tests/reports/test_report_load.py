"""Lag, queueing, gaps, goodput and the steady state against logs worked by hand, and what the report says of them."""

from __future__ import annotations

import numpy as np
import pytest

from specbench.records import RequestRecord, RunRecord
from specbench.reports.compare import compare
from specbench.reports.compared_run import ComparedRun, run_of_log
from specbench.reports.load_metrics import load_metrics
from specbench.reports.markdown import report_markdown
from specbench.reports.metrics import compute_metrics
from specbench.reports.side_by_side import benchmark_table
from specbench.reports.step_columns import step_columns
from specbench.reports.terminal_summary import summary_rows
from specbench.run_directory import EventLog
from tests.reports.event_logs import make_request, make_run, make_step


def compared(run: RunRecord, log: EventLog) -> ComparedRun:
    return run_of_log(run, log, "runs/x")


def run_of(load: dict, **report: float) -> RunRecord:
    run = make_run(2)
    run.config |= {"load": load, "report": report}
    return run


def figures(run: RunRecord, requests: list[RequestRecord], duration_s: float | None = 10.0) -> dict:
    return load_metrics(run, step_columns(requests, []), duration_s)


def test_lag_is_what_the_wait_for_a_place_leaves():
    requests = [
        make_request("a", scheduled_s=1.0, arrival_s=1.003, client_queue_s=0.0),
        make_request("b", scheduled_s=1.0, arrival_s=3.001, client_queue_s=2.0),
        make_request("turn", arrival_s=5.0),
        make_request("warm", scheduled_s=0.0, arrival_s=9.0, client_queue_s=0.0, is_warmup=True),
    ]
    load = figures(run_of({"name": "burst", "rate": 4.0, "burst_size": 2}), requests)
    assert load["lag_ms"]["n"] == 2 and load["lag_ms"]["mean"] == pytest.approx(2.0)
    assert load["client_queue_ms"]["mean"] == pytest.approx(1000.0)
    assert load["gaps"] == {"n": 1, "mean_s": pytest.approx(1.998), "variation": 0.0, "p_value": None}


def arrivals(gaps_s: np.ndarray, **changes: object) -> list[RequestRecord]:
    times = np.cumsum(gaps_s)
    return [
        make_request(f"r{index}", scheduled_s=at_s, arrival_s=at_s, client_queue_s=0.0, **changes)
        for index, at_s in enumerate(times.tolist())
    ]


def test_gaps_are_tested_against_the_law_of_their_load():
    generator = np.random.default_rng(0)
    poisson, gamma = {"name": "poisson", "rate": 4.0}, {"name": "gamma", "rate": 4.0, "burstiness": 0.25}
    exponential = arrivals(generator.exponential(0.25, 400))
    clustered = arrivals(generator.gamma(0.25, 1.0, 400))
    p_values = {
        (load["name"], name): figures(run_of(load), requests)["gaps"]["p_value"]
        for load in (poisson, gamma)
        for name, requests in (("exponential", exponential), ("clustered", clustered))
    }
    assert min(p_values["poisson", "exponential"], p_values["gamma", "clustered"]) > 0.01
    assert max(p_values["poisson", "clustered"], p_values["gamma", "exponential"]) < 1e-6


def test_gaps_are_not_judged_where_a_wait_bent_them_or_they_are_few():
    load = run_of({"name": "poisson", "rate": 4.0})
    even = np.full(30, 0.25)
    assert figures(load, arrivals(even))["gaps"]["p_value"] < 1e-3
    assert figures(load, arrivals(even[:20]))["gaps"]["p_value"] is None
    waited = make_request("w", scheduled_s=0.0, arrival_s=8.0, client_queue_s=8.0)
    assert figures(load, [*arrivals(even), waited])["gaps"]["p_value"] is None


def test_goodput_counts_requests_that_meet_every_slo():
    requests = [
        make_request("good", first_token_s=0.2, last_token_s=0.6, num_output_tokens=5),
        make_request("late", first_token_s=0.3, last_token_s=0.6, num_output_tokens=5),
        make_request("slow", first_token_s=0.2, last_token_s=0.7, num_output_tokens=5),
        make_request("one token", first_token_s=0.1, last_token_s=0.1, num_output_tokens=1),
        make_request("failed", finish_reason="error", error="lost", first_token_s=None, last_token_s=None),
    ]
    goodput = figures(run_of({}, slo_ttft_ms=200.0, slo_tpot_ms=100.0), requests)["goodput"]
    assert (goodput["met"], goodput["total"], goodput["share"]) == (2, 5, 0.4)
    assert goodput["request_per_s"] == pytest.approx(0.2)
    assert figures(run_of({}), requests)["goodput"]["met"] is None


def steady_log() -> EventLog:
    """Two clients: r0 and r1 from 1.0, r2 takes over from r0 at 3.0, r1 ends at 4.0 and r2 at 6.0."""
    return EventLog(
        requests=[
            make_request("r0", arrival_s=1.0, first_token_s=2.0, last_token_s=3.0, num_output_tokens=4),
            make_request("r1", arrival_s=1.0, first_token_s=2.5, last_token_s=4.0, num_output_tokens=4),
            make_request("r2", arrival_s=3.0, first_token_s=5.0, last_token_s=6.0, num_output_tokens=4),
        ],
        verify_steps=[make_step(name, 0, 2, 2, end_s=end_s) for name, end_s in (("r0", 3.0), ("r1", 4.0), ("r2", 6.0))],
    )


def test_steady_state_of_a_closed_load_is_without_its_drain():
    steady = compute_metrics(run_of({"name": "closed", "concurrency": 2}), steady_log())["load"]["steady_state"]
    assert steady["windows_s"] == [[0.0, 3.0]]
    assert (steady["duration_s"], steady["share"], steady["mean_in_flight"]) == (3.0, pytest.approx(3 / 5), 2.0)
    assert steady["output_token_per_s"] == pytest.approx((2 + 6) / 3)


def test_a_load_that_never_fills_its_clients_has_no_steady_state():
    steady = compute_metrics(run_of({"name": "closed", "concurrency": 3}), steady_log())["load"]["steady_state"]
    assert steady["windows_s"] == [] and steady["output_token_per_s"] is None


def test_steady_state_of_a_timetable_lasts_from_the_first_end_to_the_last_arrival():
    log = steady_log()
    times_s = ((1.0, 3.0), (1.0, 4.0), (3.5, 6.0))
    log.requests = [
        make_request(f"r{index}", scheduled_s=at_s, arrival_s=at_s, last_token_s=end_s)
        for index, (at_s, end_s) in enumerate(times_s)
    ]
    steady = compute_metrics(run_of({"name": "poisson", "rate": 1.0}), log)["load"]["steady_state"]
    assert steady["windows_s"] == [[2.0, 2.5]] and steady["mean_in_flight"] == 1.0
    offline = compute_metrics(run_of({"name": "offline"}), steady_log())["load"]["steady_state"]
    assert offline["windows_s"] == [] or offline["duration_s"] > 0


def test_repeats_have_a_window_each():
    requests = [
        make_request(f"r{repeat}", repeat=repeat, arrival_s=10.0 * repeat, last_token_s=10.0 * repeat + 2.0)
        for repeat in (0, 1)
    ]
    steady = figures(run_of({"name": "closed", "concurrency": 1}), requests)["steady_state"]
    assert steady["windows_s"] == [[0.0, 2.0], [10.0, 12.0]] and steady["share"] == 1.0


def test_the_report_tells_of_the_load():
    run = run_of({"name": "gamma", "rate": 4.0, "burstiness": 0.25, "concurrency": None}, slo_ttft_ms=2000.0)
    log = steady_log()
    log.requests = [
        make_request(one.request_id, arrival_s=one.arrival_s, scheduled_s=one.arrival_s - 0.5, client_queue_s=0.4)
        for one in log.requests
    ]
    text = " ".join(report_markdown(run, compute_metrics(run, log)).split())
    assert "## Load" in text and "`gamma`, rate=4.0, burstiness=0.25" in text
    assert "Lag of submission (ms) | 3 | 100.00" in text and "Client queueing (ms) | 3 | 400.00" in text
    assert "TTFT <= 2000 ms" in text
    assert "mean lag 100.00 ms of 3 submissions" in text, "and the health check says so"


def test_a_run_whose_load_is_not_known_has_no_section():
    assert "## Load" not in report_markdown(make_run(2), compute_metrics(make_run(2), steady_log()))


def test_two_runs_stand_side_by_side_with_goodput_and_queueing():
    log = steady_log()
    log.requests = [
        make_request(one.request_id, arrival_s=one.arrival_s, scheduled_s=one.arrival_s - 0.5, client_queue_s=0.5,
                     first_token_s=one.first_token_s, last_token_s=one.last_token_s, num_output_tokens=4)
        for one in log.requests
    ]  # fmt: skip
    load = {"name": "poisson", "rate": 1.0}
    run = run_of(load, slo_ttft_ms=1200.0)
    faster = run_of(load | {"rate": 2.0})
    runs = [compared(run, log), compared(faster, steady_log())]
    rows = {row[0].text: [cell.text for cell in row[1:3]] for row in benchmark_table(runs).rows}
    assert rows["Goodput (req/s)"] == ["0.20 (33.33%)", "n/a"]
    assert rows["Mean client queueing (ms)"] == ["500.00", "n/a"]
    plain = compared(make_run(2), steady_log())
    assert "Goodput (req/s)" not in {row[0].text for row in benchmark_table([plain, plain]).rows}


def test_labels_name_the_load_that_tells_runs_apart():
    loads = ({"name": "poisson", "rate": 1.0}, {"name": "poisson", "rate": 2.0}, {"name": "offline"})
    labels = [one.label for one in compare([compared(run_of(load), steady_log()) for load in loads[:2]]).runs]
    assert labels == ["mtp2 (rate 1.0)", "mtp2 (rate 2.0)"]
    labels = [one.label for one in compare([compared(run_of(load), steady_log()) for load in loads[1:]]).runs]
    assert labels == ["mtp2 (poisson)", "mtp2 (offline)"]


def test_a_resumed_run_has_neither_gaps_nor_a_steady_state():
    run = run_of({"name": "closed", "concurrency": 2}, slo_ttft_ms=3000.0)
    run.num_segments = 2
    metrics = compute_metrics(run, steady_log())
    load = metrics["load"]
    assert load["steady_state"]["windows_s"] == [] and load["gaps"]["n"] == 0
    assert "Steady state: not measured, because the run was resumed" in report_markdown(run, metrics)
    assert load["goodput"]["met"] == 3 and load["goodput"]["request_per_s"] is None


def test_the_terminal_shows_goodput_where_there_is_an_slo():
    run = run_of({"name": "closed", "concurrency": 2}, slo_ttft_ms=1200.0)
    shown = {row.label: row.value for row in summary_rows(run, compute_metrics(run, steady_log()))}
    assert shown["Goodput (req/s)"] == "0.20, 33.33% (1/3) of requests"
    others = summary_rows(make_run(2), compute_metrics(make_run(2), steady_log()))
    assert "Goodput (req/s)" not in {row.label for row in others}


def queue_of(
    rate: float, service_s: float, seed: int, num_requests: int = 300, concurrency: int | None = None
) -> list[RequestRecord]:
    """Poisson arrivals at one server that takes an exponential time for each request, `concurrency` out at most."""
    generator = np.random.default_rng(seed)
    due_s, end_s = 0.0, [0.0]
    requests = []
    for index in range(num_requests):
        due_s += generator.exponential(1 / rate)
        freed_s = end_s[-concurrency] if concurrency is not None and len(end_s) > concurrency else 0.0
        arrival_s = max(due_s, freed_s)
        end_s.append(max(end_s[-1], arrival_s) + generator.exponential(service_s))
        requests.append(
            make_request(
                f"r{index}",
                scheduled_s=due_s,
                arrival_s=arrival_s,
                client_queue_s=arrival_s - due_s,
                first_token_s=max(end_s[-2], arrival_s),
                last_token_s=end_s[-1],
            )
        )
    return requests


@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize(("service_s", "status"), [(0.6, "ok"), (2.5, "warning")])
def test_a_target_that_falls_behind_is_named_with_and_without_a_cap(
    concurrency: int | None, service_s: float, status: str
):
    run = run_of({"name": "poisson", "rate": 1.0, "concurrency": concurrency})
    for seed in range(5):
        log = EventLog(queue_of(1.0, service_s, seed, concurrency=concurrency))
        (check,) = [one for one in compute_metrics(run, log)["health"] if one["name"] == "kept_up"]
        assert check["status"] == status, check["seen"]
    assert figures(run_of({"name": "burst", "rate": 1.0, "burst_size": 2}), log.requests)["backlog"]["at_end"] is None


def test_backlog_counts_what_waits_in_the_client():
    requests = [
        make_request(f"r{at_s}", scheduled_s=at_s, arrival_s=10.0 * at_s, last_token_s=10.0 * at_s + 10.0)
        for at_s in range(20)
    ]
    backlog = figures(run_of({"name": "poisson", "rate": 1.0, "concurrency": 1}), requests)["backlog"]
    assert (backlog["at_quarter"], backlog["at_end"]) == (5.0, 19.0)


def test_goodput_says_what_waiting_is_outside_its_slos():
    run = run_of({"name": "poisson", "rate": 1.0, "concurrency": 2}, slo_ttft_ms=5000.0)
    log = EventLog(queue_of(1.0, 2.5, 0, num_requests=40, concurrency=2))
    metrics = compute_metrics(run, log)
    waited = f"{metrics['load']['client_queue_ms']['mean']:,.2f} ms"
    assert f"requests waited {waited} in the client" in report_markdown(run, metrics)
    (shown,) = [row.value for row in summary_rows(run, metrics) if row.label == "Goodput (req/s)"]
    assert shown.endswith(f"{waited} in the client not counted")
    free = compute_metrics(run, EventLog(queue_of(1.0, 0.01, 0, num_requests=40)))
    assert "requests waited" not in report_markdown(run, free)
    assert "in the client" not in next(row.value for row in summary_rows(run, free) if row.label == "Goodput (req/s)")


def test_turns_behind_the_timetable_are_drain():
    log = EventLog(
        [
            make_request("a", scheduled_s=1.0, arrival_s=1.0, last_token_s=2.0),
            make_request("b", scheduled_s=3.0, arrival_s=3.0, last_token_s=4.0),
            make_request("b, second turn", arrival_s=4.0, last_token_s=9.0),
        ]
    )
    steady = compute_metrics(run_of({"name": "trace"}), log)["load"]["steady_state"]
    assert steady["windows_s"] == [[1.0, 2.0]] and steady["duration_s"] == 1.0
