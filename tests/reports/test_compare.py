"""Two runs side by side: what may be compared, what a difference is, what is said of it."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest

from specbench.records import DataIdentity, ModelIdentity, OutputCheck, RunRecord
from specbench.reports.compare import Comparison, compare
from specbench.reports.compare_data import comparison_data
from specbench.reports.compare_sections import comparison_markdown, comparison_sections, verdict_lines
from specbench.reports.compared_run import ComparedRun, compared_run, run_of_log
from specbench.reports.gates import judge_comparison, parse_gates
from specbench.reports.latency import count_devices
from specbench.reports.metrics import metrics_of
from specbench.reports.pull_request import comparison_pull_request
from specbench.reports.side_by_side import benchmark_table, category_table, latency_table
from specbench.reports.statistics import holm
from specbench.reports.table import ReportTable, tables_of
from specbench.run_directory import EventLog
from tests.reports.event_logs import log_of_accepted, make_request, make_run, make_sample, make_step, simulate
from tests.reports.simulated_runs import draft_hits, drafted_run

MODEL = ModelIdentity("inkling", "inkling-nano", "/m", None, "f00d", True, 5_800_000, 8)
DATA = DataIdentity("nano_problems", "/d", None, "beef", True, 4)


def run(log: EventLog, k: int | None = 4, **changes: object) -> ComparedRun:
    method = "none" if k is None else "mtp"
    return run_of_log(make_run(k, method, **changes), log, "runs/x")


def cells(table: ReportTable | None) -> dict[str, list[str]]:
    assert table is not None
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def benchmark(found: Comparison) -> dict[str, list[str]]:
    return cells(benchmark_table(found.runs, found.changes))


def verdict(found: Comparison) -> str:
    return "\n".join(verdict_lines(found))


def with_config(record: RunRecord, group: str, **values: object) -> RunRecord:
    """The same record with other settings."""
    config = {name: dict(group_values) for name, group_values in record.config.items()}
    config.setdefault(group, {}).update(values)
    return dataclasses.replace(record, config=config)


# ---- Differences


def test_differences_are_of_unrounded_values() -> None:
    base = run(log_of_accepted([(4, 0, 2)], 4))
    new = run(log_of_accepted([(4, 4, 1)], 4))
    table = benchmark(compare([base, new]))
    assert table["Acceptance rate (%)"] == ["50.00", "75.00", "+25.00 pts"]
    assert table["Acceptance length"] == ["3.00", "4.00", "+33.3%"]
    assert table["Accepted tokens"] == ["6", "9", "+50.0%"]
    assert table["Per-position acceptance (%) — Pos 1"] == ["66.67", "66.67", "0.00 pts"]
    assert table["Per-position acceptance (%) — Pos 3"] == ["33.33", "66.67", "+33.33 pts"]


def test_a_run_without_speculation_has_no_drafts_and_no_positions() -> None:
    plain = EventLog([make_request("r0", num_output_tokens=2)], [make_step("r0", 0, 0, 0)])
    table = benchmark(compare([run(plain, k=None), run(log_of_accepted([(4,)], 4))]))
    assert table["Acceptance rate (%)"] == ["n/a", "100.00", "n/a"]
    assert table["Per-position acceptance (%) — Pos 0"] == ["—", "100.00", "—"]


def test_three_runs_have_a_difference_each() -> None:
    logs = [log_of_accepted([accepted], 4) for accepted in ((4, 0), (4, 4), (0, 0))]
    found = compare([run(log) for log in logs])
    table = benchmark_table(found.runs, found.changes)
    assert table.header == ("Metric", "mtp4 #1", "mtp4 #2", "mtp4 #3", "Δ mtp4 #2", "Δ mtp4 #3")
    assert cells(table)["Acceptance length"] == ["3.00", "5.00", "1.00", "+66.7%", "-66.7%"]


def test_every_table_has_a_name_that_a_file_can_have() -> None:
    found = compare([run(better_log(seed, 0.5)) for seed in (1, 2, 3)])
    names = [table.name for table in tables_of(comparison_sections(found))]
    assert len(set(names)) == len(names)
    assert {"differences", "differences_2"} <= set(names)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)


def test_labels_name_the_setting_that_tells_runs_apart() -> None:
    log = log_of_accepted([(1,)], 4)

    def labels(group: str, key: str, *values: object) -> list[str]:
        records = [with_config(make_run(4), group, **{key: value}) for value in values]
        return [one.label for one in compare([run_of_log(record, log, "runs/x") for record in records]).runs]

    assert labels("spec", "rejection_sample_method", "standard", "block") == ["mtp4 (standard)", "mtp4 (block)"]
    assert labels("load", "concurrency", 8, 16) == ["mtp4 (concurrency 8)", "mtp4 (concurrency 16)"]
    assert labels("spec", "faults", [], ["a", "b"]) == ["mtp4 (faults none)", "mtp4 (faults a, b)"]
    assert labels("report", "gates", [], ["a >= 1"]) == ["mtp4 #1", "mtp4 #2"], "gates change nothing that is measured"
    lacking = [run_of_log(make_run(4), log, "a"), run_of_log(with_config(make_run(4), "load", concurrency=8), log, "b")]
    assert [one.label for one in compare(lacking).runs] == ["mtp4 #1", "mtp4 #2"], "an older run has no such setting"


def better_log(seed: int, acceptance: float) -> EventLog:
    return simulate(seed, num_requests=60, acceptance=acceptance, num_warmup=0)


def test_a_large_difference_is_marked_and_says_its_interval() -> None:
    found = compare([run(better_log(1, 0.3)), run(better_log(2, 0.9))])
    table = benchmark(found)
    assert table["Acceptance rate (%)"][-1].endswith("pts (better)")
    assert table["Acceptance length"][-1].endswith("(better)")
    assert "95% interval +" in verdict(found) and "**better**" in verdict(found)
    assert benchmark(compare([run(better_log(2, 0.9)), run(better_log(1, 0.3))]))["Acceptance length"][-1].endswith(
        "(worse)"
    )


def test_a_run_against_itself_is_the_same_in_every_sample() -> None:
    one = run(better_log(1, 0.5))
    found = compare([one, one])
    assert " (0.0%): the same in every sample" in verdict(found)
    assert not {"better", "worse"} & set(comparison_markdown(found).split())


def test_no_visible_difference_says_what_could_have_been_seen() -> None:
    text = verdict(compare([run(better_log(1, 0.5)), run(better_log(3, 0.5))]))
    assert "no difference visible; one of 0." in text and "could have been seen" in text


def test_under_twenty_samples_nothing_is_tested() -> None:
    found = compare([run(log_of_accepted([(0, 0)] * 19, 4)), run(log_of_accepted([(4, 4)] * 19, 4))])
    assert "not tested: fewer than 20 samples" in verdict(found)
    assert benchmark(found)["Acceptance length"][-1] == "+400.0%"
    more = compare([run(log_of_accepted([(0, 0)] * 20, 4)), run(log_of_accepted([(4, 4)] * 20, 4))])
    assert benchmark(more)["Acceptance length"][-1] == "+400.0% (better)"


def test_runs_without_steps_say_so_whatever_their_samples() -> None:
    log = better_log(1, 0.5)
    log.verify_steps = []
    sums = run(log, acceptance_source="vllm bench serve")
    sums.metrics["acceptance"]["acceptance_length"] = 2.5
    assert "Acceptance length: 2.50 to 2.50 (0.0%); not tested: no verify steps in " in verdict(compare([sums, sums]))


def test_with_another_k_no_figure_of_drafts_has_a_direction() -> None:
    rows = [(4, 0, 2), (1, 1, 1)] * 20
    found = compare([run(log_of_accepted([(1, 0, 1)] * 40, 1), k=1), run(log_of_accepted(rows, 4))])
    table = benchmark(found)
    marked = {label for label, row in table.items() if "(" in row[-1]}
    assert marked == set()
    assert "k is 1 and 4" in verdict(found) and ": **different**" in verdict(found)


# ---- Speed


def timed(seconds: float, repeats: int) -> EventLog:
    """One request a repeat, each `seconds` long give or take."""
    log = EventLog()
    for repeat in range(repeats):
        start, end = 100.0 * repeat, 100.0 * repeat + seconds + 0.01 * repeat
        name = f"r{repeat}"
        times = {"arrival_s": start, "first_token_s": start + 0.1, "last_token_s": end}
        log.requests.append(make_request(name, sample_id="s", repeat=repeat, num_output_tokens=3, **times))
        log.verify_steps += [make_step(name, 0, 4, 1, end_s=end)]
    return log


def test_single_runs_show_no_interval_of_speed() -> None:
    found = compare([run(timed(1.0, 1)), run(timed(2.0, 1))])
    assert benchmark(found)["Output token throughput (tok/s)"] == ["3.00", "1.50", "-50.0%"]
    assert "no interval: 1 of the 3 repeats that one needs" in verdict(found)


def test_three_repeats_give_speed_an_interval_and_a_mark() -> None:
    found = compare([run(timed(1.0, 3)), run(timed(2.0, 3))])
    assert benchmark(found)["Median E2EL (ms)"][-1] == "+99.0% (worse)"
    assert cells(latency_table(found.runs, found.changes))["Median E2EL (ms)"][-1] == "+99.0% (worse)"
    assert "-1.5" in verdict(found) and "95% interval" in verdict(found)


def test_each_repeat_has_its_own_speed() -> None:
    one = run(timed(1.0, 3))
    first, second, third = one.speed_by_repeat
    assert [part["latency"]["itl_step_ms"]["n"] for part in (first, second, third)] == [1, 1, 1]
    assert [round(part["latency"]["itl_step_ms"]["mean"]) for part in (first, second, third)] == [900, 910, 920]
    assert [round(part["throughput"]["duration_s"], 2) for part in (first, second, third)] == [1.0, 1.01, 1.02]


def test_output_check_stands_beside_speed() -> None:
    check = OutputCheck("near_ties", 32, 30, 2, 0)
    found = compare([run(timed(1.0, 1), output_check=check), run(timed(1.0, 1))])
    assert benchmark(found)["Output check"] == ["near ties (2 of 32)", "not checked", ""]
    assert "output checks: near ties (2 of 32), not checked" in verdict(found)


# ---- Grounds


def test_another_model_leaves_only_standing_side_by_side() -> None:
    other = dataclasses.replace(MODEL, sha256="0ther")
    found = compare([run(better_log(1, 0.3)), run(better_log(1, 0.9), model=other)])
    assert verdict_lines(found)[0].startswith("**mtp4 #2: the models differ** (inkling-nano: sha256 f00d and 0ther)")
    table = benchmark(found)
    assert "n/a" not in table["Acceptance length"]
    assert {row[-1] for label, row in table.items() if label != "Output check"} == {"void"}
    assert "Texts:" not in comparison_markdown(found)


def test_without_hashes_names_decide_and_revisions_that_both_have() -> None:
    log = log_of_accepted([(1,)], 4)

    def is_paired(first: str | None, second: str | None) -> bool:
        runs = []
        for revision in (first, second):
            model = dataclasses.replace(MODEL, sha256=None, revision=revision)
            runs.append(run(log, model=model, data=dataclasses.replace(DATA, sha256=None, revision=revision)))
        return compare(runs).pairs[0].grounds.is_paired

    assert is_paired(None, None) and is_paired("r1", "r1") and is_paired("r1", None)
    assert not is_paired("r1", "r2")


def test_what_was_sampled_is_said_only_of_runs_known_to_be() -> None:
    log = log_of_accepted([(1,)], 4)
    log.samples = [make_sample("r0", 1.0)]

    def text(temperature: float | None) -> str:
        record = with_config(make_run(4), "sampling", temperature=temperature)
        return verdict(compare([run_of_log(record, log, "a"), run(log)]))

    assert "sampled above temperature 0" in text(1.0)
    assert "sampled" not in text(0.0) and "sampled" not in text(None)


def test_other_data_stands_unpaired() -> None:
    other = dataclasses.replace(DATA, sha256="0ther")
    found = compare([run(better_log(1, 0.3)), run(better_log(1, 0.9), data=other)])
    assert "**mtp4 #2: the samples differ** (nano_problems: sha256 beef and 0ther). Pairing is void" in verdict(found)
    assert re.fullmatch(r"\+\d+\.\d%", benchmark(found)["Acceptance length"][-1]), "a difference without a mark"
    assert "not tested: samples are not paired" in verdict(found)
    assert "Nothing was tested" in comparison_markdown(found)


def test_other_samples_of_the_same_data_stand_unpaired() -> None:
    found = compare([run(log_of_accepted([(1,)] * 3, 4)), run(log_of_accepted([(1,)] * 2, 4))])
    assert "3 and 2 samples, 2 of them in both" in verdict(found)


def test_another_scorer_leaves_answers_unpaired() -> None:
    log = better_log(1, 0.5)
    both = {"extracted": {"official": "1", "boxed": "1"}, "score": {"official": 1.0, "boxed": 1.0}}
    log.samples = [make_sample(request.sample_id, 1.0, **both) for request in log.requests]
    first = make_run(4)
    second = with_config(make_run(4), "eval", scorer="boxed")
    found = compare([run_of_log(record, log, "runs/x") for record in (first, second)])
    assert "the scorers differ** (scorer official and boxed)" in verdict(found)
    assert "Answers that changed" not in comparison_markdown(found)
    assert found.pairs[0].texts is not None, "texts do not depend on who scores them"


@pytest.mark.parametrize(
    ("hardware", "is_void"),
    [
        ({"cpu": "another processor", "gpus": []}, True),
        ({"cpu": "a processor", "gpus": [{"name": "a GPU", "memory": "80 GB", "driver": "1"}]}, True),
        ({"cpu": "a processor", "gpus": [], "system": "another kernel"}, False),
        ({"cpu": "a processor", "gpus": [], "at_start": {"load_average": [9, 9, 9]}}, False),
    ],
)
def test_other_hardware_voids_differences_in_speed(hardware: dict, is_void: bool) -> None:
    found = compare([run(timed(1.0, 1)), run(timed(2.0, 1), hardware=hardware)])
    table = benchmark(found)
    assert (table["Benchmark duration (s)"][-1] == "void") == is_void
    assert ("the hardware differs" in verdict(found)) == is_void
    assert table["Acceptance length"][-1] == "0.0%", "drafts do not depend on it"


def test_what_differs_is_listed_and_nothing_else() -> None:
    log = log_of_accepted([(1,)], 4)
    first = make_run(4)
    second = with_config(make_run(4, commit="def", is_dirty=True, packages={"torch": "2.12.0"}), "load", concurrency=16)
    text = comparison_markdown(compare([run_of_log(record, log, "runs/x") for record in (first, second)]))
    rows = text.split("## What differs\n")[1].split("\n## ")[0]
    names = [line.split("|")[1].strip() for line in rows.splitlines() if line.startswith("|")][2:]
    assert names == ["Setting load.concurrency", "specbench", "Package torch"]
    assert "commit def with changes" in rows


def test_nothing_that_differs_is_said() -> None:
    one = run(log_of_accepted([(1,)], 4))
    assert "Nothing: settings, code, packages" in comparison_markdown(compare([one, one]))


# ---- What is wrong with a run


def test_failed_and_unfinished_runs_are_named_first() -> None:
    log = log_of_accepted([(1,)], 4)
    log.requests.append(make_request("bad", finish_reason="error", num_output_tokens=0, first_token_s=None))
    found = compare([run(log, status="failed", error="out of memory"), run(log, status="running")])
    text = verdict(found)
    assert "**mtp4 #1 failed**: out of memory" in text
    assert "**mtp4 #2 is unfinished**: its figures cover 1 completed requests" in text
    assert "1 requests failed or were aborted" in text


def test_hardware_that_is_not_recorded_is_named() -> None:
    one = run(log_of_accepted([(1,)], 4), hardware={})
    assert verdict(compare([one, one])).count("its hardware is not recorded") == 2


def test_broken_identities_and_mismatches_are_named() -> None:
    log = log_of_accepted([(1,)], 4)
    log.requests[0] = dataclasses.replace(log.requests[0], num_output_tokens=9)
    found = compare([run(log), run(log, output_check=OutputCheck("mismatch", 1, 0, 0, 1))])
    assert "identities broken** (generated_tokens, tokens_of_each_request)" in verdict(found)
    assert "its output check failed" in verdict(found)


def test_position_0_names_each_term_that_is_not_zero() -> None:
    pairs = [(0, 1), (0, 0), (1, 1), (1, 0)] * 20
    base = run(log_of_accepted([*pairs, *[(2, 1)] * 40], 2), k=2)
    new = run(log_of_accepted([*pairs, *[(0, 1)] * 40], 2), k=2)
    text = verdict(compare([base, new]))
    line = next(line for line in text.splitlines() if line.startswith("Position 0"))
    shown = [float(found) for found in re.findall(r"([+-][0-9.]+) pts", line)]
    before, after = (float(found) for found in re.findall(r"([0-9.]+)%", line))
    assert "pts come from classes that only one run has" in line
    assert len(shown) == 3 and sum(shown) == pytest.approx(after - before, abs=0.03)
    assert "only one run has" not in verdict(compare([base, base])), "a term of zero is not named"


def with_state(one: ComparedRun, faults: list[str], **health: str) -> ComparedRun:
    """The same run with faults, and with these health checks alone."""
    checks = [{"name": name, "status": status} for name, status in health.items()]
    record = with_config(one.record, "spec", faults=faults)
    return dataclasses.replace(one, record=record, metrics=one.metrics | {"health": checks})


def test_faults_and_raised_health_checks_come_first_in_a_line_a_run() -> None:
    one = run(better_log(1, 0.5))
    bad = with_state(one, ["raw_embedding"], near_zero="warning", cliff="failed", fine="ok", unseen="not_checked")
    found = compare([with_state(one, []), bad, with_state(one, [], cliff="warning")])
    labels = [each.label for each in found.runs]
    assert verdict_lines(found)[:2] == [
        f"**{labels[1]}**: **faults injected on purpose**: raw_embedding; **health checks**: failed cliff; warning "
        "near_zero",
        f"**{labels[2]}**: **health checks**: warning cliff",
    ]
    assert verdict(found).count("health checks") == 2
    assert verdict(found).index("health checks") < verdict(found).index("Output checks")
    gates = judge_comparison(parse_gates([f"acceptance.acceptance_length >= {bound}" for bound in range(50)]), found)
    shown = comparison_pull_request(found, gates).partition("<details>")[0]
    assert "raw_embedding" in shown and shown.count("**health checks**") == 2 and "gate" in shown


def test_runs_without_any_spread_have_no_interval_and_no_smallest_visible_difference() -> None:
    one = run(better_log(1, 0.5))
    found = compare([one, one])
    table = next(table for table in tables_of(comparison_sections(found)) if table.name == "differences")
    tested = [row for row in _texts_of(table) if row[8] != "not tested"]
    assert len(tested) > 5
    for row in tested:
        assert (row[3:5], row[7:]) == (["n/a", "n/a"], ["n/a", "the same in every sample"])
    text = comparison_markdown(found)
    assert "0.00 to" not in text and "0.000 to" not in text
    other = compare([run(better_log(1, 0.5)), run(better_log(3, 0.5))])
    table = next(table for table in tables_of(comparison_sections(other)) if table.name == "differences")
    assert all((row[7] == "n/a") == (row[8] == "not tested") and "same" not in row[8] for row in _texts_of(table))


def _texts_of(table: ReportTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in table.rows]


def test_speed_is_labelled_by_the_mean_of_repeats_and_its_interval_has_a_unit() -> None:
    found = compare([run(timed(1.0, 3)), run(timed(2.0, 3))])
    table = next(table for table in tables_of(comparison_sections(found)) if table.name == "differences")
    assert "Median E2EL (ms), mean of repeats" in cells(table)
    line = next(line for line in verdict_lines(found) if line.startswith("Output token throughput"))
    assert re.search(r"; mean of repeats -1\.\d\d tok/s, 95% interval -1\.\d\d to -1\.\d\d tok/s: worse$", line)
    same = compare([run(timed(1.0, 3)), run(timed(1.0, 3))])
    line = next(line for line in verdict_lines(same) if line.startswith("Output token throughput"))
    assert line.endswith(": the same in every repeat")
    better = compare([run(better_log(1, 0.3)), run(better_log(2, 0.9))])
    length = next(line for line in verdict_lines(better) if line.startswith("Acceptance length"))
    assert length.endswith(" tokens: **better**")


# ---- Answers


def answered(*scores: float | None, extracted: str | None = "1", repeats: int = 1) -> EventLog:
    log = EventLog()
    for index, score in enumerate(scores):
        name = f"s{index // repeats}"
        log.requests.append(make_request(f"{name}-{index}", sample_id=name, repeat=index % repeats))
        log.samples.append(make_sample(name, score, repeat=index % repeats, extracted={"official": extracted}))
    return log


def flips(base: EventLog, new: EventLog) -> tuple[int, int, int, float | None]:
    answers = compare([run(base), run(new)]).changes[0].answers
    assert answers is not None
    found = answers.flips
    return found.compared, found.only_base, found.only_new, found.p_value


def test_flips_both_ways() -> None:
    base, new = answered(1.0, 1.0, 1.0, 0.0, 0.0), answered(1.0, 0.0, 0.0, 1.0, 0.0)
    assert flips(base, new) == (5, 2, 1, 1.0)
    # Eight against none: 2 / 2^8.
    assert flips(answered(*[1.0] * 9), answered(*[0.0] * 8, 1.0)) == (9, 8, 0, pytest.approx(2 / 256))


def test_invalid_answers_and_failed_requests_are_wrong() -> None:
    assert flips(answered(1.0, 1.0), answered(1.0, 1.0, extracted=None)) == (2, 2, 0, 0.5)
    failed = answered(1.0, 1.0)
    failed.requests[0] = dataclasses.replace(failed.requests[0], finish_reason="error")
    assert flips(answered(1.0, 1.0), failed) == (2, 1, 0, 1.0)
    del failed.samples[0]
    assert flips(answered(1.0, 1.0), failed) == (2, 1, 0, 1.0)


def test_a_failed_request_without_a_reference_is_no_answer() -> None:
    base, new = answered(1.0, 1.0), answered(1.0, 1.0)
    new.requests[0] = dataclasses.replace(new.requests[0], finish_reason="error")
    new.samples[0] = dataclasses.replace(new.samples[0], score={}, reference=None)
    assert flips(base, new) == (1, 0, 0, 1.0)


def test_accuracy_is_tested_by_its_flips_and_adjusted_with_its_family() -> None:
    base, new = better_log(1, 0.5), better_log(4, 0.5)
    for log, wrong in ((base, 0), (new, 6)):
        log.samples = [make_sample(one.sample_id, float(i >= wrong)) for i, one in enumerate(log.requests)]
    found = compare([run(base), run(new)])
    headline = found.changes[0].family("headline")
    accuracy = found.changes[0].by_path["eval.accuracy"]
    assert accuracy.p_value == pytest.approx(2 / 2**6)
    assert [one.adjusted_p_value for one in headline] == holm([one.p_value for one in headline])
    assert accuracy in headline and len(headline) == 3
    positions = found.changes[0].family("positions")
    assert [one.adjusted_p_value for one in positions] == holm([one.p_value for one in positions])


def test_repeats_of_a_sample_are_not_taken_for_independent() -> None:
    assert flips(answered(1.0, 1.0, repeats=2), answered(0.0, 0.0, repeats=2)) == (2, 2, 0, None)


# ---- Categories


def test_categories_side_by_side() -> None:
    logs = [log_of_accepted([(4,), (0,)] * 20, 4) for _ in range(2)]
    logs[0].requests = [
        dataclasses.replace(one, category=name) for one, name in zip(logs[0].requests, "ab" * 20, strict=True)
    ]
    logs[1].requests = [dataclasses.replace(one, category="a") for one in logs[1].requests]
    found = compare([run(log) for log in logs])
    table = cells(category_table(found.runs, found.changes))
    assert table == {"a": ["20", "5.00", "40", "3.00", "-40.0%"], "b": ["20", "1.00", "n/a", "n/a", "n/a"]}


# ---- Layouts


def test_acceptance_does_not_depend_on_the_layout() -> None:
    first, second = make_run(4), with_config(make_run(4), "parallel", name="tp2", tensor_parallel_size=2)
    log = better_log(1, 0.5)
    turned = EventLog(list(reversed(log.requests)), list(log.verify_steps))
    same = compare([run_of_log(first, log, "a"), run_of_log(second, turned, "b")])
    named = "Layouts (tensor parallel over 2 ranks against one rank): acceptance is"
    assert f"{named} **identical** in all {len(log.verify_steps)} steps" in verdict(same)
    steps = list(log.verify_steps)
    place = next(index for index, step in enumerate(steps) if step.step == 2 and step.num_accepted == 0)
    steps[place] = dataclasses.replace(steps[place], num_accepted=1)
    other = compare([run_of_log(first, log, "a"), run_of_log(second, EventLog(log.requests, steps), "b")])
    assert f"first at step 2 of sample {steps[place].request_id}" in verdict(other)


def test_layouts_are_named_as_they_were_asked_for() -> None:
    log = better_log(1, 0.5)
    runs = [run_of_log(with_config(make_run(4), "parallel", name=name), log, name) for name in ("tp1", "tp2")]
    assert [run.label for run in compare(runs).runs] == ["mtp4 (tp1)", "mtp4 (tp2)"]


def test_devices_are_fewer_than_ranks_where_these_share_them() -> None:
    assert count_devices({"parallel": {"tensor_parallel_size": 4}}) == 4
    assert count_devices({"parallel": {"tensor_parallel_size": 4, "ranks_per_gpu": 2}}) == 2
    assert count_devices({"parallel": {"tensor_parallel_size": None}}) is None


def test_layouts_are_not_checked_where_anything_else_differs() -> None:
    first = make_run(4)
    second = with_config(with_config(make_run(4), "parallel", tensor_parallel_size=2), "spec", trim_to_max_tokens=True)
    log = better_log(1, 0.5)
    assert compare([run_of_log(first, log, "a"), run_of_log(second, log, "b")]).pairs[0].layout is None
    assert compare([run_of_log(first, log, "a"), run_of_log(first, log, "b")]).pairs[0].layout is None


# ---- Equal drafters


def simulated(k: int) -> ComparedRun:
    """The same hits at every token of the same texts, whatever k."""
    drafted = drafted_run(f"mtp{k}", draft_hits(60, 200, 8, np.random.default_rng(7))[:, :, :k])
    record, log = make_run(k), EventLog(drafted.columns.requests, [], [], list(drafted.samples))
    return compared_run(
        record, metrics_of(record, log, drafted.columns), drafted.columns, drafted.samples, [], f"runs/{k}"
    )


def test_no_sentence_calls_one_of_two_equal_drafters_better() -> None:
    found = compare([simulated(1), simulated(8)])
    text = comparison_markdown(found)
    rates = [one.metrics["acceptance"]["per_position"][0] for one in found.runs]
    assert rates[0] - rates[1] > 0.02, "as in practice, position 0 is lower with 8"
    assert "their first drafts agree at all of them" in text
    assert "with another k, text of other difficulty is behind it too" in verdict(found)
    assert "better" not in text.replace("none of them is better or worse", "")


# ---- Odd runs


def odd_runs() -> dict[str, ComparedRun]:
    failed = {"finish_reason": "error", "num_output_tokens": 0, "first_token_s": None, "last_token_s": None}
    plain = EventLog(
        [make_request(f"r{index}", num_output_tokens=2) for index in range(20)],
        [make_step(f"r{index}", 0, 0, 0) for index in range(20)],
    )
    return {
        "empty": run(EventLog()),
        "one request": run(log_of_accepted([(4,)], 4)),
        "steps that draft fewer": run(simulate(1, 30, is_ragged=True)),
        "another k": run(simulate(1, 30, k=1), k=1),
        "plain": run(plain, k=None),
        "nothing but failures": run(EventLog([make_request(f"r{index}", **failed) for index in range(20)])),
        "warm-up alone": run(simulate(1, 0, num_warmup=2)),
        "resumed": run(simulate(1, 30), num_segments=2),
        "unfinished": run(simulate(1, 30), status="running", hardware={}, packages={}),
    }


def test_any_two_runs_stand_side_by_side() -> None:
    runs = odd_runs()
    for base in runs.values():
        found = compare([base, *runs.values()])
        text = comparison_markdown(found)
        assert not re.search(r"\bnan\b|\binf\b|None", text)
        json.dumps(comparison_data(found), allow_nan=False)
