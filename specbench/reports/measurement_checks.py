"""Health checks of the measuring itself: counters, output check, chunks of a client, percentiles.

Belongs here: whether the figures are what they say they are. Does not belong here: whether drafts are as good as they
should be (drafting_checks.py), what text was decoded (text_checks.py).
"""

from __future__ import annotations

from specbench.reports.cost_model import HELD_UP_RATIO
from specbench.reports.health_check import (
    ALARM_STANDARD_ERRORS,
    FAILED,
    NOT_CHECKED,
    OK,
    Evidence,
    Finding,
    HealthCheck,
    judged,
    not_checked,
)
from specbench.reports.identities import broken_identities
from specbench.reports.latency import MIN_REQUESTS_OF_P99
from specbench.reports.load_metrics import MAX_MEAN_LAG_MS

#: Of the time in decode; beyond it speed is that of what held the steps up.
_MAX_HELD_UP_SHARE = 0.1

#: `acceptance_source` of the embedded engine, which sees every step.
_ENGINE = "engine"

_OUTPUT_STATUS = {
    "identical": OK,
    "near_ties": OK,
    "mismatch": FAILED,
    "not_checked": NOT_CHECKED,
    "not_applicable": NOT_CHECKED,
}


def _identities(evidence: Evidence) -> Finding:
    checks = evidence.metrics["checks"]["identities"]
    applying = [name for name, check in checks.items() if check["holds"] is not None]
    broken = broken_identities(evidence.metrics)
    if not evidence.columns.requests:
        return not_checked("no request was recorded")
    text = f"broken: {', '.join(broken)}" if broken else f"all {len(applying)} that apply hold"
    return judged(bool(broken), text, {"applying": len(applying), "broken": len(broken)}, FAILED)


def _output(evidence: Evidence) -> Finding:
    check = evidence.run.output_check
    if check is None:
        return not_checked("no output was replayed without speculation")
    if _OUTPUT_STATUS[check.status] == NOT_CHECKED:
        return not_checked(check.reason or "no output was replayed without speculation")
    text = (
        f"{check.identical} identical, {check.near_ties} with near ties, {check.mismatches} different "
        f"of {check.compared} requests"
    )
    numbers = {"compared": check.compared, "near_ties": check.near_ties, "mismatches": check.mismatches}
    return Finding(_OUTPUT_STATUS[check.status], text, numbers)


def _chunks(evidence: Evidence) -> Finding:
    """A step emits at most k + 1 tokens; a row of more is several steps that reached the client as one chunk."""
    source, emitted = evidence.run.acceptance_source, evidence.columns.num_emitted
    if source == _ENGINE:
        return not_checked("does not apply: the engine saw every step, there are no chunks")
    if len(emitted) == 0:
        return not_checked(f"the source {source!r} tells nothing of single steps")
    if not evidence.k:
        return not_checked("how many tokens a step may emit is not known: speculation was off, or its k is not")
    merged, largest = int((emitted > evidence.k + 1).sum()), int(emitted.max())
    text = (
        f"{merged:,} of {len(emitted):,} chunks hold more than k + 1 = {evidence.k + 1} tokens, the largest {largest}"
    )
    return judged(merged > 0, text, {"merged": merged, "chunks": len(emitted), "largest": largest})


def _percentiles(evidence: Evidence) -> Finding:
    completed = evidence.metrics["requests"]["completed"]
    if not completed:
        return not_checked("no request was completed")
    text = f"{completed:,} completed request{'' if completed == 1 else 's'}"
    return judged(completed < MIN_REQUESTS_OF_P99, text, {"completed": completed})


def _warmup(evidence: Evidence) -> Finding:
    if not evidence.metrics["requests"]["warmup"]:
        return not_checked("there was no warm-up")
    failed = evidence.metrics["requests"]["warmup_failed"]
    text = f"{failed:,} request{'' if failed == 1 else 's'} of the warm-up failed"
    return judged(failed > 0, text, {"failed": failed})


