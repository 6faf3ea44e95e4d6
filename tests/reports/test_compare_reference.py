"""The tables of the pull request that added multi-module MTP to vLLM, from event logs with its counts.

Every value cell comes out digit for digit. So does every difference, but for eight that were computed there from
rounded values: ours come from unrounded ones.
"""

from __future__ import annotations

import dataclasses

import pytest

from specbench.record_columns import VerifyStepColumns
from specbench.reports.compare import Comparison, compare
from specbench.reports.compared_run import ComparedRun, run_of_log
from specbench.reports.side_by_side import benchmark_table, bucket_table, evaluation_table
from specbench.reports.table import ReportTable
from specbench.run_directory import EventLog
from tests.reports.event_logs import make_request, make_run, make_sample, make_step
from tests.reports.reference_logs import Reference, Times, even, positions, reference_log

POSITION = "Per-position acceptance (%) — Pos "
LABELS = [
    "Benchmark duration (s)",
    "Request throughput (req/s)",
    "Output token throughput (tok/s)",
    "Median TTFT (ms)",
    "P99 TTFT (ms)",
    "Median TPOT (ms)",
    "P99 TPOT (ms)",
    "Median ITL per step (ms)",
    "P99 ITL per step (ms)",
    "Median E2EL (ms)",
    "P99 E2EL (ms)",
    "Acceptance rate (%)",
    "Acceptance length",
    "Draft tokens",
    "Accepted tokens",
    *(f"{POSITION}{position}" for position in range(8)),
]


def reference(
    num_requests: int,
    tokens: int,
    tokens_per_s: float,
    drafts: int,
    accepted: int,
    percents: list[float],
    ttft: Times,
    tpot: Times,
    itl: Times,
    e2el: Times | None = None,
) -> Reference:
    """A column, from what its table prints and the output tokens that its throughput and duration agree on."""
    return Reference(
        num_requests,
        tokens,
        drafts,
        positions(drafts, percents, accepted),
        tokens / tokens_per_s,
        ttft,
        tpot,
        itl,
        e2el,
    )


def run_of(column: Reference, **spec: object) -> ComparedRun:
    record = make_run(column.k)
    record.config["spec"] |= spec
    return run_of_log(record, reference_log(column), f"runs/mtp{column.k}")


def comparison(*columns: Reference) -> Comparison:
    return compare([run_of(column) for column in columns])


def cells(table: ReportTable) -> dict[str, list[str]]:
    return {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}


def rows(text: str, labels: list[str]) -> dict[str, list[str]]:
    """Label -> cells of one printed column after the other."""
    columns = [line.split() for line in text.strip().splitlines()]
    assert all(len(column) == len(labels) for column in columns)
    return {label: [column[index] for column in columns] for index, label in enumerate(labels)}


GSM8K = (
    reference(
        *(1319, 452_988, 1646.15, 246_348, 205_916, [83.59]),
        *(Times(363.58, 1437.07), Times(37.18, 45.42), Times(22.40, 223.44)),
    ),
    reference(
        *(1319, 461_803, 2148.42, 104_880, 356_839, [75.68, 60.11, 49.76, 41.13, 35.38, 29.80, 26.08, 22.29]),
        *(Times(426.77, 1556.07), Times(27.48, 38.04), Times(159.60, 251.09)),
    ),
)
SPEED_BENCH_8K = (
    reference(
        *(128, 262_144, 1589.30, 146_188, 115_886, [79.27]),
        *(Times(333.40, 3226.45), Times(9.74, 10.47), Times(15.40, 169.54), Times(20306.49, 23469.09)),
    ),
    reference(
        *(128, 262_144, 1940.19, 66_014, 196_334, [73.17, 55.13, 42.84, 34.64, 28.59, 24.10, 20.80, 18.14]),
        *(Times(294.58, 3532.19), Times(7.66, 10.00), Times(25.57, 177.97), Times(16297.28, 21144.10)),
    ),
)
MMAU = (
    reference(
        *(200, 44_729, 1195.32, 24_982, 19_650, [78.66]),
        *(Times(225.82, 689.84), Times(12.48, 15.62), Times(14.57, 199.25)),
    ),
    reference(
        *(200, 44_977, 1172.70, 12_182, 32_928, [73.83, 52.86, 39.44, 29.67, 23.81, 19.64, 16.83, 14.22]),
        *(Times(258.79, 586.49), Times(12.53, 17.79), Times(24.74, 215.30)),
    ),
)
SPEED_BENCH_2K = (
    reference(
        *(256, 524_288, 1599.92, 296_198, 227_942, [76.96]),
        *(Times(219.03), Times(9.86), Times(15.24), Times(20449.51)),
    ),
    reference(
        *(256, 524_288, 1882.04, 143_689, 381_022, [70.15, 51.22, 38.47, 30.12, 24.22, 19.91, 16.75, 14.33]),
        *(Times(260.82), Times(8.29), Times(25.60), Times(17242.75)),
    ),
    reference(
        *(256, 524_288, 1925.82, 138_700, 386_019, [70.31, 52.24, 40.23, 32.25, 26.45, 22.03, 18.72, 16.09]),
        *(Times(246.65), Times(8.07), Times(25.69), Times(16873.60)),
    ),
)

