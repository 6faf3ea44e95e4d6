"""A run directory as pandas frames."""

from __future__ import annotations

from dataclasses import replace

import pytest

import specbench
import specbench.benchmark  # whatever else is imported, `specbench.load` stays what it is
from specbench.errors import UserError
from specbench.reports.metrics import compute_metrics
from specbench.run_directory import RunDirectory
from tests.reports.event_logs import make_run, simulate


@pytest.fixture
def directory(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_run(make_run(4))
    return directory


def test_three_lines_of_python(directory):
    log = simulate(seed=2)
    directory.write_tables(log)
    run = specbench.load(str(directory.path))
    assert run.metrics == compute_metrics(make_run(4), log)
    accepted = run.verify_steps.merge(run.requests, on="request_id").query("~is_warmup").num_accepted.sum()
    assert accepted == run.metrics["acceptance"]["accepted_tokens"] > 0
    assert run.verify_steps.request_id.tolist() == [step.request_id for step in log.verify_steps]
    assert len(run.engine_steps) == len(run.samples) == 0 and run.run.status == "finished"


def test_what_was_not_measured_is_null(directory):
    log = simulate(seed=2, num_requests=3)
    log.requests[2] = replace(log.requests[2], first_token_s=None)
    directory.write_tables(log)
    requests = specbench.load(directory.path).requests
    assert requests.first_token_s.isna().tolist() == [index == 2 for index in range(5)]


def test_no_run_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="not a run directory"):
        specbench.load(tmp_path)
