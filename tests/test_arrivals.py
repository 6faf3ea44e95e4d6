"""A closed load keeps as many requests in flight as it has clients, whatever the clock says."""

from __future__ import annotations

import pytest

from specbench.arrivals import ClosedLoad, make_load
from specbench.run_config import LoadConfig


@pytest.mark.parametrize(("in_flight", "due"), [(0, 4), (1, 3), (4, 0), (5, 0)])
def test_idle_clients_send(in_flight: int, due: int) -> None:
    load = ClosedLoad(concurrency=4)
    for now_s in (0.0, 1e6):
        assert load.num_due(now_s, num_submitted=17, num_in_flight=in_flight) == due


def test_only_a_finished_request_frees_a_client() -> None:
    assert ClosedLoad(concurrency=4).next_due_s(0.0, num_submitted=4) is None


def test_a_simulated_run_never_exceeds_the_concurrency() -> None:
    load = make_load(LoadConfig(name="closed", concurrency=3, warmup=0, repeats=1, reset_cache=True))
    num_submitted, in_flight, most = 0, 0, 0
    for step in range(200):
        num_due = min(load.num_due(float(step), num_submitted, in_flight), 100 - num_submitted)
        num_submitted, in_flight = num_submitted + num_due, in_flight + num_due
        most = max(most, in_flight)
        in_flight -= min(in_flight, step % 3)
    assert num_submitted == 100
    assert most == 3