PRINTED = {
    "gsm8k": (
        GSM8K,
        """
        275.18 4.79 1646.15 363.58 1437.07 37.18 45.42 22.40 223.44 . . 83.59 1.84 246,348 205,916 83.59 — — — — — — —
        214.95 6.14 2148.42 426.77 1556.07 27.48 38.04 159.60 251.09 . . 42.53 4.40 839,040 356,839
            75.68 60.11 49.76 41.13 35.38 29.80 26.08 22.29
        -21.9% +28.2% +30.5% +17.4% +8.3% -26.1% -16.2% +612.5% +12.4% . . -41.06_pts +139.1% +240.6% +73.3%
            -7.91_pts — — — — — — —
        """,
        {"Request throughput (req/s)": "+28.0%", "Acceptance length": "+139.8%"},
    ),
    "speed_bench_8k": (
        SPEED_BENCH_8K,
        """
        164.94 0.78 1589.30 333.40 3226.45 9.74 10.47 15.40 169.54 20306.49 23469.09 79.27 1.79 146,188 115,886
            79.27 — — — — — — —
        135.11 0.95 1940.19 294.58 3532.19 7.66 10.00 25.57 177.97 16297.28 21144.10 37.18 3.97 528,112 196,334
            73.17 55.13 42.84 34.64 28.59 24.10 20.80 18.14
        -18.1% +21.8% +22.1% -11.6% +9.5% -21.4% -4.5% +66.0% +5.0% -19.7% -9.9% -42.09_pts +121.8% +261.2% +69.4%
            -6.10_pts — — — — — — —
        """,
        {
            "Request throughput (req/s)": "+22.1%",
            "Acceptance length": "+121.7%",
            "Acceptance rate (%)": "-42.10 pts",
            "Draft tokens": "+261.3%",
        },
    ),
    "mmau": (
        MMAU,
        """
        37.42 5.34 1195.32 225.82 689.84 12.48 15.62 14.57 199.25 . . 78.66 1.79 24,982 19,650 78.66 — — — — — — —
        38.35 5.21 1172.70 258.79 586.49 12.53 17.79 24.74 215.30 . . 33.79 3.70 97,456 32,928
            73.83 52.86 39.44 29.67 23.81 19.64 16.83 14.22
        +2.5% -2.4% -1.9% +14.6% -15.0% +0.4% +13.9% +69.8% +8.1% . . -44.87_pts +106.7% +290.2% +67.6%
            -4.83_pts — — — — — — —
        """,
        {"Acceptance length": "+107.3%", "Draft tokens": "+290.1%"},
    ),
    "speed_bench_2k": (
        SPEED_BENCH_2K,
        """
        327.70 0.78 1599.92 219.03 . 9.86 . 15.24 . 20449.51 . 76.96 1.77 296,198 227,942 76.96 — — — — — — —
        278.57 0.92 1882.04 260.82 . 8.29 . 25.60 . 17242.75 . 33.15 3.65 1,149,512 381,022
            70.15 51.22 38.47 30.12 24.22 19.91 16.75 14.33
        272.24 0.94 1925.82 246.65 . 8.07 . 25.69 . 16873.60 . 34.79 3.78 1,109,600 386,019
            70.31 52.24 40.23 32.25 26.45 22.03 18.72 16.09
        """,
        {},
    ),
}


