"""The identities hold on every sound log and break when a record is changed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbench.reports.identities import broken_identities
from specbench.reports.markdown import report_markdown
from specbench.reports.metrics import compute_metrics
from tests.reports.event_logs import make_run, simulate


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("is_ragged", [False, True])
def test_they_hold_on_sound_logs(seed, is_ragged):
    metrics = compute_metrics(make_run(4), simulate(seed, is_ragged=is_ragged))
    assert broken_identities(metrics) == []
    identities = metrics["checks"]["identities"]
    assert identities["sum_of_positions"]["holds"] and identities["generated_tokens"]["holds"]
    assert identities["rate_from_length"]["holds"] is (None if is_ragged else True)
    for check in identities.values():
        assert check["left"] == pytest.approx(check["right"])


def corrupt_step(**changes):
    def change(log):
        log.verify_steps[-1] = replace(log.verify_steps[-1], **changes)

    return change


def corrupt_request(log):
    log.requests[-1] = replace(log.requests[-1], num_output_tokens=log.requests[-1].num_output_tokens + 1)


@pytest.mark.parametrize(
    ("corrupt", "broken"),
    [
        (corrupt_step(num_accepted=7), {"sum_of_positions", "generated_tokens", "rows_consistent"}),
        (corrupt_step(num_discarded=9), {"generated_tokens", "rows_consistent"}),
        (corrupt_step(num_emitted=0), {"tokens_of_each_request", "rows_consistent"}),
        (corrupt_step(is_trimmed=True, num_discarded=0, num_emitted=1, num_accepted=0), {"rows_consistent"}),
        (corrupt_step(request_id="nobody"), {"rows_consistent"}),
        (corrupt_step(step=99), {"rows_consistent"}),
        (lambda log: log.verify_steps.pop(), {"generated_tokens", "tokens_of_each_request"}),
        (corrupt_request, {"generated_tokens", "tokens_of_each_request"}),
    ],
)
def test_they_break_when_a_record_is_changed(corrupt, broken):
    log = simulate(1)
    corrupt(log)
    metrics = compute_metrics(make_run(4), log)
    assert broken <= set(broken_identities(metrics))
    assert "**BROKEN**" in report_markdown(make_run(4), metrics)


def test_tokens_behind_a_stop_are_counted_as_discarded():
    log = simulate(2, acceptance=0.95)
    discarded = sum(step.num_discarded for step in log.verify_steps)
    assert discarded > 0
    generated = compute_metrics(make_run(4), log)["checks"]["identities"]["generated_tokens"]
    measured = {request.request_id for request in log.requests if not request.is_warmup}
    rows = [step for step in log.verify_steps if step.request_id in measured]
    expected = len(rows) + sum(step.num_accepted - step.num_discarded for step in rows) + len(measured)
    assert generated == {"left": expected, "right": expected, "holds": True}
