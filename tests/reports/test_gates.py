"""Gates: how they are written, and when they pass, fail or stay undecided."""

from __future__ import annotations

import dataclasses
import re

import pytest

from specbench.errors import UserError
from specbench.records import DataIdentity, ModelIdentity
from specbench.reports.compare import compare
from specbench.reports.compared_run import ComparedRun, run_of_log
from specbench.reports.gates import (
    GateResult,
    check_paths,
    gates_exit_code,
    judge_comparison,
    judge_run,
    parse_gate,
    parse_gates,
)
from specbench.run_directory import EventLog
from tests.reports.event_logs import log_of_accepted, make_request, make_run, make_sample

LENGTH = "acceptance.acceptance_length"


def run(log: EventLog, k: int | None = 4, **changes: object) -> ComparedRun:
    return run_of_log(make_run(k, "none" if k is None else "mtp", **changes), log, "runs/x")


def judged(gate: str, base: ComparedRun, new: ComparedRun) -> GateResult:
    (result,) = judge_comparison([parse_gate(gate)], compare([base, new]))
    return result


def outcome(gate: str, base: ComparedRun, new: ComparedRun) -> str:
    return judged(gate, base, new).outcome


# ---- Reading


@pytest.mark.parametrize(
    ("text", "path", "operator", "factor", "offset"),
    [
        ("eval.accuracy >= 0.95", "eval.accuracy", ">=", None, 0.95),
        ("eval.accuracy>=.95", "eval.accuracy", ">=", None, 0.95),
        ("latency.ttft_ms.p50 < 1e3", "latency.ttft_ms.p50", "<", None, 1000.0),
        ("a.b[0] >= baseline", "a.b[0]", ">=", 1.0, 0.0),
        ("a >= 0.99 * baseline", "a", ">=", 0.99, 0.0),
        ("a <= baseline*1.1", "a", "<=", 1.1, 0.0),
        ("a >= baseline - 0.01", "a", ">=", 1.0, -0.01),
        ("a > 0.9*baseline+2", "a", ">", 0.9, 2.0),
        ("a == baseline", "a", "==", 1.0, 0.0),
    ],
)
def test_reading(text: str, path: str, operator: str, factor: float | None, offset: float) -> None:
    gate = parse_gate(text)
    assert (gate.path, gate.operator, gate.factor, gate.offset) == (path, operator, factor, offset)
    assert not gate.is_undecided_good


def test_undecided_can_be_good() -> None:
    assert parse_gate("a >= baseline undecided=pass").is_undecided_good
    assert [gate.is_undecided_good for gate in parse_gates(["a > 1", "b > 1"], is_undecided_good=True)] == [True, True]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a >= ",
        "a => 1",
        "a >= b",
        "a >= 1 * 2",
        "a >= 2 * baseline * 2",
        "a >= baseline undecided=maybe",
        "a > 1 2",
    ],
)
def test_what_is_no_gate_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="gate"):
        parse_gate(text)


# ---- Against a number


def test_a_number_is_compared_with_the_figure_itself() -> None:
    one = run(log_of_accepted([(4, 0)], 4))  # length 3
    results = judge_run(parse_gates([f"{LENGTH} >= 3", f"{LENGTH} > 3", f"{LENGTH} == 3", f"{LENGTH} <= 2.9"]), one)
    assert [result.outcome for result in results] == ["pass", "fail", "pass", "fail"]
    assert results[1].reason == "3 against 3"


def test_what_was_not_measured_fails() -> None:
    plain = run(EventLog([make_request("r0")]), k=None)
    for path in (LENGTH, "acceptance.per_position[0]", "latency.tpot_ms.p50", "eval.accuracy"):
        (result,) = judge_run([parse_gate(f"{path} >= 0")], plain)
        assert (result.outcome, result.reason) == ("fail", "not measured")
    assert outcome(f"{LENGTH} >= baseline", plain, run(log_of_accepted([(4,)], 4))) == "fail"


