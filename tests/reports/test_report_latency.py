"""Latency and throughput against numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specbench.reports.latency import distribution, distribution_of_repeated, latency_metrics, throughput_metrics
from specbench.reports.metrics import compute_metrics
from specbench.reports.step_columns import step_columns
from specbench.run_directory import EventLog
from tests.reports.event_logs import make_request, make_run, make_step, simulate


def worked_example() -> EventLog:
    """`a`: first token at 1.0 s, then 3 tokens at 1.3 s and 1 at 1.4 s. `b`: one token only. `c` fails."""
    return EventLog(
        requests=[
            make_request("a", num_output_tokens=5, arrival_s=0.5, first_token_s=1.0, last_token_s=1.4),
            make_request("b", num_output_tokens=1, arrival_s=0.9, first_token_s=1.1, last_token_s=1.1),
            make_request("c", num_output_tokens=2, finish_reason="error", error="lost", last_token_s=2.5),
        ],
        verify_steps=[
            make_step("a", 0, 2, 2, end_s=1.3),
            make_step("a", 1, 2, 0, end_s=1.4),
            make_step("c", 0, 2, 0, end_s=2.5),
        ],
    )


def test_worked_example_of_every_latency():
    log = worked_example()
    latency = latency_metrics(step_columns(log.requests, log.verify_steps))
    assert latency["ttft_ms"]["n"] == 2 and latency["ttft_ms"]["mean"] == pytest.approx((500 + 200) / 2)
    assert latency["e2el_ms"]["n"] == 2 and latency["e2el_ms"]["p50"] == pytest.approx((900 + 200) / 2)
    assert latency["tpot_ms"]["n"] == 1  # the one-token request has none
    assert latency["tpot_ms"]["mean"] == pytest.approx(400 / 4)
    assert latency["itl_step_ms"]["n"] == 2 and latency["itl_step_ms"]["mean"] == pytest.approx((300 + 100) / 2)
    # Three tokens of 100 ms and one of 100 ms.
    assert latency["itl_token_ms"] == pytest.approx({"n": 4, "mean": 100, "p50": 100, "p90": 100, "p99": 100})


def test_worked_example_of_throughput():
    log = worked_example()
    throughput = throughput_metrics(step_columns(log.requests, log.verify_steps), num_devices=2)
    assert throughput["duration_s"] == 2.5  # from c's arrival at 0.0 to its last token
    assert throughput["request_per_s"] == pytest.approx(2 / 2.5)
    assert throughput["output_token_per_s"] == pytest.approx(6 / 2.5)
    assert throughput["output_token_per_s_per_device"] == pytest.approx(6 / 2.5 / 2)
    assert throughput["output_token_per_s_per_user"] == pytest.approx(6 / (0.9 + 0.2))
    assert throughput["total_token_per_s"] == pytest.approx(26 / 2.5)
    assert throughput["verify_step_per_s"] == pytest.approx(3 / 2.5)


def test_failed_requests_are_counted_and_have_no_latency():
    log = worked_example()
    log.requests.append(make_request("d", finish_reason="aborted", first_token_s=None, last_token_s=None))
    metrics = compute_metrics(make_run(2), log)
    assert metrics["requests"] == {"completed": 2, "failed": 1, "aborted": 1, "warmup": 0, "warmup_failed": 0}
    assert metrics["latency"]["ttft_ms"]["n"] == 2


@pytest.mark.parametrize("seed", range(4))
def test_gaps_of_a_request_add_up_to_its_decode_time(seed):
    log = simulate(seed, is_ragged=True)
    latency = latency_metrics(step_columns(log.requests, log.verify_steps))
    measured = [request for request in log.requests if not request.is_warmup]
    decode_ms = 1000 * sum(request.last_token_s - request.first_token_s for request in measured)
    for name in ("itl_step_ms", "itl_token_ms"):
        assert latency[name]["n"] * latency[name]["mean"] == pytest.approx(decode_ms)
    assert latency["itl_token_ms"]["n"] == sum(request.num_output_tokens - 1 for request in measured)


def test_a_row_that_kept_nothing_ends_no_gap():
    log = EventLog([make_request("a", num_output_tokens=2)], [
        make_step("a", 0, 2, 1, num_emitted=0, end_s=1.2), make_step("a", 1, 2, 0, end_s=1.5)])  # fmt: skip
    latency = latency_metrics(step_columns(log.requests, log.verify_steps))
    assert latency["itl_step_ms"]["n"] == 1 and latency["itl_step_ms"]["mean"] == pytest.approx(500)


def test_nothing_measured_is_null():
    assert distribution(np.array([])) == {"n": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    metrics = compute_metrics(make_run(2), EventLog())
    assert set(metrics["throughput"].values()) == {None}
    assert metrics["cache"].pop("preemptions") == 0
    assert set(metrics["cache"].values()) == {None}
    assert metrics["eval"]["accuracy"] is metrics["eval"]["total"] is None


@pytest.mark.parametrize("seed", range(5))
def test_a_distribution_of_repeated_values_is_that_of_the_values_written_out(seed):
    rng = np.random.default_rng(seed)
    values, counts = rng.integers(0, 9, 12) / 7, rng.integers(0, 4, 12)
    expected = distribution(np.repeat(values, counts))
    assert distribution_of_repeated(values, counts) == pytest.approx(expected)
    nothing = np.zeros(12, np.int64)
    assert distribution_of_repeated(values, nothing) == distribution(values[:0])