def joined(text: str) -> str:
    """A line that is indented further goes on with the one before."""
    lines: list[str] = []
    for line in text.strip("\n").splitlines():
        if line.startswith(" " * 12):
            lines[-1] += line
        elif line.strip():
            lines.append(line)
    return "\n".join(lines)


@pytest.mark.parametrize("name", PRINTED)
def test_benchmark_table(name: str) -> None:
    columns, text, computed_from_rounded = PRINTED[name]
    printed = rows(joined(text), LABELS)
    found = comparison(*columns)
    table = cells(benchmark_table(found.runs, found.changes))
    for label, expected in printed.items():
        ours = [cell.partition(" (")[0].replace(" pts", "_pts") for cell in table[label][: len(expected)]]
        if label in computed_from_rounded:
            assert table[label][2].partition(" (")[0] == computed_from_rounded[label]
            ours[2] = expected[2]
        assert [one if other != "." else "." for one, other in zip(ours, expected, strict=True)] == expected, label


def test_with_another_k_no_figure_of_single_steps_is_better_or_worse() -> None:
    found = comparison(*MMAU)
    table = cells(benchmark_table(found.runs, found.changes))
    marked = {label for label, row in table.items() if "better" in row[-1] or "worse" in row[-1]}
    assert marked == set()


def evaluated(column: Reference, num_correct: dict[str, int], hits: tuple[int, int] | None = None) -> ComparedRun:
    """A run with answers: so many right of each category, the others wrong; `hits` are cached of prompt tokens."""
    log: EventLog = reference_log(column)
    left = dict(num_correct)
    for request in log.requests:
        name = request.category or "all"
        log.samples.append(make_sample(request.request_id, float(left[name] > 0), category=request.category))
        left[name] -= 1
    cached, prompts = (even(total, len(log.requests)) if hits else None for total in hits or (0, 0))
    log.requests = [
        dataclasses.replace(
            request,
            num_cached_prompt_tokens=None if cached is None else int(cached[index]),
            num_prompt_tokens=100 if prompts is None else int(prompts[index]),
        )
        for index, request in enumerate(log.requests)
    ]
    return run_of_log(make_run(8), log, "runs/eval")


def evaluation_column(
    num_requests: int, tokens: int, drafts: int, accepted: int, percents: list[float], duration_s: float, **more: object
) -> Reference:
    accepted_at = positions(drafts, percents, accepted, digits=1)
    times = {"ttft": Times(503.0), "tpot": Times(28.0), **more}
    return Reference(num_requests, tokens, drafts, accepted_at, duration_s, **times)


def test_gsm8k_evaluation_with_and_without_prefix_caching() -> None:
    off = evaluation_column(*(1319, 462_188, 105_092, 356_977, [75.6, 60.1, 49.8, 41.0, 35.3, 29.7, 26.0, 22.3], 219.4))
    on = evaluation_column(
        *(1319, 467_067, 105_106, 361_818, [75.7, 60.3, 49.9, 41.5, 36.0, 30.6, 26.9, 23.3], 211.4),
        ttft=Times(440.0),
        tpot=Times(26.9),
    )
    runs = [evaluated(off, {"all": 1259}), evaluated(on, {"all": 1256}, hits=(716_992, 852_381))]
    found = compare(runs)
    table = cells(evaluation_table(found.runs, found.changes))
    printed = {
        "Successful / failed requests": ["1319 / 0", "1319 / 0"],
        "Accuracy (scorer official)": ["95.45% (1259/1319)", "95.22% (1256/1319)"],
        "Acceptance rate": ["42.46%", "43.03%"],
        "Acceptance length": ["4.40", "4.44"],
        "Per-position acceptance (%)": [
            "75.6 / 60.1 / 49.8 / 41.0 / 35.3 / 29.7 / 26.0 / 22.3",
            "75.7 / 60.3 / 49.9 / 41.5 / 36.0 / 30.6 / 26.9 / 23.3",
        ],
        "Prefix cache hit rate": ["—", "84.12% (716,992 / 852,381 tokens)"],
        "Mean TTFT": ["503 ms", "440 ms"],
        "Mean TPOT": ["28.0 ms", "26.9 ms"],
        "Output throughput": ["2106.6 tok/s", "2209.4 tok/s"],
        "Benchmark duration": ["219.4 s", "211.4 s"],
    }
    assert {label: row[:2] for label, row in table.items()} == printed


