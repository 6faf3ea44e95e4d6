"""Gates: conditions on a run's figures that make a build pass or fail.

Belongs here: reading a gate, judging it, the exit code. Does not belong here: figures, tables (compare_sections.py).

    acceptance.acceptance_length >= 0.99 * baseline          against the base run
    eval.accuracy >= baseline - 0.01 undecided=pass          undecided does not stop the build
    throughput.output_token_per_s >= 2000                    against a number

Against a number the figure itself decides. Against the baseline the paired interval of figure minus bound decides:
wholly on the good side it passes, wholly on the other it fails, and else it is undecided. What was not measured, what
cannot be compared and what belongs to a run that did not finish fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specbench.errors import UserError
from specbench.reports.compare import Comparison, Pair
from specbench.reports.compared_run import ComparedRun
from specbench.reports.metric_path import check_path, number_at
from specbench.reports.sample_sums import SampleSums
from specbench.reports.statistics import (
    MIN_REPEATS,
    MIN_SAMPLES,
    Interval,
    bootstrap,
    num_counted,
    paired_repeat_difference,
    percentile_interval,
)

FAILED_EXIT_CODE, UNDECIDED_EXIT_CODE = 3, 4
Outcome = Literal["pass", "fail", "undecided"]

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_GATE = re.compile(
    rf"(?P<path>[^\s<>=*]+)\s*(?P<operator><=|>=|==|<|>)\s*"
    rf"(?:(?P<number>{_NUMBER})"
    rf"|(?:(?P<before>{_NUMBER})\s*\*\s*)?(?P<baseline>baseline)(?:\s*\*\s*(?P<after>{_NUMBER}))?"
    rf"(?:\s*(?P<sign>[+-])\s*(?P<offset>\d+\.?\d*|\.\d+))?)"
    rf"(?:\s+undecided\s*=\s*(?P<undecided>\w+))?"
)
_HOLDS: dict[str, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    "<=": lambda value, bound: value <= bound,
    ">": lambda value, bound: value > bound,
    "<": lambda value, bound: value < bound,
    "==": lambda value, bound: value == bound,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """PATH OPERATOR factor * baseline + offset; without a baseline the offset alone."""

    text: str
    path: str
    operator: str
    #: None against a number.
    factor: float | None
    offset: float
    is_undecided_good: bool

    def bound(self, baseline: float | None) -> float | None:
        """None where the baseline was not measured."""
        if self.factor is None:
            return self.offset
        return None if baseline is None else self.factor * baseline + self.offset


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate on one run."""

    gate: Gate
    label: str
    value: float | None
    bound: float | None
    #: Of value - bound, where a baseline is in it.
    interval: Interval | None
    outcome: Outcome
    reason: str

    @property
    def exit_code(self) -> int:
        if self.outcome == "fail":
            return FAILED_EXIT_CODE
        return UNDECIDED_EXIT_CODE if self.outcome == "undecided" and not self.gate.is_undecided_good else 0

    @property
    def sentence(self) -> str:
        """`gate failed: eval.accuracy >= 0.95 (mtp8): 0.91 against 0.95`"""
        word = {"pass": "passed", "fail": "failed", "undecided": "is undecided"}[self.outcome]
        return f"gate {word}: {self.gate.text} ({self.label}): {self.reason}"


def parse_gate(text: str) -> Gate:
    """A gate as the user wrote it; UserError says how to write one."""
    found = _GATE.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"gate {text!r}: not PATH OPERATOR NUMBER; write it like 'eval.accuracy >= 0.95', "
            "'acceptance.acceptance_length >= 0.99 * baseline' or 'eval.accuracy >= baseline - 0.01'"
        )
    if found["undecided"] not in (None, "pass", "fail"):
        raise UserError(f"gate {text!r}: undecided={found['undecided']} is neither pass nor fail")
    is_undecided_good = found["undecided"] == "pass"
    if found["baseline"] is None:
        return Gate(text.strip(), found["path"], found["operator"], None, float(found["number"]), is_undecided_good)
    if found["before"] and found["after"]:
        raise UserError(f"gate {text!r}: two factors of the baseline; write one")
    factor = float(found["before"] or found["after"] or 1)
    offset = float((found["sign"] or "") + found["offset"]) if found["offset"] else 0.0
    return Gate(text.strip(), found["path"], found["operator"], factor, offset, is_undecided_good)


def parse_gates(texts: Iterable[str], *, is_undecided_good: bool = False) -> list[Gate]:
    """Several gates, each of which may say itself that undecided is good."""
    gates = [parse_gate(text) for text in texts]
    return [replace(gate, is_undecided_good=gate.is_undecided_good or is_undecided_good) for gate in gates]


def check_gates(gates: Sequence[Gate], skeleton: dict, *, has_baseline: bool) -> None:
    """UserError for a gate that cannot be judged, before a run starts. `skeleton`: the metrics of a run not begun."""
    for gate in gates:
        check_path(skeleton, gate.path)
        if gate.factor is not None and not has_baseline:
            raise UserError(f"report.gates: {gate.text!r} needs a run to compare with; say report.baseline=DIR")


def check_paths(gates: Sequence[Gate], runs: Iterable[ComparedRun]) -> None:
    """UserError where a gate names no figure of one of the runs."""
    for run in runs:
        for gate in gates:
            number_at(run.metrics, gate.path)


