"""report.md and the closing table: order, what must stand beside what, and nothing invented."""

from __future__ import annotations

import re

from specbench.records import DataIdentity, ModelIdentity, OutputCheck
from specbench.reports.markdown import report_markdown
from specbench.reports.markdown_table import markdown_table
from specbench.reports.metrics import compute_metrics
from specbench.reports.report_files import recompute
from specbench.reports.terminal_summary import summary_rows
from specbench.run_directory import EventLog, RunDirectory
from tests.reports.event_logs import make_request, make_run, make_sample, make_step, simulate

CHECK = OutputCheck("near_ties", 32, 30, 2, 0, max_logit_difference=0.004, largest_margin=0.0012, allowed_margin=0.008)


def report(log: EventLog | None = None, **changes: object) -> str:
    run = make_run(4, **{"output_check": CHECK, **changes})
    return report_markdown(run, compute_metrics(run, simulate(1) if log is None else log))


def headings(text: str) -> list[str]:
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def section(text: str, title: str) -> str:
    return text.split(f"## {title}\n")[1].split("\n## ")[0]


def test_sections_in_order():
    assert headings(report()) == [
        "What ran",
        "Verdict",
        "Health",
        "Accuracy",
        "Speed",
        "Where the time goes",
        "Acceptance",
        "Acceptance by position",
        "Acceptance given the previous step",
        "Accepted drafts a step",
        "Acceptance by category",
        "Acceptance by condition",
    ]


def test_packaged_model_and_data_say_what_they_are_not():
    text = report()
    assert text.startswith("# inkling-nano (packaged, 5.8 M parameters): not Inkling\n")
    assert "mtp4 on nano_problems: made-up problems, not GSM8K" in text
    real = report(
        model=ModelIdentity("inkling", "thinkingmachines/Inkling", "/m", "r1", "f00d", False),
        data=DataIdentity("gsm8k", "/d", None, "beef", False, 4),
    )
    assert real.startswith("# thinkingmachines/Inkling\n\nmtp4 on gsm8k\n")
    assert "packaged" not in real


def test_random_weights_are_in_the_title_and_score_nothing():
    config = make_run(4).config
    text = report(config=config | {"model": {"load": "random"}})
    assert "random weights (the text means nothing)" in text.split("## ")[0]
    assert "**Not given**: the weights are random" in section(text, "Accuracy")


def test_output_check_stands_in_the_verdict_and_beside_speed():
    text = report()
    sentence = (
        "Output check: **identical but for near ties**; 30 identical, 2 with near ties, 0 different of 32 requests "
        "replayed without speculation; largest margin of a differing token 0.0012 "
        "(a near tie up to 0.008); largest logit difference between "
        "verify rows and single rows 0.004"
    )
    assert sentence in section(text, "Verdict")
    assert sentence in section(text, "Speed")
    assert "Output check: **not checked**" in section(report(output_check=None), "Speed")


def test_differing_tokens_are_listed():
    difference = {"request_id": "r1", "output_index": 7, "emitted": 3, "expected": 4, "margin": 0.25}
    text = report(output_check=OutputCheck("mismatch", 32, 31, 0, 1, differences=[difference]))
    assert "**MISMATCH**" in text
    assert re.search(r"\| r1 +\| +7 \| +3 \| +4 \| +0.25 \|", section(text, "Verdict"))


def test_notices_failures_and_errors_are_in_the_verdict():
    log = simulate(1)
    log.requests.append(
        make_request("x", finish_reason="error", first_token_s=None, last_token_s=None, num_output_tokens=0)
    )
    text = section(report(log, notices=["Speculation loses here: 0.9 of the plain run."], error="ran out"), "Verdict")
    assert "- Notice: Speculation loses here: 0.9 of the plain run." in text
    assert "**20 completed, 1 failed, 0 aborted**; 2 of warm-up" in text
    assert "- **Failed**: ran out" in text


def test_p99_of_few_requests_is_marked():
    assert re.search(r"\| TTFT \(ms\) .*\d\* \|", section(report(), "Speed"))
    assert "of 20 requests, under 100" in report()
    assert "*" not in section(report(simulate(1, num_requests=100)), "Speed").split("| Latency")[1]


def test_positions_are_also_joined_as_pull_requests_print_them():
    log = EventLog([make_request("r", num_output_tokens=9)])
    log.verify_steps = [make_step("r", step, 2, accepted) for step, accepted in enumerate((2, 1, 0, 1))]
    text = section(report(log), "Acceptance by position")
    assert re.search(r"\| Per-position acceptance \(%\) +\| 75.0 / 25.0 / 0.0 / 0.0 +\|", text)
    assert re.search(r"\| Given the previous position \(%\) +\| 75.0 / 33.3 / n/a / n/a +\|", text)