def test_an_unfinished_run_passes_no_gate() -> None:
    one = run(log_of_accepted([(4,)], 4), status="running")
    assert judge_run([parse_gate(f"{LENGTH} >= 0")], one)[0].reason == "the run did not finish"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("acceptence.acceptance_rate", "did you mean acceptance.acceptance_rate"),
        ("acceptance.acceptance_legnth", "did you mean acceptance.acceptance_length"),
        ("accuracy", "did you mean eval.accuracy"),
        ("eval.by.task.musik.accuracy", r"did you mean eval\.by\.task\.music\.accuracy"),
        ("zzz", "its blocks are"),
        ("acceptance", "not a number"),
        ("checks.identities.generated_tokens.holds", "a truth value"),
        ("eval.name", "not a number"),
        ("acceptance.drafts[0]", "no such path"),
        ("acceptance..drafts", "no such path"),
        ("acceptance.drafts.", "no such path"),
        ("acceptance.per_position[0]x", "no such path"),
    ],
)
def test_a_path_that_is_no_figure_is_refused(path: str, hint: str) -> None:
    log = log_of_accepted([(4,)], 4)
    log.samples = [make_sample("r0", 1.0, groups={"task": "music"})]
    one, gate = run(log), parse_gate(f"{path} > 0")
    with pytest.raises(UserError, match=hint):
        check_paths([gate], [one])
    (result,) = judge_run([gate], one)
    assert result.outcome == "fail" and re.search(hint, result.reason)


def test_bounds_of_intervals_are_figures() -> None:
    one = run(log_of_accepted(EVEN, 4))
    low, high = one.metrics["intervals"][LENGTH]
    gates = parse_gates([f"intervals.{LENGTH}[0] == {low!r}", f"intervals.{LENGTH}[1] > {high!r}"])
    assert [result.outcome for result in judge_run(gates, one)] == ["pass", "fail"]
    few = run(log_of_accepted([(4,)], 4))
    assert judge_run(gates, few)[0].reason == "not measured"


# ---- Against the baseline

#: Each sample accepts 2 on the mean, more or less.
EVEN = [(1, 3), (2, 2), (0, 4), (3, 1), (4, 1)] * 6


def shifted(by: int) -> list[tuple[int, int]]:
    return [(min(4, first + by), second) for first, second in EVEN]


def test_the_paired_interval_decides() -> None:
    base = run(log_of_accepted(EVEN, 4))
    better, same = run(log_of_accepted(shifted(1), 4)), run(log_of_accepted(EVEN, 4))
    assert outcome(f"{LENGTH} > baseline", base, better) == "pass"
    assert outcome(f"{LENGTH} >= baseline", better, base) == "fail"
    assert outcome(f"{LENGTH} >= baseline", base, same) == "pass", "every sample is the same"
    assert outcome(f"{LENGTH} == baseline", base, same) == "pass"
    assert outcome(f"{LENGTH} == baseline", base, better) == "fail"
    assert outcome(f"{LENGTH} > baseline", base, same) == "fail"