def test_mmau_evaluation_of_one_run() -> None:
    categories = ["music"] * 334 + ["sound"] * 333 + ["speech"] * 333
    column = evaluation_column(
        *(1000, 223_892, 60_000, 163_392, [71.8, 51.3, 38.4, 30.3, 25.0, 21.2, 18.3, 16.0], 272.9),
        categories=categories,
    )
    table = cells(evaluation_table([evaluated(column, {"music": 256, "sound": 260, "speech": 259})]))
    printed = {
        "Successful / failed requests": "1000 / 0",
        "Accuracy (scorer official)": "77.50% (775/1000)",
        "Category music": "76.65% (256/334)",
        "Category sound": "78.08% (260/333)",
        "Category speech": "77.78% (259/333)",
        "Acceptance rate": "34.04%",
        "Acceptance length": "3.72",
        "Per-position acceptance (%)": "71.8 / 51.3 / 38.4 / 30.3 / 25.0 / 21.2 / 18.3 / 16.0",
        "Benchmark duration": "272.9 s",
    }
    assert {label: table[label][0] for label in printed} == printed


def pairs_log(k: int, buckets: dict[int, tuple[int, float]]) -> EventLog:
    """A request of two steps for each draft: the first accepts as many as its bucket says, the second 1 or nothing."""
    log, steps = EventLog(), []
    for previous, (count, percent) in buckets.items():
        hits = round(count * percent / 100)
        for index in range(count):
            name, hit = f"{previous}-{index}", int(index < hits)
            log.requests.append(make_request(name, num_output_tokens=3 + previous + hit))
            steps += [make_step(name, 0, k, previous), make_step(name, 1, k, hit, output_index=2 + previous)]
    log.verify_steps = VerifyStepColumns.of(steps)
    return log


def test_buckets_by_previous_step_side_by_side() -> None:
    counts = [2418, 1529, 955, 846, 597, 543, 368, 361, 2268]
    percents = [70.10, 69.91, 73.30, 69.15, 72.36, 74.95, 71.47, 75.62, 90.21]
    logs = {
        1: pairs_log(1, {0: (4214, 70.43), 1: (20673, 85.66)}),
        8: pairs_log(8, dict(enumerate(zip(counts, percents, strict=True)))),
    }
    found = compare([run_of_log(make_run(k), log, f"runs/mtp{k}") for k, log in logs.items()])
    table = bucket_table(found.runs, found.changes)
    assert table is not None
    by_label = cells(table)
    assert by_label["0"][:4] == ["4,214", "70.43", "2,418", "70.10"]
    assert by_label["1"][:4] == ["20,673", "85.66", "1,529", "69.91"]
    for j in range(2, 9):
        assert by_label[str(j)][:4] == ["—", "—", f"{counts[j]:,}", f"{percents[j]:.2f}"]
    assert by_label["all with a previous step"][:4] == ["24,887", "83.08", "9,885", "75.57"]
    # The reference's 71.2 against 70.4 and 90.2 against 85.7: classes that mean the same with either k.
    assert by_label["fewer than k"] == ["4,214", "70.43", "7,617", "71.21", "+0.78 pts"]
    assert by_label["k (all of them)"] == ["20,673", "85.66", "2,268", "90.21", "+4.55 pts"]
    assert by_label["1"][-1] == "—", "one accepted of one is another class than one accepted of eight"
