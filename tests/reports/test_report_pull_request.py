"""The body of a pull request: a screenful, everything else folded, and short enough to be posted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbench.reports.compare import compare
from specbench.reports.compared_run import ComparedRun, compared_run
from specbench.reports.gates import judge_run, parse_gates
from specbench.reports.metrics import metrics_of
from specbench.reports.pull_request import (
    MAX_CHARACTERS,
    MAX_VISIBLE_LINES,
    comparison_pull_request,
    run_pull_request,
)
from specbench.reports.step_columns import step_columns
from tests.reports.event_logs import make_run, make_sample, simulate


def make_compared(k: int, seed: int = 0, **changes: object) -> ComparedRun:
    run, log = make_run(k, **changes), simulate(seed, num_requests=24, k=k)
    run.config["spec"]["name"] = f"mtp{k}"
    log.samples = [make_sample(request.sample_id, 1.0) for request in log.requests if not request.is_warmup]
    columns = step_columns(log.requests, log.verify_steps)
    return compared_run(run, metrics_of(run, log, columns), columns, log.samples, log.engine_steps, f"runs/{k}")


def visible(text: str) -> list[str]:
    """Lines that a reader sees: all before the fold, its summary, and all behind it."""
    top, _, rest = text.partition("<details>\n")
    folded, _, bottom = rest.partition("</details>")
    assert folded.startswith("<summary>") and "<details" not in folded
    return [*top.splitlines(), folded.splitlines()[0], *bottom.strip().splitlines()]


@pytest.mark.parametrize("k", [1, 4, 8, 16, 40])
def test_a_run_takes_at_most_40_lines_and_shows_no_image(k):
    text = run_pull_request(make_compared(k))
    lines = visible(text)
    assert len(lines) <= MAX_VISIBLE_LINES
    assert "![" not in text and "<img" not in text and "<svg" not in text and len(text) < MAX_CHARACTERS
    assert lines[0].startswith("### inkling-nano (packaged") and "specbench +model=inkling spec=mtp8" in text
    assert any("Output check: **not checked**" in line for line in lines)
    assert sum(line.startswith("| Acceptance length") for line in lines) == 1
    assert "## What ran" in text.partition("<details>")[2]


def test_positions_stand_alone_where_there_is_room_and_in_one_row_where_not():
    assert "— Pos 3" in "\n".join(visible(run_pull_request(make_compared(4))))
    lines = visible(run_pull_request(make_compared(16)))
    assert not any("— Pos" in line for line in lines)
    assert any(line.startswith("| Per-position acceptance (%) ") and line.count("/") == 15 for line in lines)


def test_two_and_three_runs_have_differences_in_the_one_table():
    runs = [make_compared(k) for k in (1, 8, 4)]
    two = visible(comparison_pull_request(compare(runs[:2])))
    assert len(two) <= MAX_VISIBLE_LINES and two[0].startswith("### mtp8 against mtp1")
    (header,) = [line for line in two if line.startswith("| Metric ")]
    assert [cell.strip() for cell in header.strip("|").split("|")][:3] == ["Metric", "mtp1", "mtp8"] and "Δ" in header
    three = visible(comparison_pull_request(compare(runs)))
    assert len(three) <= MAX_VISIBLE_LINES and three[3:6] == [run.record.command for run in runs]


def test_warnings_that_do_not_fit_are_counted_and_stand_below():
    run = make_compared(8, notices=[f"notice {index}" for index in range(40)])
    text = run_pull_request(run)
    lines = visible(text)
    assert len(lines) <= MAX_VISIBLE_LINES
    (more,) = [line for line in lines if line.startswith("- … and ")]
    shown = sum(line.startswith("- Notice: ") for line in lines)
    assert 0 < shown < 40 and "notice 39" not in "\n".join(lines) and "notice 39" in text
    assert int(more.split()[3]) >= 40 - shown


def test_gates_come_first_and_failed_ones_by_name():
    run = make_compared(4)
    passing, failing = ["acceptance.acceptance_length >= 1"], ["eval.accuracy <= 0.5", "latency.ttft_ms.p50 >= 0"]
    gates = judge_run(parse_gates(passing), run)
    assert "- Gates: all 1 pass" in visible(run_pull_request(run, gates))
    lines = visible(run_pull_request(run, judge_run(parse_gates(failing), run)))
    assert [line for line in lines if "gate failed: eval.accuracy <= 0.5" in line] and "## Gates" not in lines


def test_what_a_model_wrote_cannot_end_the_fold():
    text = run_pull_request(make_compared(2, notices=["</details>"]))
    folded = text.partition("<details>")[2]
    assert folded.count("</details>") == 1 and folded.rstrip().endswith("</details>")


def test_too_long_a_report_names_what_it_left_out():
    run = make_compared(8)
    entry = run.metrics["acceptance"]["by_category"]["a"]
    many = {f"category {index}": entry for index in range(900)}
    run = replace(run, metrics=run.metrics | {"acceptance": run.metrics["acceptance"] | {"by_category": many}})
    text = run_pull_request(run)
    assert len(text) < MAX_CHARACTERS and "Left out, for a pull request holds no more: Acceptance by category" in text