def test_speculation_off_says_so_and_prints_no_zero():
    log = EventLog([make_request("r", num_output_tokens=3)], [make_step("r", step, 0, 0) for step in range(2)])
    run = make_run(None, method="none")
    text = report_markdown(run, compute_metrics(run, log))
    for title in headings(text)[6:]:
        assert section(text, title).strip() == "Nothing was drafted: speculation was off."
    assert "Acceptance by category" not in text


def test_nothing_measured_prints_na():
    text = report(EventLog())
    assert re.search(r"\| TTFT \(ms\) +\| +0 \| +n/a \| +n/a \| +n/a \| +n/a \|", text)
    assert re.search(r"\| Output token throughput \(tok/s\) +\| +n/a \|", text)
    assert re.search(r"\| Prefix cache hit rate \(tokens\) +\| +n/a \|", text)
    assert "Nothing was scored." in text


def test_published_cache_rate():
    asked = [
        make_request("a", num_prompt_tokens=800_000, num_cached_prompt_tokens=716_992),
        make_request("b", num_prompt_tokens=52_381, num_cached_prompt_tokens=0),
    ]
    not_asked = make_request("c", num_prompt_tokens=77, num_cached_prompt_tokens=None)
    warmup = make_request("w", num_prompt_tokens=77, num_cached_prompt_tokens=77, is_warmup=True)
    assert "84.12% (716,992/852,381)" in report(EventLog([*asked, not_asked, warmup]))


def test_accuracy_names_its_scorer_and_shows_all():
    log = EventLog([make_request("a"), make_request("b")])
    log.samples = [make_sample("a", 1.0), make_sample("b", 0.0, extracted={"official": None}, is_truncated=True)]
    text = section(report(log), "Accuracy")
    assert "**50.00% (1/2)** by the scorer `official`, 95% Wilson interval" in text
    assert re.search(r"\| Invalid \(nothing extracted\) +\| +50.00% \(1/2\) \|", text)
    assert "| official (headline) |" in text


def test_tables_are_aligned_and_escape_bars():
    lines = markdown_table(("A", "B"), [("x|y", "1"), ("z", "1,000")]).splitlines()
    assert lines == ["| A    |     B |", "| ---- | ----: |", "| x\\|y |     1 |", "| z    | 1,000 |"]
    tables = [line for line in report().splitlines() if line.startswith("|")]
    assert all(line.endswith(" |") for line in tables)


def test_recompute_works_on_a_killed_run_and_says_unfinished(tmp_path):
    log = simulate(1)
    directory = RunDirectory.create(tmp_path / "run")
    directory.write_run(make_run(4, status="running"))
    with directory.open_journal() as journal:
        for request in log.requests[:5]:
            steps = [step for step in log.verify_steps if step.request_id == request.request_id]
            journal.append_request(request, steps, None)
    with (tmp_path / "run" / "journal.jsonl").open("a") as file:
        file.write('{"kind":"request","request":{"request_id":"torn')
    report = recompute(tmp_path / "run")
    metrics, text = report.metrics, report.markdown
    assert metrics["requests"] == {"completed": 3, "failed": 0, "aborted": 0, "warmup": 2, "warmup_failed": 0}
    assert "**Unfinished**: the run is still going or was killed; these figures cover 3 completed requests." in text
    assert (tmp_path / "run" / "report.md").read_text() == text


def test_recompute_gives_the_same_from_tables_as_from_the_journal(tmp_path):
    log = simulate(2, is_ragged=True)
    directory = RunDirectory.create(tmp_path / "run")
    run = make_run(4)
    directory.write_run(run)
    directory.write_tables(log)
    assert recompute(tmp_path / "run").metrics == compute_metrics(run, log)


def test_closing_table_holds_the_verdict_and_marks_trouble():
    run = make_run(4, output_check=OutputCheck("mismatch", 32, 31, 0, 1), status="running")
    rows = {row.label: row for row in summary_rows(run, compute_metrics(run, simulate(1)))}
    assert rows["Output check"].level == "bad" and rows["Output check"].value.startswith("MISMATCH; 31 identical")
    assert rows["Model"].value == "inkling-nano (packaged, 5.8 M parameters): not Inkling"
    assert rows["Unfinished"].level == "bad"
    assert rows["Identities"].level == "good"
    off = make_run(None, method="none")
    closing = summary_rows(off, compute_metrics(off, EventLog()))
    assert closing[-1].value == "nothing was drafted"
    assert not any(row.value in ("0", "0.00", "0.00%") for row in closing)
