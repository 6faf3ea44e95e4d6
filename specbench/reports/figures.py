"""Which figures stand side by side, in the order and the units that pull requests use.

Belongs here: label, address in metrics.json, unit, kind of difference and direction of each figure. Does not belong
here: values, tables, tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from specbench.reports.metric_path import metric_at
from specbench.reports.number_format import NOT_MEASURED
from specbench.reports.table import Cell

#: Printed for a position that a run does not have.
NO_POSITION = "—"

Kind = Literal["accuracy", "speed", "drafts", "position"]


def hundredths(value: float) -> str:
    return f"{value:.2f}"


def tenths(value: float) -> str:
    return f"{value:.1f}"


def whole(value: float) -> str:
    return f"{value:.0f}"


def grouped(value: float) -> str:
    return f"{value:,.0f}"


def as_percent(fraction: float) -> str:
    """Without the sign, which stands in the label."""
    return f"{100 * fraction:.2f}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a comparison."""

    label: str
    #: Address in metrics.json.
    path: str
    written: Callable[[float], str]
    kind: Kind
    #: A fraction differs by points, anything else by a share of the base.
    is_fraction: bool = False
    #: Which way is better; None where neither is.
    better: Literal["higher", "lower"] | None = None
    #: Its direction means something only where both runs draft the same number of tokens a step.
    needs_equal_k: bool = False

    def value(self, metrics: dict) -> float | None:
        value = metric_at(metrics, self.path)
        assert value is None or isinstance(value, int | float), self.path
        return value

    def cell(self, metrics: dict) -> Cell:
        """n/a where it was not measured; a position that the run does not have is a dash."""
        value = self.value(metrics)
        missing = NO_POSITION if self.kind == "position" else NOT_MEASURED
        return Cell(value, missing if value is None else self.written(value))

    def change(self, base: float | None, new: float | None) -> float | None:
        """new - base of a fraction, else (new - base) / base; None where it cannot be said."""
        if base is None or new is None:
            return None
        if self.is_fraction:
            return new - base
        return (new - base) / base if base else None

    def change_text(self, change: float | None) -> str:
        """`-7.91 pts`, `+30.5%`"""
        if change is None:
            return NO_POSITION if self.kind == "position" else NOT_MEASURED
        if self.is_fraction:
            return f"{_signed(100 * change, 2)} pts"
        return f"{_signed(100 * change, 1)}%"

    def difference_text(self, difference: float | None) -> str:
        """A difference in the figure's own unit, for intervals."""
        if difference is None:
            return NOT_MEASURED
        if self.is_fraction:
            return f"{_signed(100 * difference, 2)} pts"
        return _signed(difference, 2 if self.kind == "speed" else 3)


def benchmark_figures(num_positions: int) -> list[Figure]:
    """Speed, then drafts, then every position."""
    return [*_SPEED, *_DRAFTS, *(position_figure(position) for position in range(num_positions))]


def position_figure(position: int) -> Figure:
    """Acceptance of all drafts at one position.

    Even the first needs an equal k for a direction: more drafts a step start fewer steps behind accepted ones.
    """
    return Figure(
        f"Per-position acceptance (%) — Pos {position}",
        f"acceptance.per_position[{position}]",
        as_percent,
        "position",
        is_fraction=True,
        better="higher",
        needs_equal_k=True,
    )


def latency_figures() -> list[Figure]:
    """Mean, median, p90 and p99 of every latency."""
    names = {
        "ttft_ms": "TTFT (ms)",
        "tpot_ms": "TPOT (ms)",
        "itl_step_ms": "ITL per step (ms)",
        "itl_token_ms": "ITL per token (ms)",
        "e2el_ms": "E2EL (ms)",
    }
    statistics = {"mean": "Mean", "p50": "Median", "p90": "P90", "p99": "P99"}
    return [
        _speed(f"{statistic_label} {label}", f"latency.{name}.{statistic}", needs_equal_k=name == "itl_step_ms")
        for name, label in names.items()
        for statistic, statistic_label in statistics.items()
    ]


def _speed(
    label: str,
    path: str,
    better: Literal["higher", "lower"] = "lower",
    written: Callable[[float], str] = hundredths,
    needs_equal_k: bool = False,
) -> Figure:
    return Figure(label, path, written, "speed", better=better, needs_equal_k=needs_equal_k)


_LATENCY_BY_PATH = {figure.path: figure for figure in latency_figures()}
_SPEED = (
    _speed("Benchmark duration (s)", "throughput.duration_s"),
    _speed("Request throughput (req/s)", "throughput.request_per_s", "higher"),
    _speed("Output token throughput (tok/s)", "throughput.output_token_per_s", "higher"),
    *(
        _LATENCY_BY_PATH[f"latency.{name}.{statistic}"]
        for name in ("ttft_ms", "tpot_ms", "itl_step_ms", "e2el_ms")
        for statistic in ("p50", "p99")
    ),
)
#: With another k drafts are fewer and of more tokens: equal drafters differ in all of these.
_DRAFTS = (
    Figure(
        "Acceptance rate (%)",
        "acceptance.acceptance_rate",
        as_percent,
        "drafts",
        is_fraction=True,
        better="higher",
        needs_equal_k=True,
    ),
    Figure(
        "Acceptance length", "acceptance.acceptance_length", hundredths, "drafts", better="higher", needs_equal_k=True
    ),
    Figure("Draft tokens", "acceptance.draft_tokens", grouped, "drafts"),
    Figure("Accepted tokens", "acceptance.accepted_tokens", grouped, "drafts"),
)
ACCURACY = Figure("Accuracy (%)", "eval.accuracy", as_percent, "accuracy", is_fraction=True, better="higher")
ACCEPTANCE_RATE, ACCEPTANCE_LENGTH = _DRAFTS[0], _DRAFTS[1]
OUTPUT_THROUGHPUT = _SPEED[2]


def _signed(value: float, digits: int) -> str:
    """With its sign, unless it is nothing at all."""
    return f"{value:+.{digits}f}" if value else f"{0:.{digits}f}"