def _timetable(evidence: Evidence) -> Finding:
    lag_ms = evidence.metrics["load"]["lag_ms"]
    if not lag_ms["n"]:
        return not_checked("does not apply: the load has no timetable")
    text = f"mean lag {lag_ms['mean']:.2f} ms of {lag_ms['n']:,} submissions, 99th percentile {lag_ms['p99']:.2f} ms"
    return judged(lag_ms["mean"] > MAX_MEAN_LAG_MS, text, {"mean_ms": lag_ms["mean"], "p99_ms": lag_ms["p99"]})


def _kept_up(evidence: Evidence) -> Finding:
    backlog = evidence.metrics["load"]["backlog"]
    if backlog["standard_error"] is None:
        return not_checked("does not apply: the load has no rate that stays, or too few requests")
    growth = backlog["at_end"] - backlog["at_quarter"]
    text = f"{backlog['at_quarter']:g} requests due and not done after a quarter, {backlog['at_end']:g} at the last"
    return judged(growth > ALARM_STANDARD_ERRORS * backlog["standard_error"], text, backlog)


def _held_up(evidence: Evidence) -> Finding:
    held_up = evidence.metrics["cost_model"]["held_up"]
    if held_up["share"] is None:
        return not_checked("too few steps in decode with about as many rows are known")
    text = (
        f"{held_up['steps']:,} of {held_up['judged']:,} steps in decode held up, {held_up['share']:.2%} of their time"
    )
    if held_up["steps"]:
        text += f", the longest {held_up['longest_ms']:,.0f} ms"
    return judged(held_up["share"] > _MAX_HELD_UP_SHARE, text, held_up)


CHECKS = (
    HealthCheck(
        name="identities",
        title="Counters agree with each other",
        threshold="every identity that applies holds",
        why="a figure from counters that contradict each other means nothing",
        where="the table of identities under Verdict names the two sides; then whoever writes that record",
        look=_identities,
    ),
    HealthCheck(
        name="output_check",
        title="Output equals plain decoding",
        threshold="no token differs beyond a near tie",
        why="speculation must not change the text; a speed-up with other text is no speed-up",
        where="the differing tokens under Verdict; verification, the commit of accepted rows, rows that share a slot",
        look=_output,
    ),
    HealthCheck(
        name="merged_chunks",
        title="One step a chunk",
        threshold="no chunk holds more than k + 1 tokens",
        why="tokens of several steps that arrive as one chunk make ITL too long and acceptance per step too high",
        where="the server's stream interval, a proxy that buffers, a client that reads too slowly",
        look=_chunks,
    ),
    HealthCheck(
        name="held_up",
        title="Steps took their time",
        threshold=(
            f"steps of over {HELD_UP_RATIO:g} times the median of those with about as many rows hold at most "
            f"{_MAX_HELD_UP_SHARE:.0%} of the time in decode"
        ),
        why="throughput and latency are then those of what held the steps up, and differ from run to run",
        where="other work on this machine (hardware in run.json); on a busy CPU, threads of torch that wait for each "
        "other (OMP_NUM_THREADS=1); kernels compiled during the run (load.warmup)",
        look=_held_up,
    ),
    HealthCheck(
        name="warmup",
        title="The warm-up ran",
        threshold="none of its requests failed",
        why="what it did not do, compile and fill, the first measured requests did in its place",
        where="the errors of the warm-up's requests in requests.parquet",
        look=_warmup,
    ),
    HealthCheck(
        name="timetable",
        title="Requests left on time",
        threshold=f"mean lag of submission at most {MAX_MEAN_LAG_MS:g} ms",
        why="a client that sends late sends another load, and hides the waiting that a slow target causes",
        where="other work on this machine's processors; how long the engine holds Python's lock",
        look=_timetable,
    ),
    HealthCheck(
        name="kept_up",
        title="The target kept up with the load",
        threshold=f"growth of requests due and not done within {ALARM_STANDARD_ERRORS:g} standard errors",
        why="behind a rate that is above the target's, latency measures how long the run was",
        where="load.rate against the throughput of load=offline",
        look=_kept_up,
    ),
    HealthCheck(
        name="p99_requests",
        title="Enough requests for a p99",
        threshold=f"{MIN_REQUESTS_OF_P99} completed requests",
        why="the 99th percentile of fewer is little more than their largest value",
        where="eval.num_samples, load.repeats",
        look=_percentiles,
    ),
)