def test_an_interval_over_the_bound_is_undecided() -> None:
    mixed = [pair if index % 2 else (pair[1], pair[0] // 2) for index, pair in enumerate(EVEN)]
    base, new = run(log_of_accepted(EVEN, 4)), run(log_of_accepted(mixed, 4))
    result = judged(f"{LENGTH} >= 0.87 * baseline", base, new)
    assert result.outcome == "undecided" and result.interval is not None
    assert result.interval[0] < 0 < result.interval[1]
    assert result.exit_code == 4
    assert judged(f"{LENGTH} >= 0.87 * baseline undecided=pass", base, new).exit_code == 0
    assert outcome(f"{LENGTH} >= 0.5 * baseline", base, new) == "pass"
    assert outcome(f"{LENGTH} >= baseline - 1", base, new) == "pass"
    assert outcome(f"{LENGTH} == 0.87 * baseline", base, new) == "undecided"
    assert outcome(f"{LENGTH} >= baseline + 0.5", base, new) == "fail"


def test_a_point_estimate_on_the_good_side_is_not_enough() -> None:
    """One sample of many is better: the figure is above the bound, but as many draws leave that sample out."""
    once = [EVEN[0], *EVEN[1:]]
    once[0] = (4, 4)
    result = judged(f"{LENGTH} > baseline", run(log_of_accepted(EVEN, 4)), run(log_of_accepted(once, 4)))
    assert result.value > result.bound
    assert result.outcome == "undecided"


def test_accuracy_against_the_baseline() -> None:
    def answered(num_right: int) -> ComparedRun:
        log = log_of_accepted(EVEN, 4)
        log.samples = [make_sample(one.sample_id, float(i < num_right)) for i, one in enumerate(log.requests)]
        return run(log)

    assert outcome("eval.accuracy >= baseline - 0.01", answered(30), answered(30)) == "pass"
    assert outcome("eval.accuracy >= baseline - 0.01", answered(30), answered(28)) == "undecided"
    assert outcome("eval.accuracy >= baseline - 0.01", answered(30), answered(10)) == "fail"


def test_under_twenty_samples_a_baseline_decides_nothing() -> None:
    result = judged(f"{LENGTH} >= baseline", run(log_of_accepted(EVEN[:19], 4)), run(log_of_accepted(EVEN[:19], 4)))
    assert (result.outcome, result.reason) == ("undecided", "no interval: fewer than 20 samples")


def test_a_single_run_decides_nothing_of_speed() -> None:
    result = judged("latency.ttft_ms.p50 <= baseline", run(log_of_accepted(EVEN, 4)), run(log_of_accepted(EVEN, 4)))
    assert result.outcome == "undecided" and "load.repeats=3" in result.reason


def timed(seconds: float) -> ComparedRun:
    log = EventLog()
    for repeat in range(3):
        start = 100.0 * repeat
        times = {"arrival_s": start, "first_token_s": start + 0.1, "last_token_s": start + seconds + 0.01 * repeat}
        log.requests.append(make_request(f"r{repeat}", sample_id="s", repeat=repeat, num_output_tokens=2, **times))
    return run(log)


def test_three_repeats_decide_of_speed() -> None:
    gate = "latency.e2el_ms.mean <= 1.1 * baseline"
    assert outcome(gate, timed(1.0), timed(1.0)) == "pass"
    assert outcome(gate, timed(1.0), timed(1.5)) == "fail"


def test_a_figure_without_pairs_has_no_interval() -> None:
    result = judged("acceptance.draft_tokens <= baseline", run(log_of_accepted(EVEN, 4)), run(log_of_accepted(EVEN, 4)))
    assert result.outcome == "undecided" and "give the gate a number" in result.reason


def test_what_cannot_be_compared_fails() -> None:
    base = run(log_of_accepted(EVEN, 4))
    model = ModelIdentity("inkling", "inkling-nano", "/m", None, "0ther", True, 5_800_000, 8)
    data = DataIdentity("nano_problems", "/d", None, "0ther", True, 4)
    for changes in ({"model": model}, {"data": data}):
        other = run(log_of_accepted(EVEN, 4), **changes)
        assert "not comparable" in judged(f"{LENGTH} >= 0.5 * baseline", base, other).reason
        assert outcome(f"{LENGTH} >= 2", base, other) == "pass", "a number needs no comparison"
    other = run(log_of_accepted(EVEN, 4), hardware={"cpu": "another", "gpus": []})
    assert outcome("latency.e2el_ms.mean <= 2 * baseline", base, other) == "fail"
    assert outcome(f"{LENGTH} >= 0.5 * baseline", base, other) == "pass"
    broken = dataclasses.replace(base, record=dataclasses.replace(base.record, status="failed"))
    assert judged(f"{LENGTH} >= 0.5 * baseline", broken, base).reason == "the base run did not finish"


def test_exit_codes_by_weight() -> None:
    base, new = run(log_of_accepted(EVEN, 4)), run(log_of_accepted(EVEN, 4))
    good, undecided, bad = f"{LENGTH} >= 2", "latency.ttft_ms.p50 <= baseline", f"{LENGTH} >= 9"
    codes = [
        gates_exit_code(judge_comparison(parse_gates(texts), compare([base, new])))
        for texts in ([], [good], [good, undecided], [undecided, bad], [f"{undecided} undecided=pass"])
    ]
    assert codes == [0, 0, 4, 3, 0]


def test_every_new_run_is_judged() -> None:
    runs = [run(log_of_accepted(rows, 4)) for rows in (EVEN, EVEN, [(0, 0)] * 30)]
    results = judge_comparison(parse_gates([f"{LENGTH} >= 2"]), compare(runs))
    assert [(one.label, one.outcome) for one in results] == [("mtp4 #2", "pass"), ("mtp4 #3", "fail")]