def judge_comparison(gates: Sequence[Gate], comparison: Comparison) -> list[GateResult]:
    """Every gate on every new run. One that names no figure fails: a run that has ended must not be lost for it."""
    return [_judge(gate, pair.new, comparison.base, pair) for pair in comparison.pairs for gate in gates]


def judge_run(gates: Sequence[Gate], run: ComparedRun) -> list[GateResult]:
    """Gates on a run by itself: one against the baseline is undecided."""
    return [_judge(gate, run, None, None) for gate in gates]


def gates_exit_code(results: Iterable[GateResult]) -> int:
    """3 where a gate failed, else 4 where one is undecided and that is not good enough, else 0."""
    codes = {result.exit_code for result in results}
    return next((code for code in (FAILED_EXIT_CODE, UNDECIDED_EXIT_CODE) if code in codes), 0)


def _judge(gate: Gate, run: ComparedRun, base: ComparedRun | None, pair: Pair | None) -> GateResult:
    try:
        value = number_at(run.metrics, gate.path)
        baseline = None if gate.factor is None or base is None else number_at(base.metrics, gate.path)
    except UserError as error:
        return GateResult(gate, run.label, None, None, None, "fail", str(error))
    bound = gate.bound(baseline)

    def result(outcome: Outcome, reason: str, interval: Interval | None = None) -> GateResult:
        return GateResult(gate, run.label, value, bound, interval, outcome, reason)

    if run.record.status != "finished":
        return result("fail", "the run did not finish")
    if value is None:
        return result("fail", "not measured")
    if gate.factor is None:
        is_good = _HOLDS[gate.operator](value, gate.offset)
        return result("pass" if is_good else "fail", f"{value:.6g} against {gate.offset:.6g}")
    if base is None or pair is None:
        return result("undecided", "the base run cannot be read")
    if bound is None:
        return result("fail", "not measured in the base run")
    if (void := _void(gate, base, pair)) is not None:
        return result("fail", void)
    interval = _margin_interval(gate, base, pair)
    if interval is None:
        return result("undecided", _why_no_interval(gate, base, pair))
    return result(_decided(gate.operator, interval), _margin_text(value, bound, interval), interval)


def _margin_text(value: float, bound: float, interval: Interval) -> str:
    return f"{value:.6g} against {bound:.6g}; 95% interval of the margin {interval[0]:+.4g} to {interval[1]:+.4g}"


def _decided(operator: str, interval: Interval) -> Outcome:
    """Whether every margin of the interval satisfies the gate, none does, or some do."""
    ends = [_HOLDS[operator](end, 0.0) for end in interval]
    if all(ends):
        return "pass"
    holds_inside = operator == "==" and interval[0] <= 0 <= interval[1]
    return "undecided" if any(ends) or holds_inside else "fail"


def _void(gate: Gate, base: ComparedRun, pair: Pair) -> str | None:
    """Why this figure of the two runs cannot be compared."""
    if base.record.status != "finished":
        return "the base run did not finish"
    grounds = pair.grounds
    if grounds.model or grounds.data:
        return f"not comparable: {grounds.model or grounds.data}"
    if _is_speed(gate) and grounds.hardware:
        return f"not comparable: {grounds.hardware}"
    if gate.path.startswith("eval.") and grounds.scorer:
        return f"not comparable: {grounds.scorer}"
    return None


def _is_speed(gate: Gate) -> bool:
    return gate.path.startswith(("latency.", "throughput."))


def _margin_interval(gate: Gate, base: ComparedRun, pair: Pair) -> Interval | None:
    """Of figure - bound, drawn alike in both runs; None where there is none."""
    if _is_speed(gate):
        return _repeat_margin(gate, base, pair.new)
    for first, second in pair.changes.sums:
        if gate.path in first.paths:
            chosen = (one.restricted(one.sample_ids, [gate.path]) for one in (first, second))
            return _sample_margin(gate, *chosen)
    return None


def _sample_margin(gate: Gate, base: SampleSums, new: SampleSums) -> Interval | None:
    assert gate.factor is not None
    draws = bootstrap(new.sums, new.ratios) - gate.factor * bootstrap(base.sums, base.ratios) - gate.offset
    counted = np.minimum(num_counted(base.sums, base.ratios), num_counted(new.sums, new.ratios))
    return percentile_interval(draws, counted)[0]


def _repeat_margin(gate: Gate, base: ComparedRun, new: ComparedRun) -> Interval | None:
    if not _has_repeats(base, new):
        return None
    before, after = ([number_at(part, gate.path) for part in run.speed_by_repeat] for run in (base, new))
    bounds = [gate.bound(value) for value in before]
    if any(value is None for value in [*bounds, *after]):
        return None
    difference = paired_repeat_difference(
        [value for value in bounds if value is not None], [value for value in after if value is not None]
    )
    return difference.interval


def _has_repeats(base: ComparedRun, new: ComparedRun) -> bool:
    """Enough of them, each run in one go."""
    is_whole = base.record.num_segments == 1 and new.record.num_segments == 1
    return is_whole and min(base.num_repeats, new.num_repeats) >= MIN_REPEATS


def _why_no_interval(gate: Gate, base: ComparedRun, pair: Pair) -> str:
    if _is_speed(gate) and not _has_repeats(base, pair.new):
        return f"no interval: speed needs load.repeats={MIN_REPEATS} or more in both runs, each in one go"
    if any(gate.path in first.paths for first, _ in pair.changes.sums):
        return f"no interval: fewer than {MIN_SAMPLES} samples"
    return "this figure has no paired interval; give the gate a number instead of the baseline"
