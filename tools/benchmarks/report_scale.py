"""How long a report and a comparison take and how much memory, against the number of verify steps in the event log.

    python tools/benchmarks/report_scale.py [--steps 1e5,1e6,1e7]

For each size: two made-up logs are written as parquet (not timed), then `specbench report` runs over the first and
`specbench compare` over both, each in a process of its own on one core, which reports its seconds, processor seconds
and peak memory. Exit code 1 when the largest size misses the goal: a report of 10 million verify steps within 20 s and
3 GB and a comparison of two such within 45 s, or when the cost of a step grows with their number. Both goals are of
processor seconds: those of one core that nobody else is using.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path

import numpy as np

from specbench.record_columns import EngineStepColumns, VerifyStepColumns
from specbench.records import DataIdentity, ModelIdentity, OutputCheck, RequestRecord, RunRecord, SampleRecord
from specbench.run_directory import EventLog, RunDirectory

#: At `GOAL_STEPS`.
GOAL_REPORT_S, GOAL_COMPARE_S, GOAL_GIB, GOAL_STEPS = 20.0, 45.0, 3.0, 10_000_000
#: Seconds a step at the largest size over those at the size before it: linear but for noise.
MAX_GROWTH = 1.5
STEPS_A_REQUEST, K, CONCURRENCY, STEP_S = 760, 8, 8, 0.02

#: Runs in the measured process: the command line, its output thrown away, then what it took.
MEASURED = """
import contextlib, io, json, resource, sys, time
from specbench.cli import main
start, busy = time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(io.StringIO()):
    code = main(json.loads(sys.argv[1]))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps([code, time.perf_counter() - start, time.process_time() - busy, peak]))
