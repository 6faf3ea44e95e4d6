"""The report of a sweep, from run directories made here: rows, speed-up, what is marked as best and what is not."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest

from specbench.record_columns import EngineStepColumns
from specbench.records import OutputCheck
from specbench.reports.sweep import SweepReport
from specbench.reports.swept_jobs import JobEnding, shared_overrides, swept_jobs, tell_apart
from specbench.run_directory import EventLog, RunDirectory
from tests.reports.event_logs import make_request, make_run, make_sample, make_step


def timed(tokens_per_s: float, repeats: int, right: int = 1, k: int | None = 4) -> EventLog:
    """24 samples a repeat, one after the other; 9 output tokens a second and more, with a little noise by repeat."""
    log = EventLog()
    at = 0.0
    for repeat in range(repeats):
        for index in range(24):
            name, seconds = f"r{index}-{repeat}", 9 / tokens_per_s * (1 + 0.002 * repeat)
            times = {"arrival_s": at, "first_token_s": at + seconds / 3, "last_token_s": at + seconds}
            log.requests.append(make_request(name, sample_id=f"s{index}", repeat=repeat, num_output_tokens=9, **times))
            drafted, accepted, rows = (0, 0, 8) if k is None else (k, 1, 4)
            ends = [at + seconds * (1 + 2 * (row + 1) / rows) / 3 for row in range(rows)]
            steps = [
                make_step(name, row, drafted, accepted, output_index=1 + row * (accepted + 1), end_s=end)
                for row, end in enumerate(ends)
            ]
            log.verify_steps.extend(steps)
            log.samples.append(make_sample(f"s{index}", float(index < right), repeat=repeat))
            at += seconds
    return log


def ended(
    folder: Path, overrides: str, log: EventLog, k: int | None, status: str = "finished", **changes: object
) -> JobEnding:
    """A job that finished, with its run directory."""
    path = folder / overrides.replace(" ", ",")
    if not path.exists():
        method = "none" if k is None else "mtp"
        number = sum(1 for _ in folder.iterdir()) if folder.exists() else 0
        times = {"started_at": f"2026-11-01T00:{number:02}:00Z", "finished_at": f"2026-11-01T00:{number:02}:59Z"}
        run = make_run(k, method, **{"output_check": OutputCheck("identical", 24, 24), **times, **changes})
        run.config["load"] = {"concurrency": int(overrides.rpartition("=")[2])}
        directory = RunDirectory.create(path)
        directory.write_run(run)
        log.engine_steps = EngineStepColumns.of(log.engine_steps)
        directory.write_tables(log)
    return JobEnding(tuple(overrides.split()), status, 0, path, None)


def job(spec: str, concurrency: int = 1) -> str:
    return f"+model=inkling_nano spec={spec} load.concurrency={concurrency}"


def report(tmp_path: Path, *endings: JobEnding, objective: str | None = None) -> SweepReport:
    return SweepReport.of(endings, tmp_path, "specbench -m +model=inkling_nano", objective)


def rows(made: SweepReport) -> dict[str, dict[str, str]]:
    header, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in _table_lines(made.markdown)]
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines[1:]}


def _table_lines(markdown: str) -> list[str]:
    section = markdown.partition("## Jobs\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("|")]


# ---- What tells jobs apart


def test_jobs_are_named_by_what_differs() -> None:
    jobs = [["+model=a", "spec=none", "x=1"], ["+model=a", "spec=mtp1", "x=1"], ["+model=a", "spec=mtp1", "x=2"]]
    assert tell_apart(jobs) == [{"spec": "none", "x": "1"}, {"spec": "mtp1", "x": "1"}, {"spec": "mtp1", "x": "2"}]
    assert shared_overrides(jobs) == ["+model=a"]
    assert tell_apart([["spec=none"]]) == [{"spec": "none"}]
    assert tell_apart([["spec=none"], ["spec=none"]]) == [{"spec": "none"}] * 2, "a sweeper may deal a job twice"


# ---- Rows


def test_every_job_is_a_row_however_it_ended(tmp_path: Path) -> None:
    failed = JobEnding(tuple(job("mtp9").split()), "failed", 2, tmp_path / "x", "9 drafts need\n9 modules")
    lost = JobEnding(tuple(job("mtp2").split()), "lost", 1, None, "it left no word")
    made = report(
        tmp_path,
        ended(tmp_path / "jobs", job("none"), timed(100, 1, k=None), None),
        ended(tmp_path / "jobs", job("mtp4"), timed(150, 1), 4, "skipped", is_dirty=True),
        failed,
        lost,
    )
    found = rows(made)
    assert list(found) == ["spec=none", "spec=mtp4", "spec=mtp9", "spec=mtp2"]
    assert found["spec=none"]["Status"] == "finished"
    assert found["spec=mtp4"]["Status"] == "skipped: finished at 2026-11-01T00:01:59Z, commit abc with changes"
    assert found["spec=mtp9"]["Status"] == "failed: 9 drafts need 9 modules"
    assert found["spec=mtp2"]["Status"] == "lost: it left no word"
    assert found["spec=mtp4"]["Output check"] == "identical (24 of 24)"
    assert "# Sweep of 4 jobs: 1 finished, 1 skipped, 1 failed, 1 lost" in made.markdown
    assert "In every job: `+model=inkling_nano` `load.concurrency=1`" in made.markdown


def test_the_csv_has_a_column_for_each_override_and_unrounded_figures(tmp_path: Path) -> None:
    made = report(
        tmp_path,
        ended(tmp_path / "jobs", job("none"), timed(100, 1, k=None), None),
        ended(tmp_path / "jobs", job("mtp4"), timed(150, 1), 4),
        JobEnding(("+model=inkling_nano", "spec=mtp9"), "failed", 2, None, "sorry"),
    )
    plain, drafted, failed = csv.DictReader(io.StringIO(made.csv))
    assert (drafted["spec"], drafted["load.concurrency"], drafted["status"]) == ("mtp4", "1", "finished")
    assert math.isclose(float(drafted["output_token_per_s"]), 150) and float(drafted["speedup"]) == float(
        drafted["output_token_per_s"]
    ) / float(plain["output_token_per_s"])
    assert plain["acceptance_rate"] == plain["speedup"] == "", "nothing was drafted"
    assert failed["error"] == "sorry" and failed["output_token_per_s"] == "" and failed["exit_code"] == "2"


def test_the_objective_has_a_column_of_its_own(tmp_path: Path) -> None:
    ending = JobEnding(("spec=mtp4",), "finished", 0, None, None, objective=12.5)
    assert rows(report(tmp_path, ending, objective="eval.accuracy"))["spec=mtp4"]["Objective (eval.accuracy)"] == "12.5"


# ---- Speed-up


def test_speed_up_is_against_plain_decoding_at_the_same_settings(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    made = report(
        tmp_path,
        ended(folder, job("none", 1), timed(100, 1, k=None), None),
        ended(folder, job("none", 8), timed(400, 1, k=None), None),
        ended(folder, job("mtp4", 1), timed(150, 1), 4),
        ended(folder, job("mtp4", 8), timed(300, 1), 4),
    )
    found = rows(made)
    assert found["spec=mtp4 load.concurrency=1"]["Speed-up"] == "1.50"
    assert found["spec=mtp4 load.concurrency=8"]["Speed-up"] == "0.75"
    assert found["spec=none load.concurrency=1"]["Speed-up"] == "base"
    assert "Speed has no interval and is not tested: that takes load.repeats=3" in made.markdown


def test_without_a_plain_job_no_speed_up_is_claimed(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    made = report(
        tmp_path,
        ended(folder, job("none", 1), timed(100, 1, k=None), None),
        ended(folder, job("mtp4", 8), timed(300, 1), 4),
    )
    assert rows(made)["spec=mtp4 load.concurrency=8"]["Speed-up"] == "n/a"
    assert "No speed-up: no job with spec=none" in made.markdown


def test_repeats_give_the_speed_up_an_interval(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    base = ended(folder, job("none"), timed(100, 3, k=None), None)
    new = ended(folder, job("mtp4"), timed(150, 3), 4)
    found = swept_jobs([base, new])[1].speedup
    assert found is not None and found.interval is not None
    assert found.interval[0] <= 1.5 <= found.interval[1]


# ---- The best


@pytest.mark.parametrize(("repeats", "speed", "is_best"), [(3, 200, True), (1, 200, False), (3, 150.01, False)])
def test_the_fastest_is_marked_only_where_repeats_show_it(
    tmp_path: Path, repeats: int, speed: float, is_best: bool
) -> None:
    folder = tmp_path / "jobs"
    noisy = timed(150, repeats)
    for request in noisy.requests:  # slower and faster repeats than those of the other job
        factor = 1 + 0.1 * (request.repeat - 1)
        request_times = (request.arrival_s * factor, request.first_token_s * factor, request.last_token_s * factor)
        for name, value in zip(("arrival_s", "first_token_s", "last_token_s"), request_times, strict=True):
            object.__setattr__(request, name, value)
    jobs = swept_jobs(
        [
            ended(folder, job("none"), timed(100, repeats, k=None), None),
            ended(folder, job("mtp4"), noisy, 4),
            ended(folder, job("mtp2"), timed(speed, repeats), 4),
        ]
    )
    assert ["Output token throughput (tok/s)" in one.best_in for one in jobs] == [False, False, is_best]


def test_accuracy_is_best_only_by_more_than_chance(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    clear = [
        ended(folder, job("mtp1"), timed(100, 1, right=4), 4),
        ended(folder, job("mtp2"), timed(100, 1, right=20), 4),
    ]
    assert [one.best_in for one in swept_jobs(clear)] == [(), ("Accuracy (%)",)]
    unclear = [clear[1], ended(folder, job("mtp3"), timed(100, 1, right=21), 4)]
    assert [one.best_in for one in swept_jobs(unclear)] == [(), ()]


def test_jobs_at_the_same_time_have_no_best_speed(tmp_path: Path) -> None:
    folder, at_once = tmp_path / "jobs", {"started_at": "2026-11-01T00:00:00Z", "finished_at": "2026-11-01T00:00:09Z"}
    endings = [
        ended(folder, job("none"), timed(100, 3, k=None), None, **at_once),
        ended(folder, job("mtp4"), timed(200, 3), 4, **at_once),
    ]
    made = report(tmp_path, *endings)
    assert "**Jobs ran at the same time**" in made.markdown
    assert rows(made)["spec=mtp4"]["Best in"] == ""


def test_one_directory_named_twice_is_not_compared_with_itself(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    endings = [ended(folder, job("mtp4"), timed(200, 3), 4), ended(folder, job("mtp4"), timed(200, 3), 4, "skipped")]
    assert [one.best_in for one in swept_jobs(endings)] == [(), ()]
    assert not any(one.is_overlapped for one in swept_jobs(endings))


# ---- Plots


def test_plots_show_speed_per_user_and_acceptance_against_k(tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    made = report(
        tmp_path,
        ended(folder, job("none", 1), timed(100, 1, k=None), None),
        ended(folder, job("mtp2", 1), timed(120, 1, k=2), 2),
        ended(folder, job("mtp4", 1), timed(150, 1), 4),
    )
    assert set(made.files) == {"plots/pareto.svg", "plots/acceptance_against_k.svg", "sweep.csv", "sweep.md"}
    assert ">mtp4<" in made.files["plots/pareto.svg"]
    assert "![" in made.markdown and "(plots/pareto.svg)" in made.markdown


def test_a_sweep_of_failures_alone_has_no_plots(tmp_path: Path) -> None:
    made = report(tmp_path, JobEnding(("spec=mtp9",), "failed", 2, None, "sorry"))
    assert set(made.files) == {"sweep.csv", "sweep.md"}