"""


def make_run() -> RunRecord:
    """A finished run of a model that is named after what it is."""
    config = {
        "model": {"name": "made_up", "checkpoint": None},
        "spec": {"name": f"mtp{K}", "method": "mtp", "num_speculative_tokens": K},
        "parallel": {"name": "tp1", "tensor_parallel_size": 1},
        "eval": {"name": "gsm8k", "scorer": "official"},
        "sampling": {"name": "greedy", "temperature": 0.0},
        "load": {"name": "closed", "concurrency": CONCURRENCY},
        "report": {"name": "default", "formats": ["svg"]},
    }
    return RunRecord(
        status="finished",
        config=config,
        command="tools/benchmarks/report_scale.py",
        version="0",
        commit=None,
        is_dirty=None,
        hardware={},
        packages={},
        model=ModelIdentity("made_up", "made_up", None, None, None, False, None, K),
        data=DataIdentity("made_up", None, None, None, False),
        acceptance_source="engine",
        started_at="2026-01-01T00:00:00+00:00",
        output_check=OutputCheck("not_checked", reason="a made-up log"),
    )


def make_log(num_steps: int, seed: int) -> EventLog:
    """A log of `num_steps` verify steps, a request for each STEPS_A_REQUEST of them, acceptance 0.8 a position."""
    rng = np.random.default_rng(seed)
    num_requests = -(-num_steps // STEPS_A_REQUEST)
    request = np.arange(num_steps) // STEPS_A_REQUEST
    steps = _verify_steps(rng, request, [f"r{index}" for index in range(num_requests)])
    num_tokens = 1 + np.bincount(request, weights=steps.num_emitted).astype(int)
    requests = [_request(index, int(tokens)) for index, tokens in enumerate(num_tokens)]
    samples = [_sample(rng, index, int(tokens)) for index, tokens in enumerate(num_tokens)]
    return EventLog(requests, steps, _engine_steps(rng, num_steps // CONCURRENCY), samples)


def _start_s(request: np.ndarray) -> np.ndarray:
    return request // CONCURRENCY * STEPS_A_REQUEST * STEP_S


def _verify_steps(rng: np.random.Generator, request: np.ndarray, request_ids: list[str]) -> VerifyStepColumns:
    step = np.arange(len(request)) % STEPS_A_REQUEST
    accepted = np.minimum(rng.geometric(0.2, len(request)) - 1, K)
    emitted_before = np.cumsum(accepted + 1) - (accepted + 1)
    zeros = np.zeros(len(request), np.int64)
    return VerifyStepColumns(
        request_ids=request_ids,
        request=request,
        step=step,
        engine_step=request // CONCURRENCY * STEPS_A_REQUEST + step,
        output_index=1 + emitted_before - emitted_before[::STEPS_A_REQUEST][request],
        num_drafted=zeros + K,
        num_accepted=accepted,
        num_emitted=accepted + 1,
        num_discarded=zeros,
        is_trimmed=zeros.astype(bool),
        batch_size=zeros + CONCURRENCY,
        end_s=_start_s(request) + STEP_S * (step + 1 + 0.1 * rng.random(len(request))),
    )


def _engine_steps(rng: np.random.Generator, num_steps: int) -> EngineStepColumns:
    index, ones = np.arange(num_steps), np.ones(num_steps, np.int64)
    return EngineStepColumns(
        engine_step=index,
        start_s=STEP_S * index,
        end_s=STEP_S * (index + 0.9),
        num_prefill_tokens=0 * ones,
        num_decode_requests=CONCURRENCY * ones,
        num_tokens=CONCURRENCY * (K + 1) * ones,
        schedule_s=1e-4 * rng.random(num_steps),
        target_s=0.6 * STEP_S * (1 + 0.1 * rng.random(num_steps)),
        verify_s=np.full(num_steps, np.nan),
        draft_s=0.2 * STEP_S * (1 + 0.1 * rng.random(num_steps)),
        kv_blocks_used=100 * ones,
        num_preempted=0 * ones,
        num_evicted_blocks=0 * ones,
        idle_s=np.nan * ones,
    )


def _request(index: int, num_tokens: int) -> RequestRecord:
    start_s = float(_start_s(np.array(index)))
    end_s = start_s + STEPS_A_REQUEST * STEP_S
    category = "abcd"[index % 4]
    return RequestRecord(
        f"r{index}", f"s{index}", 0, 0, False, category, 500 + index % 300, 0, num_tokens, "stop",
        start_s, start_s, start_s + STEP_S / 2, end_s, 0, None,
    )  # fmt: skip


def _sample(rng: np.random.Generator, index: int, num_tokens: int) -> SampleRecord:
    score = float(rng.random() < 0.9)
    prompt, output = (array("i", rng.integers(0, 50_000, n).tolist()) for n in (500, num_tokens))
    return SampleRecord(
        f"s{index}", 0, 0, "made up", prompt, "made up", "", output, "1",
        {"official": "1"}, {"official": score}, False, "abcd"[index % 4],
    )  # fmt: skip


def write_run(path: Path, num_steps: int, seed: int) -> None:
    """A finished run directory without a journal."""
    directory = RunDirectory.create(path)
    directory.write_run(make_run())
    directory.write_tables(make_log(num_steps, seed))


def measure(arguments: list[str]) -> dict:
    """One command of specbench in a process of its own, on one core."""
    core = min(os.sched_getaffinity(0))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ARROW_NUM_THREADS": "1"}
    done = subprocess.run(
        ["taskset", "-c", str(core), sys.executable, "-c", MEASURED, json.dumps(arguments)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, seconds, busy_s, peak_gib = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr
    return {"seconds": seconds, "busy_s": busy_s, "peak_gib": peak_gib}


def missed_goals(reports: dict[int, dict], comparisons: dict[int, dict]) -> list[str]:
    """What the measurements fall short of; of seconds and memory nothing where they were not made at GOAL_STEPS."""
    missed = []
    if GOAL_STEPS in reports:
        for what, one, goal_s in (
            ("a report", reports[GOAL_STEPS], GOAL_REPORT_S),
            ("a comparison", comparisons[GOAL_STEPS], GOAL_COMPARE_S),
        ):
            if one["busy_s"] > goal_s:
                missed.append(f"{what} of {GOAL_STEPS:,} steps took {one['busy_s']:.1f} s, more than {goal_s:g}")
        if (peak_gib := reports[GOAL_STEPS]["peak_gib"]) > GOAL_GIB:
            missed.append(f"a report of {GOAL_STEPS:,} steps took {peak_gib:.2f} GiB, more than {GOAL_GIB:g}")
    return missed + _growths("report", reports) + _growths("comparison", comparisons)


def _growths(what: str, measured: dict[int, dict]) -> list[str]:
    """What a step costs at the largest size, where that is more than linear."""
    sizes = sorted(measured)
    if len(sizes) < 2:
        return []
    growth = measured[sizes[-1]]["busy_s"] / sizes[-1] / (measured[sizes[-2]]["busy_s"] / sizes[-2])
    if growth <= MAX_GROWTH:
        return []
    return [f"a step at {sizes[-1]:,} costs the {what} {growth:.2f} times one at {sizes[-2]:,}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="1e5,1e6,1e7", help="numbers of verify steps, rising")
    sizes = [int(float(size)) for size in parser.parse_args().steps.split(",")]
    reports, comparisons = {}, {}
    print(f"{'steps':>12} {'what':>12} {'seconds':>9} {'of processor':>13} {'peak (GiB)':>11}")
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder, name) for name in ("base", "new")]
            for seed, path in enumerate(paths):
                write_run(path, size, seed)
            reports[size] = measure(["report", str(paths[0])])
            comparisons[size] = measure(["compare", *map(str, paths)])
        for what, one in (("report", reports[size]), ("comparison", comparisons[size])):
            cells = f"{size:>12,} {what:>12} {one['seconds']:>9.2f} {one['busy_s']:>13.2f} {one['peak_gib']:>11.2f}"
            print(cells, flush=True)
    missed = missed_goals(reports, comparisons)
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
